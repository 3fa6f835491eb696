"""`outrider compare`: plain, speculative and transformers' decoding, side by side."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options, typed_values
from outrider.cli.console import LOADING, counter, figures, out, put, working

if TYPE_CHECKING:
    from outrider_lab.certify.report import Row


def compare(
    target: options.Target = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            help="Draft model. Without one a chain is prompt lookup's on both sides.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSON lines with 'prompt', or one a line. Default: held-out code."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many prompts. Default: all.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens of each text.")
    ] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="May be repeated. Default: 0 and 1."),
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            min=1,
            max=1024,
            help="Length of a fixed chain; may be repeated. Default: 4, or none with a tree.",
        ),
    ] = None,
    branching: Annotated[
        list[str] | None,
        typer.Option(help="A tree by children per level, e.g. 3,2,1; may be repeated."),
    ] = None,
    assisted: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=1024,
            help="Draft length for transformers; may be repeated. Default: 2, 4 and 6, and "
            "always its own default.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every arm runs.")] = 2,
    dtype: options.Dtype = "auto",
    fastest: Annotated[
        bool,
        typer.Option("--fastest-dtype", help="Also measure each arm in its own fastest dtype."),
    ] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    packed: Annotated[
        bool | None,
        typer.Option("--packed/--no-packed", help="Pack our weights on a CPU; default: measured."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare with plain decoding and with transformers on the same prompts, interleaved.

    Ours is measured as `outrider.load` has it with nothing set, and with chains and trees of a
    fixed size beside it.
    """
    from outrider_lab.bench.compare import ComparePlan, Comparison

    trees = tuple(typed_values.branching(text) or () for text in branching or ())
    plan = ComparePlan(
        target,
        draft,
        prompts,
        count,
        max_new_tokens,
        tuple(temperature or (0.0, 1.0)),
        tuple(num_speculative_tokens or ((4,) if not trees else ())),
        trees,
        tuple(assisted or (2, 4, 6)),
        repeats,
        dtype,
        fastest,
        device,
        threads,
        packed,
        trust_remote_code,
    )
    with working(LOADING):
        comparison = Comparison(plan)
    with counter("measuring", comparison.total) as advance:
        comparison.run(advance)
    document = comparison.document()
    if as_json:
        put(json.dumps(document, ensure_ascii=False) + "\n")
        return
    show(document)


def show(document: "Row") -> None:
    """The document as tables."""
    from outrider_lab.bench.intervals import Interval

    chosen = document["settings"]
    out.print(
        f"{chosen['prompt_count']} prompts, {chosen['max_new_tokens']} tokens, "
        f"{chosen['repeats']} repeats; {chosen['dtype']} in every arm, {chosen['threads']} "
        f"thread(s), packed weights on our side: {'yes' if chosen['packed'] else 'no'}; times of "
        "whole calls"
    )
    for name, block in document["by_temperature"].items():
        columns = ("arm", "ms/token", "tok/s", "per call", "ms per step")
        table = figures(columns, ("arm",), ("arm", "ms per step"), f"temperature {name}")
        for arm, row in block["methods"].items():
            parts = row.get("ms_per_step")
            table.add_row(
                _short(arm) + (" *" if arm in block["best"].values() else ""),
                f"{row['ms_per_token']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['block_efficiency']:.2f}",
                " ".join(f"{parts[p]:.1f}" for p in parts) if parts else "",
            )
        out.print(table)
        for pair, ratio in block["ratios"].items():
            out.print(f"  {pair}: {Interval.of_row(ratio).times()}", markup=False)
    if document["text_equal"]:
        for pair, same in document["text_equal"].items():
            out.print(f"greedy texts {pair}: {same['equal']} of {same['of']} equal")
        out.print(f"greedy texts that loop: {100 * document['loop_share']:.0f} %")
    for name, block in (document["fastest"] or {}).items():
        parts = [
            f"{family} {row['ms_per_token']:.2f} ms ({row['dtype']})"
            for family, row in block.items()
            if family != "ratios"
        ]
        out.print(f"each arm's fastest dtype, temperature {name}: {'; '.join(parts)}")
    machine = document["environment"]
    out.print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['device']}; torch "
        f"{machine['torch']}, transformers {machine['transformers']}"
    )
    out.print(
        "behind an arm: tokens drafted in a row, default with nothing set; per call: new tokens "
        "per target call, a prompt's own call left out; ms per step: propose score verify commit "
        "emit host"
    )
    out.print("* the family's best setting, used in the ratios", markup=False)


def _short(arm: str) -> str:
    if arm == "transformers_generate":
        return "transformers"
    return arm.replace("transformers_assisted", "assisted").removesuffix(" tokens")
