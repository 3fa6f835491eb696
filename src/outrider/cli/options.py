"""Options that several commands share, and the speculator that they ask for."""

from typing import Annotated, Any

import typer

from outrider.cli.console import LOADING, working
from outrider.errors import ConfigurationError
from outrider.load import load
from outrider.speculator import Speculator

Target = Annotated[
    str | None, typer.Option(help="Target: local path or hub name. Default: shipped.")
]
Draft = Annotated[str | None, typer.Option(help="Draft model: local path or hub name.")]
DrafterName = Annotated[
    str | None,
    typer.Option(help="Name of a drafter; default: draft_model, without one prompt_lookup."),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="Length of a chain, or depth of a tree; default: 4, or as --branching has it.",
    ),
]
Branching = Annotated[str | None, typer.Option(help="Children per level, e.g. 3,2,1.")]
Width = Annotated[
    int | None, typer.Option(help="Paths of beam and paths; nodes per level of dynamic_tree.")
]
TotalTokens = Annotated[
    int | None, typer.Option(help="Drafted tokens of dynamic_tree, or with --acceptance.")
]
Acceptance = Annotated[
    str | None,
    typer.Option(help="Best static shape for these chances by child, e.g. 0.6,0.15,0.05."),
]
Table = Annotated[
    str | None, typer.Option(help="File of counts for ngram_table; with the shipped pair: its own.")
]
Rule = Annotated[str | None, typer.Option(help="Verification rule; default: the drafter's.")]
Coupled = Annotated[bool, typer.Option(help="Same seed, same text, whatever the drafter.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 is off.")]
TopP = Annotated[float, typer.Option(help="1 is off.")]
MinP = Annotated[float, typer.Option(help="0 is off.")]
Device = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: measured.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def parse_branching(given: str | None) -> tuple[int, ...] | None:
    """ "3,2,1" to (3, 2, 1)."""
    if given is None:
        return None
    try:
        counts = tuple(int(part) for part in given.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigurationError(
            f"--branching must be positive numbers separated by commas; got {given!r}; try 3,2,1"
        )
    return counts


def parse_acceptance(given: str | None) -> tuple[float, ...] | None:
    """ "0.6,0.15" to (0.6, 0.15)."""
    if given is None:
        return None
    try:
        return tuple(float(part) for part in given.split(","))
    except ValueError:
        raise ConfigurationError(
            f"--acceptance must be numbers separated by commas; got {given!r}; try 0.6,0.15,0.05"
        ) from None


def loaded(
    target: str | None,
    draft: str | None,
    *,
    branching: str | None,
    acceptance: str | None,
    threads: int | None,
    **how: Any,
) -> Speculator:
    """`outrider.load` with the options as they were typed."""
    how |= {"branching": parse_branching(branching), "acceptance": parse_acceptance(acceptance)}
    with working(LOADING):
        return load(target, draft, threads="auto" if threads is None else threads, **how)
