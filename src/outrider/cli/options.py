"""Options that several commands share, and the speculator that they ask for."""

import os
from typing import Annotated, Any

import typer

from outrider import verifiers
from outrider.cli.console import LOADING, working
from outrider.drafters import DRAFTERS
from outrider.errors import ConfigurationError
from outrider.load import load
from outrider.speculator import Speculator

Target = Annotated[
    str | None, typer.Option(help="Target: local path or hub name. Default: shipped.")
]
Draft = Annotated[
    str | None,
    typer.Option(help="Draft model: path or hub name. Default: shipped, if the target is."),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        help="What drafts. Default: draft_model; prompt_lookup for a target without one. "
        f"Known: {', '.join(sorted(DRAFTERS))}."
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        max=1024,
        help="Drafted tokens in a row: length of a chain, depth of a tree. Default: as "
        "--branching has it, 5 for dynamic_tree, 8 for prompt_lookup, else 4.",
    ),
]
Branching = Annotated[str | None, typer.Option(help="Children per level, e.g. 3,2,1.")]
Width = Annotated[
    int | None,
    typer.Option(max=1024, help="Paths of beam and paths; nodes per level of dynamic_tree."),
]
TotalTokens = Annotated[
    int | None,
    typer.Option(max=4096, help="Drafted tokens of dynamic_tree, or with --acceptance."),
]
Acceptance = Annotated[
    str | None,
    typer.Option(help="Best static shape for these chances by child, e.g. 0.6,0.15,0.05."),
]
Table = Annotated[
    str | None,
    typer.Option(help="File of counts for ngram_table. Default: the shipped pair's, with it."),
]
Rule = Annotated[
    str | None,
    typer.Option(
        help="What accepts drafted tokens. Default: an exact rule that fits the drafter. Known: "
        f"{', '.join(verifiers.listed())}."
    ),
]
Coupled = Annotated[
    bool, typer.Option("--coupled", help="Same seed, same text, whatever the drafter.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option(help="Keep the fewest tokens that reach this probability; 1 is off.")
]
MinP = Annotated[
    float, typer.Option(help="Keep tokens with this share of the best one's probability; 0 is off.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16; auto: measured on a CPU, else the checkpoint's."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=os.cpu_count(), help="CPU threads; default: measured."),
]
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
