"""`outrider demo`: watch the shipped pair complete Python, then see what it was worth."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel
from rich.table import Table

from outrider import verifiers
from outrider.cli import console
from outrider.cli.console import LOADING, counter, out, working
from outrider.shipped import parameters

if TYPE_CHECKING:
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.text.output_text import Stop
    from outrider.text.speculator import Speculator

SHOWN = 0.6  #: temperature of the texts on the screen
PROMPTS = ("configparser.py", "textwrap.py", "heapq.py")  # modules that were never trained on


def demo(
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to generate per prompt."),
    ] = 96,
    num_speculative_tokens: Annotated[
        int,
        typer.Option(
            "--num-speculative-tokens", "-k", min=1, max=1024, help="Drafted tokens per step."
        ),
    ] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats of each arm.")] = 3,
) -> None:
    """Complete three held-out Python prompts, then compare with plain decoding."""
    from outrider_lab.bench.machine import load_to_measure

    target, draft = (f"{parameters(which) / 1e6:.1f} M" for which in ("target", "draft"))
    out.print(
        "Loading the shipped pair (the first run measures this machine for a few seconds) ..."
    )
    with working(LOADING):
        pair = load_to_measure(num_speculative_tokens=num_speculative_tokens)
    notes = pair.notes
    out.print(
        f"target {target} parameters, draft {draft}; {notes.dtype}, {notes.threads} thread(s), "
        f"packed weights: {'yes' if notes.packed else 'no'}\n"
    )
    prompts = pick()
    _show(pair, prompts, max_new_tokens)
    _compare(pair, prompts, max_new_tokens, repeats)


def pick() -> list[str]:
    """One prompt of each demo module, or the first ones if a module has none."""
    from outrider_lab.bench.prompts import read_rows

    every = read_rows()
    chosen: list[dict[str, str]] = []
    for module in PROMPTS:
        found = [p for p in every if p["id"].startswith(module)]
        chosen.append(found[0] if found else every[len(chosen)])
    return [p["prompt"].rstrip() for p in chosen]


def _show(pair: "Speculator", prompts: list[str], budget: int) -> None:
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.text.output_text import Stop

    colour = out.coloured

    def decode(token: int) -> str:
        return console.written(pair.tokenizer, token)

    out.print(console.legend(colour))
    for prompt in prompts:
        tail = "\n".join(prompt.splitlines()[-6:])
        out.print(Panel(tail, title="prompt (last lines)", border_style="dim"), markup=False)
        # greedy text of a model this small soon repeats itself, which says little
        stream = pair.stream(prompt, SamplingParams(SHOWN, seed=0), Stop(budget), trace=True)
        for block in stream:
            out.print(console.step(block.block, decode, colour), end="")
        stats = stream.result().stats
        out.print(
            f"\n[dim]temperature {SHOWN:g}: {stats.new_tokens} tokens in {stats.engine_steps} "
            f"target calls, {stats.block_efficiency:.2f} per call[/dim]\n"
        )


def _compare(pair: "Speculator", prompts: list[str], budget: int, repeats: int) -> None:
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.text.output_text import Stop
    from outrider_lab.bench import measure
    from outrider_lab.bench.intervals import LEAST

    plain = pair.plain()
    arms = {"plain": plain, "speculative": pair}
    stop = Stop(budget)
    table = Table(title="plain against speculative decoding: interleaved, same weights and dtype")
    for name in ("T", "plain", "speculative", "times faster", "per call", "equal texts"):
        table.add_column(name, justify="right", no_wrap=True)
    temperatures = (0.0, 0.6, 1.0)
    with counter("timing", len(temperatures) * repeats * len(prompts) * 2) as advance:
        for temperature in temperatures:
            trials = measure.interleave(
                arms,
                prompts,
                lambda number, t=temperature: SamplingParams(t, seed=number),  # type: ignore[misc]
                stop,
                repeats,
                advance,
            )
            rate = {
                arm: sum(t.tokens for t in trials if t.arm == arm)
                / sum(t.seconds for t in trials if t.arm == arm)
                for arm in arms
            }
            fast = [t.result.stats for t in trials if t.arm == "speculative"]
            efficiency = sum(s.new_tokens for s in fast) / sum(s.engine_steps for s in fast)
            if temperature == 0:
                same = _equal(plain, pair, prompts, SamplingParams(0), stop)
                texts = f"{same} of {len(prompts)}"
            else:
                same = _coupled_equal(pair, prompts, temperature, stop)
                texts = f"{same} of {len(prompts)} *"
            ratio = measure.ratio(trials, "speculative", "plain")
            table.add_row(
                f"{temperature:g}",
                f"{rate['plain']:.0f} tok/s",
                f"{rate['speculative']:.0f} tok/s",
                f"{ratio.value:.2f}x {ratio}",
                f"{efficiency:.2f}",
                texts,
            )
    out.print(table)
    out.print(
        "T: temperature. Per call: tokens per call of the target. At T = 0 the texts\n"
        "must be equal. Above it both arms draw from the same distribution with different noise;\n"
        "* coupled mode shares the noise, and then they must be equal as well.\n"
        f"[ ]: 95 % over {len(prompts)} prompts; a sign needs {LEAST} of them.",
        markup=False,
    )


def _equal(
    a: "Speculator", b: "Speculator", prompts: list[str], how: "SamplingParams", stop: "Stop"
) -> int:
    return sum(a.generate(p, how, stop).texts == b.generate(p, how, stop).texts for p in prompts)


def _coupled_equal(pair: "Speculator", prompts: list[str], temperature: float, stop: "Stop") -> int:
    from outrider.drafters import DraftModel
    from outrider.sampling.sampling_params import SamplingParams

    drafter = pair.engine.drafter
    assert isinstance(drafter, DraftModel)
    shared = DraftModel(drafter.model, drafter.counts, shared_noise=True)
    coupled = pair.using(shared, verifiers.get("match"))
    how = SamplingParams(temperature, seed=7)
    return _equal(pair.plain(shared_noise=True), coupled, prompts, how, stop)
