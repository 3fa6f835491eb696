"""On a CUDA device: equality, races, graph replay, laws over many draws, invariances. `-m gpu`.

With OUTRIDER_GPU_TESTS=interpreter the tests' own code runs without a device, on tiny sizes.
"""

import os

import pytest
import torch
from cases import Case, build, same, twin

from outrider.sampling.sampling_params import SamplingParams, rows
from outrider.types import DrawKind, Draws, Laws

REHEARSAL = os.environ.get("OUTRIDER_GPU_TESTS") == "interpreter"
HERE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cpu" if REHEARSAL else "cuda"
needs_device = pytest.mark.skipif(not HERE, reason="needs a CUDA device and Triton's compiler")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HERE or REHEARSAL), reason="needs a CUDA device"),
]

OPS = ("chain", "block", "match", "tree", "traversal")


def sizes(full, tiny):
    """What a device verifies, or what the interpreter does in its place."""
    return tiny if REHEARSAL else full


def _to(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(part, device) for part in value))
    return value


def _cuda(case):
    return tuple(_to(part, DEVICE) for part in build(case))


def _verify(op, *inputs):
    from one_launch import chain_one_launch

    from outrider.ops.triton import BACKEND

    if op == "one launch":
        return chain_one_launch(*inputs)[0]
    return BACKEND.ops[f"verify:{op}"](*inputs)


def _counts(op):
    return (2, 2) if op in ("tree", "traversal") else (1,) * 5


@pytest.mark.parametrize("dtype", sizes(["fp32", "bf16", "fp16"], ["bf16"]))
@pytest.mark.parametrize("vocab", sizes([257, 32_000, 50_257, 151_936], [37]))
@pytest.mark.parametrize("op", OPS)
def test_equals_the_twin(op, vocab, dtype):
    case = Case(counts=_counts(op), vocab=vocab, dtype=dtype, seed=vocab)
    inputs = _cuda(case)
    same(_verify(op, *inputs), twin(op, *inputs))


@pytest.mark.parametrize("kept", [False, True])
def test_one_launch_agrees_on_path_and_count(kept):
    from one_launch import chain_one_launch

    for seed in range(sizes(20, 1)):
        vocab = sizes(50_257, 37)
        inputs = _cuda(Case(counts=(1,) * 5, vocab=vocab, dtype="bf16", seed=seed, kept=kept))
        two, (one, _) = _verify("chain", *inputs), chain_one_launch(*inputs)
        assert one.path_BD.tolist() == two.path_BD.tolist()
        assert one.count_B.tolist() == two.count_B.tolist()


@pytest.mark.parametrize("op", OPS)
def test_a_thousand_launches_say_the_same(op):
    """Races and lost tickets show as a changed answer or a program that never finishes a row."""
    vocab = sizes(50_257, 37)
    inputs = _cuda(Case(counts=_counts(op), vocab=vocab, batch=4, dtype="bf16"))
    first = _verify(op, *inputs)
    for _ in range(sizes(1000, 1)):
        again = _verify(op, *inputs)
        assert torch.equal(again.path_BD, first.path_BD)
        assert torch.equal(again.next_B, first.next_B)


@needs_device
@pytest.mark.parametrize("op", OPS)
def test_graph_replay_reads_new_keys_and_logits(op):
    inputs = _cuda(Case(counts=_counts(op), vocab=32_000, batch=3, dtype="bf16"))
    draft, scores, draws = inputs
    for _ in range(3):
        _verify(op, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _verify(op, *inputs)
    for step in range(200):
        draws.start_B.fill_(step)
        if step % 20 == 0:
            scores.laws.logits_BRV.copy_(torch.randn_like(scores.laws.logits_BRV))
        graph.replay()
        torch.cuda.synchronize()
        same(captured, _verify(op, draft, scores, draws))


@needs_device
@pytest.mark.parametrize("kept", [False, True])
def test_graph_replay_of_the_one_launch_kernel(kept):
    from one_launch import chain_one_launch

    inputs = _cuda(Case(counts=(1,) * 5, vocab=32_000, batch=3, dtype="bf16", kept=kept))
    draft, scores, draws = inputs
    for _ in range(3):
        chain_one_launch(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = chain_one_launch(*inputs)
    for step in range(200):
        draws.start_B.fill_(step)
        if step % 20 == 0:
            scores.laws.logits_BRV.copy_(torch.randn_like(scores.laws.logits_BRV))
        graph.replay()
        torch.cuda.synchronize()
        same(captured, chain_one_launch(draft, scores, draws)[0])


@needs_device
def test_graph_replay_of_the_draft_sampler():
    from outrider import ops

    logits = torch.randn(3, 2, 50_257, device=DEVICE, dtype=torch.bfloat16)
    laws = Laws(logits, torch.ones(3, device=DEVICE), greedy="none")
    keys = torch.arange(6, device=DEVICE).view(3, 2)
    with ops.use("triton"):
        for _ in range(3):
            ops.sample(laws, keys)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens, kept = ops.sample(laws, keys)
        for step in range(50):
            keys.add_(977)
            logits.copy_(torch.randn_like(logits))
            graph.replay()
            torch.cuda.synchronize()
            again, fresh = ops.sample(laws, keys)
            assert torch.equal(tokens, again), step
            assert torch.equal(kept.lse_BR, fresh.lse_BR), step


def test_sampler_follows_its_law_over_ten_million_draws():
    from scipy.stats import chi2

    from outrider import ops

    vocab, batch, launches = 256, *sizes((32_768, 306), (64, 1))
    logits = torch.randn(1, 1, vocab, device=DEVICE).expand(batch, -1, -1)
    laws = Laws(logits, torch.ones(batch, device=DEVICE), greedy="none")
    seen = torch.zeros(vocab, device=DEVICE, dtype=torch.int64)
    with ops.use("triton"):
        for launch in range(launches):
            keys = torch.arange(batch, device=DEVICE)[:, None] + launch * batch
            tokens, _ = ops.sample(laws, keys * 7919)
            seen += torch.bincount(tokens[:, 0], minlength=vocab)
    expected = logits[0, 0].double().softmax(-1) * seen.sum()
    g = 2 * (seen * (seen / expected).log()).nan_to_num().sum()
    assert float(g) < chi2.isf(1e-6, vocab - 1)


@pytest.mark.parametrize("op", [*OPS, "one launch"])
def test_first_token_follows_the_target_over_ten_million_draws(op):
    from scipy.stats import chi2

    vocab, batch, launches = 256, *sizes((32_768, 306), (32, 1))
    counts = (2,) if op in ("tree", "traversal") else (1,)
    case = Case(counts=counts, vocab=vocab, batch=1, spread=1.0)
    draft, scores, _ = _cuda(case)
    law = scores.laws.logits_BRV[0, 0].double().softmax(-1)
    guess = draft.laws.logits_BRV[0, 0].double().softmax(-1)
    ones = torch.ones(batch, device=DEVICE)
    if op == "match":  # placed children: what follows them is the target's own draw
        draft = draft._replace(
            kind_BNK=torch.zeros_like(draft.kind_BNK), row_BNK=torch.full_like(draft.row_BNK, -1),
            kinds=frozenset({DrawKind.FIXED}),
        )  # fmt: skip

    def wide(laws):
        return laws._replace(
            logits_BRV=laws.logits_BRV.expand(batch, -1, -1), inverse_temperature_B=ones
        )

    seen = torch.zeros(vocab, device=DEVICE, dtype=torch.int64)
    torch.manual_seed(0)
    for launch in range(launches):
        drawn = torch.multinomial(guess.float().expand(batch, -1), counts[0])
        tokens = torch.cat([torch.zeros_like(drawn[:, :1]), drawn], 1)
        keys = torch.arange(batch, device=DEVICE) + launch * batch
        found = _verify(
            op,
            draft._replace(tokens_BN=tokens, laws=wide(draft.laws)),
            scores._replace(laws=wide(scores.laws)),
            _draws(keys),
        )
        path = found.path_BD[:, :1].clamp(min=0)
        first = torch.where(found.count_B > 0, tokens.gather(1, path)[:, 0], found.next_B)
        seen += torch.bincount(first, minlength=vocab)
    expected = law * seen.sum()
    g = 2 * (seen * (seen / expected).log()).nan_to_num().sum()
    assert float(g) < chi2.isf(1e-6, vocab - 1)


def _draws(keys):
    return Draws(keys, torch.zeros_like(keys))


@pytest.mark.parametrize("op", OPS)
def test_batch_order_and_slices_change_nothing(op):
    from outrider.ops.triton import launch

    case = Case(counts=_counts(op), vocab=sizes(50_257, 37), batch=4, dtype="bf16")
    draft, scores, draws = _cuda(case)
    once = _verify(op, draft, scores, draws)
    for size in sizes((1024, 2048, 4096), (16,)):
        launch._forced.append((size, 4))
        same(_verify(op, draft, scores, draws), once)
        launch._forced.pop()
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)

    def turn(laws):
        return laws._replace(
            logits_BRV=laws.logits_BRV[order],
            inverse_temperature_B=laws.inverse_temperature_B[order],
        )

    turned = _verify(
        op,
        draft._replace(
            tokens_BN=draft.tokens_BN[order],
            draws_BNK=draft.draws_BNK[order],
            row_BNK=draft.row_BNK[order],
            kind_BNK=draft.kind_BNK[order],
            laws=turn(draft.laws),
        ),
        scores._replace(laws=turn(scores.laws)),
        draws._replace(seed_B=draws.seed_B[order], start_B=draws.start_B[order]),
    )
    assert torch.equal(turned.path_BD, once.path_BD[order])
    assert torch.equal(turned.next_B, once.next_B[order])


@needs_device
def test_no_operation_reads_the_host():
    inputs = {op: _cuda(Case(counts=_counts(op), vocab=4_096)) for op in OPS}
    for op in OPS:
        _verify(op, *inputs[op])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op in OPS:
            _verify(op, *inputs[op])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_drop_in_on_a_device():
    from outrider_lab.baselines.assisted_generation import speculative_sampling, theirs

    for seed in range(sizes(50, 2)):
        case = Case(counts=(1,) * 4, vocab=sizes(32_000, 40), batch=1, seed=seed)
        draft, scores, _ = _cuda(case)
        inputs = (draft.tokens_BN, draft.laws.logits_BRV[:, :4], 4, scores.laws.logits_BRV)
        torch.manual_seed(seed)
        _, n = theirs()(*inputs)
        torch.manual_seed(seed)
        _, m = speculative_sampling(*inputs)
        assert int(n) == int(m)


FILTERS = [
    SamplingParams(top_k=50),
    SamplingParams(0.7, top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(0.8, top_k=40, top_p=0.95, min_p=0.01),
]


@pytest.mark.parametrize("dtype", sizes(["fp32", "bf16", "fp16"], ["fp16"]))
@pytest.mark.parametrize("vocab", sizes([257, 50_257, 151_936, 262_144], [67]))
def test_floors_keep_what_the_reference_keeps(vocab, dtype):
    """Sets may part where float32 and float64 sums part: at one tied value of the nucleus."""
    from cases import DTYPES

    from outrider import ops

    rng = torch.Generator(DEVICE).manual_seed(vocab)
    logits = 2 * torch.randn(4, 6, vocab, generator=rng, device=DEVICE)
    logits = logits.to(DTYPES[dtype])
    settings = rows(FILTERS, DEVICE)
    with ops.use("triton"):
        ours = ops.floors(logits, settings)
    with ops.use("reference"):
        theirs = ops.floors(logits, settings)
    assert torch.equal(ours[0], theirs[0])  # top-k alone is exact
    sizes, expected = ((logits >= f[..., None]).sum(-1) for f in (ours, theirs))
    share = torch.minimum(sizes, expected) / torch.maximum(sizes, expected)
    assert float(share.min()) > 0.99


@needs_device
def test_floors_repeat_replay_and_read_nothing_on_the_host():
    from outrider import ops

    logits = torch.randn(4, 6, 50_257, device=DEVICE, dtype=torch.bfloat16)
    settings = rows(FILTERS, DEVICE)
    with ops.use("triton"):
        first = ops.floors(logits, settings)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(1000):
                again = ops.floors(logits, settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(first, again)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.floors(logits, settings)
        for _ in range(20):
            logits.copy_(torch.randn_like(logits))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, ops.floors(logits, settings))
