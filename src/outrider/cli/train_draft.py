"""`outrider train-draft`: a head or a small draft for a target that is there."""

from pathlib import Path
from typing import Annotated

import typer

from outrider import lazy
from outrider.cli import options, typed_values
from outrider.cli.console import EXIT_INTERRUPTED, LOADING, bar, err, out, working
from outrider.train.task import Plan, Task


def command(
    target: Annotated[str, typer.Argument(help="Target: local path or hub name.")],
    *,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts: files or folders of text, or JSON lines with 'text'; may be repeated."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts that the target answers itself, which trains best: one a line, or JSON "
            "lines with 'prompt'; may be repeated."
        ),
    ] = None,
    to: Annotated[
        Path, typer.Option("--out", help="Folder of the draft; an interrupted run goes on there.")
    ],
    kind: Annotated[
        str, typer.Option(help="head: EAGLE-3, on the target's states; layers: a small draft.")
    ] = Task.kind,
    layers: Annotated[
        str | None, typer.Option(help="Of kind layers: which of the target, e.g. 0,29.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.001, help="Of training.")] = Plan.minutes,
    steps: Annotated[
        int | None, typer.Option(min=1, help="In place of minutes: gives the same draft again.")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=2, help="Most tokens that the draft proposes.")
    ] = Task.vocab_size,
    inner: Annotated[
        int | None, typer.Option(min=1, help="Width of the head's MLP. Default: the target's.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=4, help="Drafted tokens that a head learns to chain.")
    ] = Plan.rounds,
    batch: Annotated[int, typer.Option(min=16, help="Tokens of a step.")] = Plan.batch,
    rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = Plan.rate,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=16, help="Of an answer.")
    ] = Task.tokens,
    rows: Annotated[int, typer.Option(min=1, help="Answers written together.")] = Task.rows,
    seed: Annotated[int, typer.Option(help="Another seed is another order and sample.")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train a draft for TARGET from its own answers and from texts.

    It may be interrupted at any time; the same command goes on. Prints held-out acceptance before
    and after, and what speed to expect.
    """
    from outrider.train import published
    from outrider.train.job import look, run

    lazy.collect_as_usual()

    task = Task(
        target,
        to,
        tuple(data or ()),
        tuple(prompts or ()),
        kind,
        typed_values.numbers("--layers", layers, int, "0,29") or (),
        vocabulary,
        inner,
        max_new_tokens,
        rows,
        plan=Plan(minutes, steps, rounds, batch, rate, seed=seed),
        trust=trust_remote_code,
    )
    look(task)
    with working(LOADING):
        speculator, model = published.opened(target, device, dtype, threads, trust_remote_code)
    with bar("train-draft") as show:
        result = run(speculator, model, task, show, lambda said: err.print(said, markup=False))
    if result is None:
        out.print(f"interrupted; the same command goes on from {task.out}", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED)
    with working("measuring what steps cost"):
        text = published.publish(result, task)
    out.print(text, markup=False)
