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
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import utils as _utils

from outrider.certify.report import Row
from outrider.integrations.transformers import NAME, checked, speculative_sampling
from outrider.lab import measure
from outrider.lab.papers.wagner_pairs import Pair, shipped_pair, tiny_pair
from outrider.lab.quiet import quiet_profiler
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
    texts: dict[str, list[str]] = {name: [] for name in names}
    for name in names:  # warm-up
        with measured(arms[name][0], Calls()):
            generate(pair, 0, 6, gamma, seed)
    clock = time.perf_counter if pair.device.type == "cuda" else time.thread_time
    count = min(prompts, len(pair.prompts))
    references = [prompt.reference for prompt in pair.prompts[:count]]
    for _, number, name in measure.turns(names, count):
        verify, exact = arms[name]
        start = clock()
        with measured(verify, calls[name], predict=None if exact else predict):
            text = generate(pair, number, tokens, gamma, seed + number)
        wall[name] += clock() - start
        length[name] += len(text)
        texts[name].append(pair.decode(text))
    return [
        Arm(
            name, arms[name][1], gamma, calls[name], wall[name], length[name],
            pair.score(texts[name], references),
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
    text = GenerationMixin.generate(  # models have their own, with windows and fallbacks
        pair.target,
        **prompt.arguments,
        assistant_model=pair.draft,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
    )
    found: list[int] = text[0, prompt.length :].tolist()
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

    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    torch_bytes = sum(max(event.self_cpu_memory_usage, 0) for event in seen.events())
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(torch_bytes + peak) / 1e6


def run(
    pair: Pair | None = None,
    *,
    quick: bool = False,
    gammas: Sequence[int] | None = None,
    prompts: int | None = None,
    tokens: int = 100,
    bound: float | None = None,
    large_vocab: int | None = 151_936,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Row:
    """All tables for one pair. `quick` ends within ten minutes on two CPU cores.

    `gammas` are those of the sweep with a constant gamma, `bound` is the sigmoid's -alpha and beta;
    None takes the paper's.
    """
    count = prompts or (8 if quick else 48)
    pair = pair or shipped_pair(count)
    # a score of texts that are cut short says nothing
    tokens = pair.longest or (min(tokens, 64) if quick else tokens)
    bound = pair.bound if bound is None else bound
    arms = methods(bound)
    sigmoid = Paper(True, -bound, bound)
    document: Row = {
        "pair": pair.name, "tokens": tokens, "prompts": min(count, len(pair.prompts)),
        "bound": bound, "score": pair.score.name,
        "device": str(pair.device), "torch": torch.__version__,
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
    vocab, device = int(pair.target.config.vocab_size), str(pair.device)
    document["memory"] = [
        {"method": name, "gamma": gamma, "mb": allocated(verify, gamma, vocab, device)}
        for gamma in (5, 20)
        for name, (verify, _) in arms.items()
    ]
    if large_vocab:
        progress(f"random weights, V={large_vocab}")
        large = tiny_pair(large_vocab, str(pair.device))
        document["large"] = {"pair": large.name} | {
            "rows": _rows(
                compare(large, arms, tokens=24 if quick else 64, gamma=5, seed=seed, prompts=4)
            )
        }
    return document


def _rows(arms: list[Arm]) -> list[Row]:
    return [arm.row(arms[0]) for arm in arms]
