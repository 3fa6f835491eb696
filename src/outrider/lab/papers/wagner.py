"""The protocol of Wagner et al. 2024 on any pair: what a verification method costs in use.

Assisted generation of transformers runs with each method in the place of its own function; the
time inside that function is summed over all decoding steps. gamma starts at 5, +2 after a full
acceptance, else -1 (transformers' heuristic, as in the paper), or stays constant for the sweeps.

    tables 1, 4, 6   summed and average time against transformers', task score, wall clock (table 5)
    table 3          bytes that had to be read over time: realised bandwidth
    figure 3, 4-5    average time and memory per call for constant gamma
    tables 2, 7      the sigmoid's alpha and beta
    table 8          acceptance by method and gamma, beside what the sigmoid's formula predicts

On a CPU the clock is the thread's CPU time; on CUDA calls are bracketed by synchronisation, which
costs every method the same. A drafted token counts as accepted if it enters the text.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import utils as _utils

from outrider.certify.report import Row
from outrider.errors import ConfigurationError
from outrider.integrations.transformers import NAME, checked, speculative_sampling
from outrider.lab import measure
from outrider.lab.papers.score import rouge1
from outrider.lab.prompts import read_rows
from outrider.load import shipped
from outrider.models.sources import Source, first_line, read_tokenizer
from outrider.ops.baselines import Paper

GAMMAS = tuple(range(1, 21))
QUICK_GAMMAS = (1, 3, 5, 10, 20)
TABLE_8 = (3, 5, 10, 15)
BOUNDS = (1e1, 1e3, 1e4, 1e5)
Verify = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Calls:
    """What happened inside the verification function."""

    seconds: list[float] = field(default_factory=list)
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)  #: mean accept probability per token
    vocab: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens."""
        return sum(self.accepted) / max(sum(self.gammas), 1)

    @property
    def bandwidth(self) -> float:
        """Bytes of logits that had to be read (2 gamma + 1 rows, fp32), per second."""
        read = sum(4 * self.vocab * (2 * gamma + 1) for gamma in self.gammas)
        return read / max(sum(self.seconds), 1e-12)


@dataclass(frozen=True)
class Arm:
    """One method over all prompts."""

    name: str
    exact: bool
    gamma: int | None
    calls: Calls
    wall: float
    tokens: int
    score: float

    def row(self, base: "Arm | None") -> Row:
        """The paper's columns."""
        seconds = self.calls.seconds or [0.0]
        columns: Row = {
            "method": self.name,
            "exact": self.exact,
            "gamma": self.gamma,
            "calls": len(self.calls.seconds),
            "sum_ms": 1e3 * sum(seconds),
            "mean_ms": 1e3 * statistics.fmean(seconds),
            "std_ms": 1e3 * statistics.pstdev(seconds),
            "wall_s": self.wall,
            "share": sum(seconds) / max(self.wall, 1e-9),
            "tokens": self.tokens,
            "acceptance": self.calls.acceptance,
            "predicted": statistics.fmean(self.calls.predicted) if self.calls.predicted else None,
            "bandwidth_gb_s": self.calls.bandwidth / 1e9,
            "score": self.score,
        }
        if base is not None:
            theirs = base.calls.seconds
            columns["sum_less"] = 1 - sum(seconds) / max(sum(theirs), 1e-12)
            columns["mean_less"] = 1 - statistics.fmean(seconds) / statistics.fmean(theirs)
            columns["wall_less"] = 1 - self.wall / base.wall
        return columns


@dataclass(frozen=True)
class Pair:
    """Two models that share a tokenizer, and prompts with references ("" if there are none)."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[Tensor]
    references: list[str]
    decode: Callable[[list[int]], str]


def methods(bound: float = 1e4) -> dict[str, tuple[Verify, bool]]:
    """Name -> (function, exact). transformers' own comes first: the baseline."""
    sigmoid = Paper(True, -bound, bound)
    return {
        "transformers": (checked(), True),
        "paper exact": (Paper(), True),
        "paper sigmoid": (sigmoid, False),
        "outrider": (speculative_sampling, True),
    }


@contextmanager
def measured(verify: Verify, calls: Calls, *, predict: Paper | None = None) -> Iterator[None]:
    """transformers calls `verify` inside this block and `calls` fills up."""
    original = checked()

    def timed(
        ids: Tensor, draft: Tensor, length: int, target: Tensor,
        assistant_ensemble_weight: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        start = _clock(target)
        valid, n = verify(ids, draft, length, target, assistant_ensemble_weight)
        calls.seconds.append(_clock(target) - start)
        calls.gammas.append(draft.shape[1])
        calls.accepted.append(valid.shape[1] - 1)
        calls.vocab = target.shape[-1]
        if predict is not None:
            tau, *_ = predict.tables(draft, target)
            tokens = ids[:, -length:, None]
            calls.predicted.append(float(tau.gather(2, tokens).mean()))
        return valid, n

    setattr(_utils, NAME, timed)
    try:
        yield
    finally:
        setattr(_utils, NAME, original)


def _clock(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
        return time.perf_counter()
    return time.thread_time()


def compare(
    pair: Pair, arms: dict[str, tuple[Verify, bool]], *, tokens: int, gamma: int | None, seed: int,
    prompts: int, predict: Paper | None = None,
) -> list[Arm]:  # fmt: skip
    """Every method on every prompt, in turn, the first one rotating."""
    names = list(arms)
    calls = {name: Calls() for name in names}
    wall, length = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    scores: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warm-up
        with measured(arms[name][0], Calls()):
            generate(pair, 0, 6, gamma, seed)
    clock = time.perf_counter if pair.prompts[0].is_cuda else time.thread_time
    for _, number, name in measure.turns(names, min(prompts, len(pair.prompts))):
        verify, exact = arms[name]
        start = clock()
        with measured(verify, calls[name], predict=None if exact else predict):
            text = generate(pair, number, tokens, gamma, seed + number)
        wall[name] += clock() - start
        length[name] += len(text)
        if pair.references[number]:
            scores[name].append(rouge1(pair.decode(text), pair.references[number]))
    return [
        Arm(
            name, arms[name][1], gamma, calls[name], wall[name], length[name],
            statistics.fmean(scores[name]) if scores[name] else float("nan"),
        )
        for name in names
    ]  # fmt: skip


def generate(
    pair: Pair, number: int, tokens: int, gamma: int | None, seed: int, temperature: float = 1.0
) -> list[int]:
    """New tokens of one prompt by assisted generation, no filters."""
    settings = pair.draft.generation_config
    settings.num_assistant_tokens = 5 if gamma is None else gamma
    settings.num_assistant_tokens_schedule = "heuristic" if gamma is None else "constant"
    settings.assistant_confidence_threshold = 0.0
    torch.manual_seed(seed)
    prompt = pair.prompts[number]
    text = pair.target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=pair.draft,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    found: list[int] = text[0, prompt.shape[1] :].tolist()
    return found


def allocated(verify: Verify, gamma: int, vocab: int, device: str = "cpu") -> float:
    """Megabytes that one call allocates.

    On a CPU PyTorch's allocations plus NumPy's peak, on CUDA the peak above what was in use.
    """
    target = torch.randn(1, gamma + 1, vocab, device=device)
    draft = target[:, :gamma] + torch.randn(1, gamma, vocab, device=device)
    ids = torch.zeros(1, gamma, dtype=torch.int64, device=device)
    verify(ids, draft, gamma, target)
    if target.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        verify(ids, draft, gamma, target)
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 1e6
    return _allocated_on_host(lambda: verify(ids, draft, gamma, target))


def _allocated_on_host(call: Callable[[], object]) -> float:
    import tracemalloc

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    torch_bytes = sum(max(event.self_cpu_memory_usage, 0) for event in seen.events())
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(torch_bytes + peak) / 1e6


def tiny_pair(vocab: int, device: str = "cpu") -> Pair:
    """A pair with random weights and a large vocabulary: agreement is constructed, not trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval().to(device)
    draft = LlamaForCausalLM(config).eval().to(device)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    prompts = [torch.arange(5 * i + 1, 5 * i + 6, device=device)[None] for i in range(4)]
    return Pair(
        f"random weights, V={vocab}, constructed agreement", target, draft, prompts, [""] * 4,
        lambda ids: "",
    )  # fmt: skip


def load_pair(
    target: str,
    draft: str,
    prompts: Sequence[dict[str, str]],
    device: str,
    dtype: str = "float32",
) -> Pair:
    """Two models of transformers with one tokenizer; prompts have `prompt` and `reference`."""
    sources = Source(target, "target"), Source(draft, "draft")  # both, before weights are read
    tokenizer = read_tokenizer(target)
    big, small = (_weights(source, device, dtype) for source in sources)
    for model in (big, small):
        model.generation_config.pad_token_id = 0
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    ids = [
        torch.tensor([start + tokenizer.encode(one["prompt"].rstrip(), add_special_tokens=False)])
        for one in prompts
    ]
    return Pair(
        f"{target} with {draft}", big, small, [one.to(device) for one in ids],
        [one.get("reference", "") for one in prompts],
        lambda found: str(tokenizer.decode(found, skip_special_tokens=True)),
    )  # fmt: skip


def _weights(source: Source, device: str, dtype: str) -> PreTrainedModel:
    try:
        return source.model(dtype, torch.device(device)).eval()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load the {source.role} model's weights; got {str(source)!r} "
            f"({first_line(error)}); check the path or download the model first"
        ) from error


def shipped_pair(
    count: int,
    device: str = "cpu",
    prompts: Sequence[dict[str, str]] | None = None,
    dtype: str = "float32",
) -> Pair:
    """The packaged Python-code pair on its held-out prompts, or on others."""
    rows = read_rows()[:count] if prompts is None else prompts
    pair = load_pair(str(shipped("target")), str(shipped("draft")), rows, device, dtype)
    return replace(pair, name="shipped pair")


def run(
    pair: Pair | None = None,
    *,
    quick: bool = False,
    gammas: Sequence[int] | None = None,
    prompts: int | None = None,
    tokens: int = 100,
    bound: float = 1e4,
    large_vocab: int | None = 151_936,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Row:
    """All tables for one pair. `quick` ends within ten minutes on two CPU cores.

    `gammas` are those of the sweep with a constant gamma; None takes the paper's.
    """
    count = prompts or (8 if quick else 48)
    tokens = min(tokens, 64) if quick else tokens
    pair = pair or shipped_pair(count)
    arms = methods(bound)
    sigmoid = Paper(True, -bound, bound)
    document: Row = {
        "pair": pair.name, "tokens": tokens, "prompts": min(count, len(pair.prompts)),
        "bound": bound, "device": str(pair.prompts[0].device), "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }  # fmt: skip

    progress("heuristic gamma (tables 1, 3-6)")
    main = compare(pair, arms, tokens=tokens, gamma=None, seed=seed, prompts=count, predict=sigmoid)
    document["main"] = _rows(main)

    few = max(count // 2, 1)
    document["gamma"] = []
    if gammas is None:
        gammas = sorted({*QUICK_GAMMAS, *TABLE_8}) if quick else GAMMAS
    for gamma in gammas:
        progress(f"gamma {gamma} (figure 3, table 8)")
        found = compare(pair, arms, tokens=tokens, gamma=gamma, seed=seed, prompts=few,
                        predict=sigmoid)  # fmt: skip
        document["gamma"] += _rows(found)

    progress("alpha and beta (tables 2, 7)")
    sweep: dict[str, tuple[Verify, bool]] = {"transformers": arms["transformers"]}
    for size in BOUNDS:
        sweep[f"sigmoid +-{size:.0e}"] = (Paper(True, -size, size), False)
    document["bounds"] = _rows(
        compare(pair, sweep, tokens=tokens, gamma=None, seed=seed, prompts=few)
    )

    progress("memory per call (figures 4-5)")
    vocab, device = int(pair.target.config.vocab_size), str(pair.prompts[0].device)
    document["memory"] = [
        {"method": name, "gamma": gamma, "mb": allocated(verify, gamma, vocab, device)}
        for gamma in (5, 20)
        for name, (verify, _) in arms.items()
    ]
    if large_vocab:
        progress(f"random weights, V={large_vocab}")
        large = tiny_pair(large_vocab, str(pair.prompts[0].device))
        document["large"] = {"pair": large.name} | {
            "rows": _rows(
                compare(large, arms, tokens=24 if quick else 64, gamma=5, seed=seed, prompts=4)
            )
        }
    return document


def _rows(arms: list[Arm]) -> list[Row]:
    return [arm.row(arms[0]) for arm in arms]
