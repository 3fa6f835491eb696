"""`outrider bench wagner`: what it is asked, the pair, the tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.errors import ConfigurationError
from outrider_lab.papers import options

if TYPE_CHECKING:
    from outrider_lab.papers.wagner_pairs import WagnerPair

TITLES = {
    "methods": "verification by the clock: {prompts} texts of up to {tokens} tokens, T = 1, gamma "
    "from 5 by the heuristic, sigmoid +-{bound:.0e}, {dtype}, {device}",
    "published-methods": "Wagner et al. 2024, tables 1, 5 and 6 (A100): less time in the function, "
    "a step's time, less wall clock",
    "profiled": "verification by the profiler: {profiled prompts} texts",
    "gamma": "initial gamma: a step's profiled time, accepted of drafted",
    "published-gamma": "Wagner et al. 2024, table 8 (XSum)",
    "memory": "most memory in use, by initial gamma",
    "published-text": "Wagner et al. 2024: what figures 3 to 5 show, in words",
    "bounds": "the sigmoid's alpha and beta; in float16, +-1e5 is infinite",
    "published-bounds": "Wagner et al. 2024, table 7 (and 2)",
    "call": "megabytes that one call allocates",
    "published-bandwidth": "Wagner et al. 2024, table 3: realised bandwidth (GB/s above)",
    "published-small-card": "Wagner et al. 2024, table 4 (RTX 2080 TI)",
    "engine": "whole recordings by outrider's own transcription (exact)",
    "large": "random weights, V = 151,936, agreement constructed",
}
READING = (
    "'formula' is the mean of min(1, p^/q^) over drafted tokens, what the paper's acceptance "
    "should be near; a position behind a rejection counts as not accepted. Methods draw different "
    "texts from one law, so calls, wall time and score differ by chance: compare a step's time."
)


@options.with_asked(without=("quick", "prompts", "dtype", "threads"))
def wagner(
    asked: options.PaperRequest,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer prompts and tokens: ten minutes on two cores.")
    ] = False,
    skip: Annotated[
        str | None,
        typer.Option(help="Without --draft-model: the target without these layers, e.g. 3,4,5."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with 'prompt' and 'reference'; default: texts to summarise."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of the models: float32, bfloat16 or float16.")
    ] = "float32",
    recordings: Annotated[
        Path | None,
        typer.Option(help="Folder of recordings with transcripts, for a Whisper pair: WER."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Spoken in the recordings; default: English.")
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(help="The sigmoid's -alpha and beta; default: 1e4, of speech 1e3."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Prompts, if not 48, or 8 with --quick.")
    ] = None,
) -> None:
    """Wagner et al. 2024, tables 1-8: verification time in transformers' assisted generation."""
    from outrider_lab.drawing import pyplot
    from outrider_lab.papers import wagner_pictures, wagner_tables
    from outrider_lab.papers.record import Store, console, folder, show
    from outrider_lab.papers.score import ready

    target, draft = asked.target, asked.draft
    if bound is not None and not 0 < bound < float("inf"):
        raise ConfigurationError(f"--bound must be positive; got {bound:g}; leave it out")
    if skip is not None and (draft is not None or target is None or recordings is not None):
        raise ConfigurationError(
            f"--skip goes with --model, without --draft-model and --recordings; got {skip!r}"
        )
    layers = set() if skip is None else set(options.layers_of(skip))
    if not layers:
        options.both(target, draft)
    if recordings is None:
        ready()
    folder(asked.out)
    if asked.pictures:
        pyplot()
    pair = _pair(target, draft, layers, prompts, recordings, language, device, dtype, quick)

    def progress(text: str) -> None:
        typer.echo(text, err=True)

    settings, tables = wagner_tables.run(
        pair, quick=quick, prompts=count, bound=bound, seed=asked.seed, progress=progress
    )
    if recordings is not None and target is not None and draft is not None:
        from outrider_lab.papers import wagner_engine

        progress("outrider's own transcription")
        rows = wagner_engine.run(pair, target, draft, language, dtype, settings["prompts"])
        tables["engine"] = [{k: v for k, v in row.items() if k != "texts"} for row in rows]
    Store(asked.out, "wagner", settings).write(tables)
    if asked.pictures:
        wagner_pictures.draw(settings, tables, asked.out)
    console.print(settings["pair"], markup=False)
    titles = {name: title.format(**settings) for name, title in TITLES.items() if name in tables}
    show(wagner, tables, titles, asked.out)
    console.print(READING, markup=False)


def _pair(
    target: str | None,
    draft: str | None,
    skip: set[int],
    prompts: Path | None,
    recordings: Path | None,
    language: str | None,
    device: str,
    dtype: str,
    quick: bool,
) -> "WagnerPair":
    """The pair, after everything that can be refused before weights are read."""
    from outrider.models.placement import usable
    from outrider.models.sources import DTYPES
    from outrider_lab.bench.prompts import read_rows
    from outrider_lab.papers.wagner_pairs import load_pair, shipped_pair

    if recordings is not None and (prompts is not None or target is None or draft is None):
        raise ConfigurationError(
            "--recordings go with --model and --draft-model of a Whisper pair, and without "
            "--prompts; "
            f"got {str(recordings)!r}; see outrider bench wagner --help"
        )
    if recordings is None and language is not None:
        raise ConfigurationError(f"--language goes with --recordings; got {language!r} alone")
    usable(device)
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    rows = None if prompts is None else read_rows(prompts)
    if target is None:
        return shipped_pair(8 if quick else 48, device, rows, dtype)
    if recordings is not None and draft is not None:
        from outrider_lab.papers.wagner_speech import speech_pair
        from outrider_lab.recordings import read_folder

        return speech_pair(target, draft, read_folder(recordings), language, device, dtype)
    return load_pair(target, draft, rows, device, dtype, skip)
