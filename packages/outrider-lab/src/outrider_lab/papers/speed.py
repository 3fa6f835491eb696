"""What speculation is worth: speculative against plain decoding, and the most it could be worth.

Arms take turns on every prompt in one process, with one dtype and one packing; times are those of
decoding, without the prompt. The ceiling is what the measured acceptance and the models' own times
would allow if everything else were free (`measure.SpeedCeiling`); each is measured apart, so that
it can be passed by a little.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from outrider.cli.console import Show
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.output_text import Stop
from outrider.text.speculator import Speculator
from outrider_lab.bench import measure
from outrider_lab.papers import record

PLAIN, SPECULATIVE = "plain", "speculative"
TEMPERATURES = (0.0, 0.6, 1.0)


def run(
    pair: Speculator,
    prompts: Sequence[str],
    out: Path,
    progress: Show,
    *,
    new_tokens: int = 64,
    repeats: int = 2,
) -> record.Tables:
    """A row for each temperature; one that has been measured is not measured again."""
    settings = {
        "drafter": pair.engine.drafter.name,
        "drafted tokens": pair.engine.shapes[0].max_nodes - 1,
        "prompts": len(prompts),
        "of": record.of_prompts(prompts),
        "new tokens": new_tokens,
        "repeats": repeats,
    } | record.of_pair(pair.notes)
    if pair.engine.rule is not None:  # asked for by name
        settings["rule"] = pair.engine.rule.name
    store = record.Store(out, "speed", settings)
    rows: list[record.Row] = []
    calls = 2 * repeats * len(prompts)
    for number, t in enumerate(TEMPERATURES):
        done = count(number * calls)

        def tell(t: float = t, done: Iterator[int] = done) -> None:
            progress(f"T = {t:g}", next(done), calls * len(TEMPERATURES))

        tell()
        found = store.get(f"T {t:g}", _measured, pair, prompts, t, new_tokens, repeats, tell)
        rows.append({"T": t} | found["figures"])
    tables = {"speed": rows}
    store.write(tables)
    return tables


def _measured(
    pair: Speculator,
    prompts: Sequence[str],
    t: float,
    new_tokens: int,
    repeats: int,
    tell: Callable[[], None],
) -> record.Row:
    """Both arms on every prompt at one temperature."""
    arms = {PLAIN: pair.plain(), SPECULATIVE: pair}
    stop = Stop(new_tokens, token_ids=())
    trials = measure.interleave(
        arms, prompts, lambda number: SamplingParams(t, seed=number), stop, repeats, tell
    )
    ratio = measure.ratio(trials, SPECULATIVE, PLAIN)
    top = measure.ceiling(trials, SPECULATIVE, PLAIN)
    stats = [trial.result.stats for trial in trials if trial.arm == SPECULATIVE]
    steps, laws = sum(s.engine_steps for s in stats), sum(s.overlaps for s in stats)
    figures = {
        "tokens a call": top.tokens_per_step,
        "times faster": ratio.value,
        "interval": ratio.text(2),
        "sign": ratio.sign(1.0),
        "ceiling": top.ceiling,
        "reached": top.reached,
        "alpha": sum(s.overlap for s in stats) / laws if laws else None,
        "plain ms": top.score_one_ms,
        "target ms": top.score_block_ms,
        "draft ms": top.propose_ms,
        "verify ms": sum(s.verify_ms for s in stats) / steps,
        "host ms": sum(s.host_ms for s in stats) / steps,
        "prompts": ratio.prompts,
    }
    return {"figures": figures}
