"""P-EAGLE, DSpark and Domino heads: the law of every place by their formulas, folders, texts."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_dflash import BLOCK, MASK, block_states, dflash, written
from transformers import LlamaConfig, Qwen3Config

import outrider
from outrider import DraftModel, SamplingParams, StopConditions, testing
from outrider.drafters import Either, Recall
from outrider.engine import step
from outrider.engine.batch import begin
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.errors import ConfigurationError
from outrider.models.heads.autoregressive_head import AutoregressiveHead
from outrider.models.heads.dflash import MaskedBlockHead
from outrider.models.heads.domino import Domino, DominoHead
from outrider.models.heads.dspark import DSpark, DSparkHead
from outrider.models.heads.model import HeadModel
from outrider.models.heads.parallel_eagle import ParallelDraftingHead, ParallelEagle
from outrider.types import PLAIN
from outrider.verifiers import VERIFIERS
from tiny import PROMPTS, VOCAB, decode, pair
from tiny_heads import FLAGS, IDS, SIZES, Reference, eagle3, original, paths, speculators, target

LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}
DEPTH = 4
SAMPLING = [
    SamplingParams(0),
    SamplingParams(0.8, seed=1),
    SamplingParams(1.0, seed=2),
    SamplingParams(0),
    SamplingParams(1.2, top_p=0.9, seed=3),
]
FORMS = [("vanilla", True), ("gated", True), ("rnn", True), ("rnn", False), (None, True)]


def steps(drafter, target, temperature=1.0):
    """Drafts of ragged rows, plain steps between, and the texts that they are drafts of."""
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[3])
    requests = [
        Request(prompt, SamplingParams(temperature, seed=row + 7), StopConditions(24))
        for row, prompt in enumerate(prompts)
    ]
    batch, kept = begin(target, drafter, requests, 128), 0
    for shape in (None, PLAIN, None, None, PLAIN, PLAIN, None):
        draft = step.propose(drafter, batch, shape)
        if shape is None:
            texts = batch.context.tokens_BL.tolist()
            lengths = batch.context.length_B.tolist()
            yield draft, [text[:length] for text, length in zip(texts, lengths, strict=True)]
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(VERIFIERS["traversal"], batch, draft, scores)
        kept += int(verdict.count_B.sum())
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)
    assert kept


def told(target, text, aux_layers):
    """The target's states at the aux layers of all tokens but the last."""
    found = target.runner.model(input_ids=torch.tensor([text]), output_hidden_states=True)
    return [found.hidden_states[layer][0, : len(text) - 1] for layer in aux_layers]


# ------------------------------------------------------------------------------------ P-EAGLE


def peagle(aux_layers=(0, 1, -1), kind=LlamaConfig, layers=1, **flags):
    """A random head, as `eagle3` makes one, with a vector for masks."""
    made = eagle3(aux_layers, kind, layers, **flags)
    head = ParallelEagle(made.config, ids_K=IDS).eval()
    head.load_state_dict({**made.state_dict(), "mask_hidden": head.mask_hidden})
    torch.manual_seed(5)
    head.requires_grad_(False).mask_hidden.normal_()
    return head


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1)], ids=["chain", "tree"])
@torch.inference_mode()
def test_masks_say_tokens_further_on(flags, counts):
    """By an EAGLE-3 head's formulas, over the text and the masks behind it."""
    driven = pair(runner="transformers")[0]
    head = peagle(kind=Qwen3Config, layers=2, **FLAGS[flags])
    runner = ParallelDraftingHead(head, head, MASK, DEPTH)
    drafter = DraftModel(HeadModel(runner, VOCAB), counts)
    hidden = list(head.mask_hidden[0].chunk(3, -1))
    mask = Reference(head, hidden).fused
    for draft, texts in steps(drafter, driven):
        for row, text in enumerate(texts):
            by = Reference(head, told(driven, text, head.aux_layers))
            states = [*by.fused, *mask.expand(DEPTH - 1, -1)]
            _, read = by._entries([*text, *[MASK] * (DEPTH - 1)], states)
            first = len(read) - DEPTH  # -1: no state stands before a text of one token
            expected = read @ head.lm_head.weight.T
            nodes = draft.laws.logits_BRV.shape[1]
            for node, depth in enumerate(draft.tree.depth_BN[0, :nodes].tolist()):
                law = draft.laws.logits_BRV[row, node]
                if depth == DEPTH:
                    assert (law == -torch.inf).all()
                elif first + depth >= 0:
                    assert torch.allclose(law[IDS], expected[first + depth], atol=1e-4)
                    assert (law > -torch.inf).sum() == len(IDS)


def peagle_folder(folder, head, **more):
    """In the speculators layout."""
    fields = {"speculators_model_type": "peagle", "mask_token_id": MASK, "para_depths": DEPTH}
    return speculators(folder, head, **(fields | more))


def vllms_folder(folder, head, **more):
    """As vLLM reads it: an EAGLE-3 head's fields, its vector of another shape."""
    where = original(folder, head, **({"ptd_token_id": MASK, "parallel_drafting": True} | more))
    weights = load_file(where / "model.safetensors")
    weights["mask_hidden"] = weights["mask_hidden"].view(1, -1)
    save_file(weights, where / "model.safetensors")
    return where


@pytest.mark.parametrize("layout", [peagle_folder, vllms_folder])
@pytest.mark.parametrize("pack", [True, False])
def test_a_folder_of_peagle_drafts_for_its_target(tmp_path, layout, pack):
    model, head = target(), peagle(aux_layers=(2, 3, 3), kind=LlamaConfig)
    more = {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}
    folder = layout(tmp_path, head, **more)
    how = {**LOAD, "pack_weights": pack, "shared_noise": True}
    speculator = outrider.load(model, folder, branching=(2, 1, 1), **how)
    runner = speculator.engine.drafter.model.runner
    assert isinstance(runner, ParallelDraftingHead)
    assert runner._masks == (DEPTH if layout is peagle_folder else 8) - 1
    module = runner.head.module
    assert torch.equal(module.mask_hidden, head.mask_hidden)
    own = decode(speculator.plain().engine, PROMPTS, SAMPLING, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS, SAMPLING, StopConditions(14))[0] == own


def test_how_many_masks_a_checkpoint_names(tmp_path):
    ways = {"proposal_methods": [{"speculative_tokens": 5}], "verifier": {"name_or_path": "tiny"}}
    folder = peagle_folder(tmp_path, peagle(aux_layers=(2, 3, 3)), speculators_config=ways)
    speculator = outrider.load(target(), folder, **LOAD)
    assert speculator.engine.drafter.model.runner._masks == 4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mask_token_id": None}, "mask_token_id=None and a vocabulary of 32"),
        ({"mask_token_id": 40}, "mask_token_id=40 and a vocabulary of 32"),
        ({"extra": 1}, "extra=1, which is not computed here"),
    ],
)
def test_fields_of_peagle_that_do_not_fit(tmp_path, more, said):
    with pytest.raises(ConfigurationError, match=said):
        outrider.load(
            target(), peagle_folder(tmp_path, peagle(aux_layers=(2, 3, 3)), **more), **LOAD
        )


def test_a_head_without_the_vector_of_masks_is_no_peagle(tmp_path):
    folder = peagle_folder(tmp_path, eagle3(aux_layers=(2, 3, 3)))
    with pytest.raises(ConfigurationError, match="mask_hidden of 96 numbers: there is none"):
        outrider.load(target(), folder, **LOAD)


# ------------------------------------------------------------------------------------- DSpark


def dspark(markov="vanilla", anchored=True, **more):
    """A random head with a sequential head of rank 6."""
    return dflash(kind_of_head=DSpark, more=(markov, 6, anchored), **more)


def biased(head, read, path):
    """Scores [K] behind a path of tokens below the pending one, which it begins with."""
    markov, weights = head.markov_head, head.state_dict()
    place = len(path) - (1 if head.anchored else 0)
    logits = read[place] @ head.lm_head.weight.T
    if markov is None:
        return logits
    w1, w2 = (weights[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
    before = w1[torch.tensor(path)]
    if markov.kind == "vanilla":
        return logits + w2 @ before[-1]
    if markov.kind == "gated":
        both = torch.cat([read[place], before[-1]])
        gate = both @ weights["markov_head.gate_proj.weight"].T
        return logits + w2 @ ((gate + weights["markov_head.gate_proj.bias"]).sigmoid() * before[-1])
    state = torch.zeros(6)
    # one token for each place: the pending token's own, too, stands before its place
    tokens = before if head.anchored else torch.cat([before[:1], before])
    for number, token in enumerate(tokens):
        joint = torch.cat([state, token, read[number]])
        joint = joint @ weights["markov_head.joint_proj.weight"].T
        gate, new, out = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
    return logits + w2 @ out.tanh()


@pytest.mark.parametrize(("markov", "anchored"), FORMS)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (2, 2, 1, 1)], ids=["chain", "tree"])
@torch.inference_mode()
def test_a_places_law_knows_the_tokens_above_it(markov, anchored, counts):
    driven = pair(runner="transformers")[0]
    head = dspark(markov, anchored, aux_layers=(0, 1), ids=IDS)
    drafter = DraftModel(HeadModel(DSparkHead(head), VOCAB), counts)
    last = BLOCK if anchored else BLOCK - 1
    for draft, texts in steps(drafter, driven):
        for row, text in enumerate(texts):
            read = block_states(head, told(driven, text, (0, 1)), text[-1])
            above = paths(draft.tree, row, draft.tokens_BN[row].tolist())
            nodes = draft.laws.logits_BRV.shape[1]
            for node, depth in enumerate(draft.tree.depth_BN[0, :nodes].tolist()):
                law = draft.laws.logits_BRV[row, node]
                if depth >= last:
                    assert (law == -torch.inf).all()
                elif (draft.tokens_BN[row, : node + 1] >= 0).all():
                    assert torch.allclose(law[IDS], biased(head, read, above[node]), atol=1e-4)


def dspark_folder(folder, head, markov="vanilla", anchored=True, **more):
    fields = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 2],
        "draft_vocab_size": head.config.draft_vocab_size,
        "markov_rank": 6 if markov else 0,
        "markov_head_type": markov or "vanilla",
        "sample_from_anchor": anchored,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "transformer_layer_config": {"model_type": "qwen3", **SIZES, "num_hidden_layers": 2},
    }
    where = written(folder, fields | more, head)
    weights = load_file(where / "model.safetensors")
    weights |= {
        "confidence_head.proj.weight": torch.ones(1, 38),
        "confidence_head.proj.bias": torch.ones(1),
    }
    save_file(weights, where / "model.safetensors")
    return where


@pytest.mark.parametrize(("markov", "anchored"), FORMS)
def test_a_folder_of_dspark_drafts_for_its_target(tmp_path, markov, anchored):
    model = target()
    head = dspark(markov, anchored, ids=IDS, lent=model)
    folder = dspark_folder(tmp_path, head, markov, anchored)
    speculator = outrider.load(model, folder, branching=(2, 1, 1), shared_noise=True, **LOAD)
    read = speculator.engine.drafter.model.runner.head.state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in head.state_dict().items())
    own = decode(speculator.plain().engine, PROMPTS, SAMPLING, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS, SAMPLING, StopConditions(14))[0] == own


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm', markov_rank=6"),
        ({"markov_rank": 7}, "markov_rank=7"),
        ({"markov_rank": 4}, "not those that its config.json asks for"),
        ({"extra": 1}, "extra=1, which is not computed here"),
    ],
)
def test_fields_of_dspark_that_do_not_fit(tmp_path, more, said):
    with pytest.raises(ConfigurationError, match=said):
        outrider.load(target(), dspark_folder(tmp_path, dspark(), **more), **LOAD)


# ------------------------------------------------------------------------------------- Domino

STATES, RANK = 10, 6


def domino(pure=1, aux_layers=(1, 2), lent=None):
    return dflash(
        aux_layers=aux_layers, lent=lent, kind_of_head=Domino, more=((STATES, RANK), pure)
    )


@pytest.mark.parametrize("pure", [0, 1, 2])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1)], ids=["chain", "tree"])
@torch.inference_mode()
def test_tokens_above_correct_a_block(pure, counts):
    """By torch's own recurrent unit over the path to each node."""
    driven = pair(runner="transformers")[0]
    head = domino(pure, aux_layers=(0, 1))
    drafter = DraftModel(HeadModel(DominoHead(head), VOCAB), counts)
    correct = head.domino_head
    for draft, texts in steps(drafter, driven):
        for row, text in enumerate(texts):
            read = block_states(head, told(driven, text, (0, 1)), text[-1])
            nodes = draft.laws.logits_BRV.shape[1]
            for node, depth in enumerate(draft.tree.depth_BN[0, :nodes].tolist()):
                law = draft.laws.logits_BRV[row, node]
                if depth == BLOCK:
                    assert (law == -torch.inf).all()
                    continue
                path = draft.tree.ancestors_BNN[0, node].nonzero()[:, 0]
                above = head.embedded(draft.tokens_BN[row, path])
                state = correct.prefix_gru(above[None])[0][0, -1]
                expected = read[depth] @ head.lm_head.weight.T
                if depth >= pure:
                    expected = expected + correct.embed_proj(torch.cat([read[depth], state]))
                assert torch.allclose(law, expected, atol=1e-4)


def domino_folder(folder, head, **more):
    fields = {
        "speculators_model_type": "dflash",
        "projector_type": "domino",
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 2],
        "draft_vocab_size": VOCAB,
        "shift_label": True,
        "gru_hidden_dim": STATES,
        "emb_dim": RANK,
        "pure_draft_prefix_len": 1,
        "lambda_base_start": 1.0,
        "transformer_layer_config": {"model_type": "qwen3", **SIZES, "num_hidden_layers": 2},
    }
    return written(folder, fields | more, head)


def test_a_folder_of_domino_drafts_for_its_target(tmp_path):
    model = target()
    head = domino(lent=model)
    folder = domino_folder(tmp_path, head)
    speculator = outrider.load(model, folder, branching=(2, 1, 1), shared_noise=True, **LOAD)
    read = speculator.engine.drafter.model.runner.head.state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in head.state_dict().items())
    own = decode(speculator.plain().engine, PROMPTS, SAMPLING, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS, SAMPLING, StopConditions(14))[0] == own


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gru_hidden_dim": 9}, r"gru_hidden_dim, emb_dim, pure_draft_prefix_len=\[9, 6, 1\]"),
        ({"shift_label": False}, "shift_label=False"),
        ({"emb_dim": 4}, "not those that its config.json asks for"),
    ],
)
def test_fields_of_domino_that_do_not_fit(tmp_path, more, said):
    with pytest.raises(ConfigurationError, match=said):
        outrider.load(target(), domino_folder(tmp_path, domino(), **more), **LOAD)


# ------------------------------------------------------------------------ all, beside each other

RUNNERS = {
    "eagle3": lambda device: AutoregressiveHead(eagle3().to(device)),
    "dflash": lambda device: MaskedBlockHead(dflash(aux_layers=(0, 1)).to(device)),
    "peagle": lambda device: parallel(device),
    "dspark": lambda device: DSparkHead(dspark("rnn", aux_layers=(0, 1)).to(device)),
    "domino": lambda device: DominoHead(domino(aux_layers=(0, 1)).to(device)),
}


def parallel(device):
    head = peagle().to(device)
    return ParallelDraftingHead(head, head, MASK, DEPTH)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["peagle", "dspark", "domino"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1)])
def test_they_are_drafters_like_others(kind, counts):
    testing.check_drafter(
        lambda model: DraftModel(HeadModel(RUNNERS[kind](model.device), testing.VOCAB), counts)
    )


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", RUNNERS)
def test_every_head_beside_copies(kind):
    """`either`: what has paid drafts, row by row, and no text depends on it."""
    driven = pair(runner="transformers")[0]
    repeating = [p * 3 for p in PROMPTS[:4]] + [PROMPTS[4]]

    def made(shared_noise):
        head = HeadModel(RUNNERS[kind]("cpu"), VOCAB)
        return Either(Recall(8), DraftModel(head, (1, 1, 1), shared_noise))

    plain = decode(
        Engine(driven, outrider.Root(), "match"), repeating, SAMPLING, StopConditions(24)
    )
    engine = Engine(driven, made(True), "match")
    found = decode(engine, repeating, SAMPLING, StopConditions(24))
    assert found[0] == plain[0]
    testing.check_drafter(
        lambda model: Either(
            Recall(4), DraftModel(HeadModel(RUNNERS[kind](model.device), testing.VOCAB), (1, 1))
        )
    )
