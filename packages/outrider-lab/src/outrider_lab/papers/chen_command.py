"""`outrider bench chen`: what it is asked, the pair, the tables."""

from typing import Annotated

import typer

from outrider.errors import ConfigurationError
from outrider_lab.papers import options

TITLES = {
    "table-1": "ordinary (ArS) and speculative (SpS) sampling, batch 1, up to {tokens} tokens, "
    "{drafter}, rule {rule}",
    "scores": "whether they score the same: two one-sided tests at 5 %, margin {margin:g}; power "
    "is the chance to show it if there is no difference",
    "ceiling": "reading the weights once a token: what memory allows plain decoding",
    "published": "Chen et al. 2023, table 1: Chinchilla 70B with a 4B draft, K = 4, 16 TPU v4",
    "published-text": "Chen et al. 2023: what the text and figure 1 say in words",
}


@options.with_asked(without=("prompts",))
def chen(
    asked: options.PaperRequest,
    drafter: Annotated[
        str | None,
        typer.Option(help="With --model alone: a drafter that needs no model, e.g. suffix."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each task; default: 20, quick 4.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Nucleus texts of a prompt; default: 4, quick 1.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Scores this close count as equal; they are in [0, 1]. Default: 0.1."),
    ] = None,
    run_code: Annotated[
        bool, typer.Option("--run-code/--no-run-code", help="Test the functions that are written.")
    ] = True,
) -> None:
    """Chen et al. 2023, table 1: time and score, greedy and nucleus, of two tasks."""
    from outrider.cli.console import bar
    from outrider_lab.equivalence import MARGIN
    from outrider_lab.papers import chen as experiment
    from outrider_lab.papers.record import show
    from outrider_lab.tasks.scores import needed

    margin = MARGIN if margin is None else margin
    if not 0 < margin < 1:
        raise ConfigurationError(f"--margin must be between 0 and 1; got {margin:g}; leave it out")
    if drafter is not None and (asked.target is None or asked.draft is not None):
        raise ConfigurationError(
            f"--drafter goes with --model, without --draft-model; got {drafter!r}; give a target "
            f"alone"
        )
    if asked.target is not None:
        needed(run_code)
    usual = experiment.ChenAmount()
    amount = experiment.ChenAmount(
        count or (4 if asked.quick else usual.prompts),
        samples or (1 if asked.quick else usual.samples),
        48 if asked.quick else usual.new_tokens,
        margin,
        asked.seed,
    )
    pair = asked.pair() if drafter is None else asked.load(drafter)
    tasks = (
        experiment.code_tasks(pair, amount.prompts)
        if asked.target is None
        else experiment.chat_tasks(pair, amount.prompts, run_code)
    )
    with bar("chen") as progress:
        tables = experiment.run(pair, tasks, asked.out, progress, amount, asked.pictures)
    rule = "rejection" if drafter is None else experiment.rule_of(pair)
    told = {
        "tokens": amount.new_tokens,
        "drafter": f"{experiment.K} tokens of a draft model" if drafter is None else drafter,
        "rule": rule,
        "margin": margin,
    }
    titles = {name: title.format(**told) for name, title in TITLES.items()}
    show(chen, tables, titles, asked.out)
