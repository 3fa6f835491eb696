"""The tables of Wagner et al. 2024 on a pair of ours, theirs beside them.

    methods    tables 1, 3, 4, 5: summed time against transformers', bandwidth, scores, wall clock
    profiled   tables 1 and 6 by the profiler, on half of the prompts: summed time, and a step's
    gamma      figure 3 and table 8: a step's profiled time and acceptance by the initial gamma
    memory     figures 4 and 5: the most memory in use by the initial gamma
    bounds     tables 2 and 7: the sigmoid's alpha and beta, in float32 and in float16
    call       megabytes that one call allocates
    engine     speech: the same recordings through outrider's own transcription
    large      a pair with random weights and a large vocabulary

Tables named published-... hold what the paper prints.
"""

from collections.abc import Callable, Sequence

import torch

from outrider_lab.baselines import Paper
from outrider_lab.papers import published
from outrider_lab.papers.record import Row, Tables
from outrider_lab.papers.wagner import (
    START,
    Verify,
    WagnerArm,
    allocated,
    compare,
    methods,
    percent,
)
from outrider_lab.papers.wagner_pairs import WagnerPair, shipped_pair, tiny_pair

GAMMAS = tuple(range(1, 21))
QUICK_GAMMAS = (1, 3, 5, 10, 15, 20)
LARGE = 151_936  #: tokens of Qwen's vocabulary
BOUNDS = (1e1, 1e3, 1e4, 1e5)


def theirs(score: str) -> Tables:
    """What the paper prints for a task of this score, and what it prints for all."""
    return {
        "published-methods": _together(score),
        "published-small-card": _of_score("4", score),
        "published-bandwidth": published.flat("wagner", "3"),
        "published-gamma": published.flat("wagner", "8"),
        "published-bounds": _of_score("7", score),
        "published-text": published.flat("wagner", "text"),
    }


def _of_score(table: str, score: str) -> list[Row]:
    return [row for row in published.flat("wagner", table) if any(score in name for name in row)]


def _together(score: str) -> list[Row]:
    """Tables 1, 5 and 6 side by side; rows that only some of them have keep what there is."""
    found: dict[tuple[str, ...], Row] = {}
    kind = {"WER": lambda part: part != "", "ROUGE-1": lambda part: part == ""}
    for table in ("1", "6", "5"):
        for one in published.rows("wagner", table):
            what = one["row"]
            if score in kind and kind[score](what["part"]):
                key = (what["target"], what["data"], what["part"])
                found[key] = found.get(key, dict(what)) | one["values"]
    return list(found.values())


def run(
    pair: WagnerPair | None = None,
    *,
    quick: bool = False,
    gammas: Sequence[int] | None = None,
    prompts: int | None = None,
    tokens: int = 100,
    bound: float | None = None,
    large: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Row, Tables]:
    """Settings and all tables for one pair. `quick` ends within ten minutes on two CPU cores.

    `gammas` are the initial ones of the sweep, `bound` is the sigmoid's -alpha and beta; None takes
    the paper's.
    """
    count = prompts or (8 if quick else 48)
    pair = pair or shipped_pair(count)
    # a score of texts that are cut short says nothing
    tokens = pair.longest or (min(tokens, 48) if quick else tokens)
    bound = pair.bound if bound is None else bound
    arms, sigmoid = methods(bound), Paper(True, -bound, bound)
    count = min(count, len(pair.prompts))
    few = max(count // 2, 1)
    settings: Row = {
        "pair": pair.name, "tokens": tokens, "prompts": count, "profiled prompts": few,
        "bound": bound, "score": pair.score.name, "device": str(pair.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."), "seed": seed,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    score, tables = pair.score.name, Tables()

    def tried(
        some: dict[str, tuple[Verify, bool]], gamma: int, size: int, profile: bool
    ) -> list[WagnerArm]:
        return compare(pair, some, tokens=tokens, gamma=gamma, seed=seed, prompts=size,
                       predict=sigmoid if some is arms else None, profile=profile)  # fmt: skip

    progress("by the clock (tables 1, 3 to 5)")
    main = tried(arms, START, count, False)
    tables["methods"] = [arm.row(main[0], score) for arm in main]

    swept: dict[int, list[WagnerArm]] = {}
    if gammas is None:
        gammas = QUICK_GAMMAS if quick else GAMMAS
    for gamma in sorted({*gammas, START}):
        progress(f"initial gamma {gamma}, profiled (figures 3 to 5, tables 6 and 8)")
        swept[gamma] = tried(arms, gamma, few, True)
    base = swept[START][0]
    tables["profiled"] = [arm.row(base, score, "profiled") for arm in swept[START]]
    tables["gamma"] = [_swept(arm) for found in swept.values() for arm in found]
    tables["memory"] = [_peaks(found) for found in swept.values()]

    progress("alpha and beta (tables 2, 7)")
    bounds = tried(_bounds(arms["transformers"]), START, few, True)
    tables["bounds"] = [arm.row(bounds[0], score, "profiled") for arm in bounds]

    progress("memory of one call")
    vocab, device = int(pair.target.config.vocab_size), str(pair.device)
    tables["call"] = [
        {"method": name}
        | {f"MB, gamma {gamma}": allocated(verify, gamma, vocab, device) for gamma in (5, 20)}
        for name, (verify, _) in arms.items()
    ]
    if large:
        progress(f"random weights, V={LARGE}")
        wide = tiny_pair(LARGE, str(pair.device))
        found = compare(wide, arms, tokens=24 if quick else 64, gamma=START, seed=seed, prompts=4)
        tables["large"] = [arm.row(found[0], wide.score.name) for arm in found]
    return settings, tables | theirs(score)


def _bounds(base: tuple[Verify, bool]) -> dict[str, tuple[Verify, bool]]:
    found: dict[str, tuple[Verify, bool]] = {"transformers": base}
    for half in (False, True):
        for size in BOUNDS:
            name = f"sigmoid +-1e{len(str(int(size))) - 1}, float{16 if half else 32}"
            found[name] = (Paper(True, -size, size, half), False)
    return found


def _swept(arm: WagnerArm) -> Row:
    step, accepted, calls = arm.step_ms("profiled"), arm.acceptance(), sum(arm.counts)
    return {
        "gamma": arm.gamma,
        "method": arm.label,
        "step ms": step.value,
        "step ms 95 %": step.text(),
        "accepted %": 100 * accepted.value,
        "accepted 95 %": percent(accepted),
        "drafted a step": sum(arm.total("gammas")) / calls,
    }


def _peaks(found: Sequence[WagnerArm]) -> Row:
    """The most memory of each method over its texts, and how far the methods lie apart."""
    row: Row = {"gamma": found[0].gamma}
    for arm in found:
        told = [text.peak_mb for text in arm.texts if text.peak_mb is not None]
        row[f"{arm.name}, MB"] = max(told) if told else None
    known = [value for name, value in row.items() if name != "gamma" and value is not None]
    return row | {"within MB": max(known) - min(known) if known else None}
