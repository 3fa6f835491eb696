"""`outrider bench tasks`."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import bar
from outrider_lab.papers import options
from outrider_lab.papers.options import RESULTS


def tasks(
    target: Annotated[
        str, typer.Option("--model", "-m", help="Chat model: local path or hub name.")
    ],
    out: options.Out = RESULTS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Four prompts of each kind, 32 tokens; minutes.")
    ] = False,
    pictures: options.Pictures = True,
    draft: Annotated[
        str | None,
        typer.Option("--draft-model", help="Draft model: path, hub name or draft folder."),
    ] = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Only these, e.g. default,suffix. Default: every one that can be made of what is "
            "given."
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="File of counts for n-grams. Default: of Python's documentation, counted here."
        ),
    ] = None,
    skip: Annotated[
        str | None,
        typer.Option(help="Layers that layer_skip leaves out, e.g. 3,4,5. Default: one tenth."),
    ] = None,
    problems: Annotated[
        Path | None,
        typer.Option("--human-eval", help="HumanEval.jsonl.gz, in place of the shipped prompts."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each kind, or problems. Default: all.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Default: 128.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", min=0, help="May be repeated. Default: 0 and 0.7."),
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code/--no-run-code", help="Run what the model writes against tests, fenced in."
        ),
    ] = True,
    rows: Annotated[
        int, typer.Option(min=1, help="Prompts that are decoded together: a batch.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Calls of each prompt in turn; the fastest counts.")
    ] = 1,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    threads: Annotated[
        int, typer.Option(min=1, help="With one the clock is its CPU time, else the wall's.")
    ] = 1,
) -> None:
    """Real tasks: six kinds of prompts, speed over plain decoding and scores, every drafter."""
    from outrider_lab.papers.record import show
    from outrider_lab.tasks import experiment

    asked = experiment.ExperimentRequest(
        target, draft, drafters, table, skip, dtype, threads, problems
    )
    amount = experiment.amount(quick, new_tokens, temperature, seed, run_code, rows, rounds)
    count = limit or (4 if quick else None)
    with bar("tasks") as progress:
        tables, titles = experiment.run(asked, count, amount, out, progress, pictures)
    show(tasks, tables, titles, out)
