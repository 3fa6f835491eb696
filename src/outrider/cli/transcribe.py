"""`outrider transcribe`: recordings to text, captions or JSON, several as one ragged batch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, typed_values
from outrider.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_SOME,
    INPUT,
    LINE_SECONDS,
    LOADING,
    as_typed,
    bar,
    err,
    figures,
    named_file,
    named_input,
    put,
    working,
)
from outrider.cli.gathered import gathered
from outrider.cli.generate import describe, how_made
from outrider.errors import ConfigurationError, OutriderError, UnknownName
from outrider.models import budget
from outrider.models.program_imports import import_lean
from outrider.speech.formats import FORMATS, TIMES, written

if TYPE_CHECKING:
    from outrider.speech import audio
    from outrider.speech.result import Transcript
    from outrider.text.speculator import Speculator


# Options of `outrider transcribe`.

Files = Annotated[
    list[str], typer.Argument(help="Recordings: WAV; others by soundfile; -: standard input.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Whisper or audio language model: folder or hub name."),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Draft model: path, hub name or, shipped, whisper-base-draft. Default: none.",
    ),
]
DraftLayers = Annotated[
    str | None, typer.Option(help="Draft with these layers of the model's own decoder, e.g. 0,5.")
]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", "-f", help=f"{', '.join(FORMATS)}; may be repeated. Default: txt."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder for the files. Default: standard output."),
]
Reference = Annotated[
    list[str] | None,
    typer.Option(
        help="Captions or text to copy from (srt, vtt, txt, json); one for each file, in "
        "their order."
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Also decode plainly, and print both times, encoder and decoder."
    ),
]


@dataclass
class _Settings:
    """Fields of `TranscribeSettings`, as they are typed."""

    language: Annotated[
        str | None, typer.Option("--language", "-l", help="Code or name. Default: detected.")
    ] = None
    task: Annotated[str, typer.Option(help="transcribe, or translate into English.")] = "transcribe"
    timestamps: Annotated[str, typer.Option(help=f"Times that are told: {', '.join(TIMES)}.")] = (
        "segment"
    )
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Above 1: cut at pauses and decode so many windows at once. Default: windows "
            "follow each other, files side by side.",
        ),
    ] = None
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            "-t",
            help="0 is greedy; may be repeated: the next one is tried where a text will not do. "
            "Default: 0 to 1 by 0.2.",
        ),
    ] = None
    best_of: Annotated[
        int | None, typer.Option(min=1, help="Texts drawn at a temperature above 0.")
    ] = None
    beam_size: Annotated[
        int | None, typer.Option(min=1, help="Beams of a search at temperature 0. Default: greedy.")
    ] = None
    patience: Annotated[
        float | None,
        typer.Option(
            help="A search ends with beam size * patience texts, as openai-whisper's does."
        ),
    ] = None
    length_penalty: Annotated[
        float | None,
        typer.Option(help="A beam's log-probability is divided by its length to this. Default: 1."),
    ] = None
    initial_prompt: Annotated[
        str | None, typer.Option(help="Told to the model first: names, spelling.")
    ] = None
    condition_on_previous_text: Annotated[
        bool | None,
        typer.Option(
            "--condition-on-previous-text/--no-condition-on-previous-text",
            help="Tell windows what was said before. Default: where they follow each other.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of temperatures above 0.")] = 0


WINDOW = 30  #: seconds that a Whisper hears at once
FETCH = "hf download openai/whisper-base"


@gathered("settings", _Settings)
def transcribe(
    files: Files,
    model: Model = None,
    draft: Draft = None,
    draft_layers: DraftLayers = None,
    drafter: options.SpeechDrafterName = None,
    num_speculative_tokens: options.Gamma = None,
    planner: options.Planned = None,
    format: Formats = None,
    output: Output = None,
    reference: Reference = None,
    *,
    settings: _Settings,
    compare: Compare = False,
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    verbose: options.Verbose = False,
) -> None:
    """Transcribe recordings with a Whisper model or an audio language model."""
    options.compile_ahead(device)
    import_lean()
    from outrider.loading import load
    from outrider.resolve_config import seen
    from outrider.speech.settings import TranscribeSettings
    from outrider.speech.speech_model import check

    kinds = list(dict.fromkeys(format or ["txt"]))
    asked: dict[str, Any] = {n: one for n, one in vars(settings).items() if one not in (None, [])}
    if settings.initial_prompt:
        asked["initial_prompt"] = as_typed(settings.initial_prompt)
    TranscribeSettings(**asked)  # before a model is loaded
    _check(files, kinds, output, reference)
    copied = [_copied(given) for given in reference or ()]
    name = drafter or _usual(draft or draft_layers, reference)
    if compare and name == "none" and not reference:
        raise ConfigurationError(
            "--compare has nothing to compare: nothing drafts; give --draft-model, --draft-layers, "
            "--reference or --drafter"
        )
    failed: dict[str, OutriderError] = {}
    model = _named(model)
    files, said = named_input(files, "recording")
    if heard := _readable(files, failed):
        _made(output)
        known = seen(model, trust_remote_code=trust_remote_code)
        check(known, settings.language, settings.task)
        with working(LOADING), budget.postponing():
            speculator = load(
                model,
                draft,
                draft_layers=typed_values.numbers("--draft-layers", draft_layers, int, "0,5"),
                drafter=name,
                num_speculative_tokens=num_speculative_tokens,
                planner=planner,
                dtype=dtype,
                draft_dtype=draft_dtype,
                device=device,
                threads="auto" if threads is None else threads,
                trust_remote_code=trust_remote_code,
            )
        speculator.engine.priced(1)  # what an earlier start measured is confirmed behind the text
        if verbose:
            greedy = settings.temperature in (None, [], [0])
            describe(speculator, how_made(speculator, greedy=greedy))
        if reference:
            asked["reference"] = [copied[files.index(name)] for name in heard]
        done = _run(speculator, heard, asked, failed, kinds, output, said)
        if compare and done:
            if reference:
                asked["reference"] = [copied[files.index(name)] for name in done]
            _compare(speculator, list(done), asked)
    for name, error in failed.items():
        err.print(said(f"failed: {name}: {error}"), style="bold red", markup=False)
    if failed:
        err.print(f"{len(failed)} of {len(files)} recordings failed", markup=False)
        raise typer.Exit(EXIT_SOME)


def _named(model: str | None) -> str:
    if model is None:
        raise ConfigurationError(
            "transcribe needs a Whisper model; got no --model; fetch one with "
            f"`{FETCH}` and say --model openai/whisper-base, or name a local folder"
        )
    return model


def _check(
    files: Sequence[str], kinds: Sequence[str], output: Path | None, reference: list[str] | None
) -> None:
    """Refuse what cannot be written or told apart, before anything is loaded."""
    for kind in kinds:
        if kind not in FORMATS:
            raise UnknownName("format", kind, FORMATS)
    if output is None and (len(kinds) > 1 or (len(files) > 1 and kinds != ["txt"])):
        raise ConfigurationError(
            f"{len(files)} recording(s) as {', '.join(kinds)} need a folder to be written to; got "
            "no --output; say where"
        )
    if output is not None and output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output must be a folder; got the file {output}; name another")
    if reference and len(reference) != len(files):
        raise ConfigurationError(
            f"--reference is one for each file; got {len(reference)} for {len(files)} files; "
            "give as many, in their order"
        )
    if files.count(INPUT) > 1:
        raise ConfigurationError(f"standard input is read once; got {list(files)}; name files")
    stems = [Path(name).stem for name in files]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None)
    if output is not None and twice is not None:
        raise ConfigurationError(
            f"two recordings would be written as {twice!r} in {output}; got "
            f"{[name for name in files if Path(name).stem == twice]}; give each its own --output"
        )


def _made(output: Path | None) -> None:
    """The folder for the files, before anything is heard that could not be written."""
    if output is None:
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        said = None if os.access(output, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as error:
        said = error.strerror
    if said is not None:
        raise ConfigurationError(
            f"cannot write to --output ({said}); got {output}; name a folder that can be written to"
        )


def _readable(files: Sequence[str], failed: dict[str, OutriderError]) -> list[str]:
    """The files that look like recordings; the others are noted."""
    from outrider.speech import audio

    fine = []
    for name in files:
        try:
            audio.look(name, 0, None, 16000)
        except OutriderError as error:
            failed[name] = error
        else:
            fine.append(name)
    return fine


def _copied(given: str) -> str | Path:
    """A reference as a file or as text. Raises ConfigurationError before a model is loaded."""
    from outrider.speech import captions

    found = given if captions.is_name(given) else named_file(given, "reference") or as_typed(given)
    captions.read(found)
    return found


def _usual(draft: str | None, reference: Sequence[str] | None) -> str | None:
    """What drafts if nobody says: speech repeats nothing, so without a draft or a reference it is
    decoded plainly."""
    if reference:
        return "reference_lookup"
    return None if draft is not None else "none"


def _run(
    speculator: "Speculator",
    heard: list[str],
    asked: dict[str, Any],
    failed: dict[str, OutriderError],
    kinds: Sequence[str],
    output: Path | None,
    said: Callable[[str], str],
) -> "dict[str, Transcript]":
    """Transcribe, show how far it has come, and write each recording's files when it is done."""
    running = speculator.transcribe_stream(heard, **asked)
    streams = output is None and kinds == ["txt"] and len(heard) == 1
    total = sum(recording.seconds for recording in running.recordings)
    done: dict[str, Transcript] = {}

    def settle(over: bool = False) -> None:
        for number, transcript in enumerate(running.transcripts):
            name = heard[number]
            if number in running.errors:
                failed.setdefault(name, running.errors[number])
            elif transcript is None:
                if output is None and not over:
                    return  # what comes behind it is printed behind it
            elif name not in done:
                done[name] = transcript
                if not streams:
                    _write(transcript, name, kinds, output, said(name) if len(heard) > 1 else None)

    try:
        with bar("listening", LINE_SECONDS) as show:
            show("listening", 0, round(total))
            for segment in running:
                if streams:
                    put(f"{segment.text.strip()}\n")
                settle()
                now = sum(running.seconds_done(number) for number in range(len(heard)))
                show("listening", round(now), round(total))
    except KeyboardInterrupt:
        settle(over=True)
        err.print(f"interrupted; {len(done)} of {len(heard)} recordings are done", style="yellow")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    settle(over=True)
    options.measure(speculator.engine)
    return {name: done[name] for name in heard if name in done}


def _write(
    transcript: "Transcript", name: str, kinds: Sequence[str], output: Path | None, head: str | None
) -> None:
    """One recording's files, or its text on standard output, below its name if there are others."""
    for kind in kinds:
        text = written(transcript, kind)
        if output is None:
            put(text if head is None else f"# {head}\n{text}")
            continue
        path = output / f"{Path(name).stem}.{kind}"
        try:
            path.write_text(text, "utf-8", newline="\n")
        except OSError as error:
            raise ConfigurationError(
                f"cannot write {path} ({error.strerror}); got --output {output}; name a folder "
                "that can be written to"
            ) from error
        err.print(f"wrote {path}", markup=False)


def _compare(speculator: "Speculator", heard: Sequence[str], asked: dict[str, Any]) -> None:
    """Decode the recordings again, plainly and as they were: both arms warm, in turn first."""
    columns = ("recording", "arm", "encoder s", "decoder s", "in all s", "tokens", "per step")
    table = figures(columns, ("recording", "arm"), ("recording",))
    arms = {"plain": speculator.plain(), "speculative": speculator}
    sums = {arm: [0.0, 0.0] for arm in arms}
    same = 0
    with working("comparing"):
        for arm, one in arms.items():
            one.transcribe(_beginning(speculator, heard[0]), **_of_arm(arm, asked, 0))
        for number, name in enumerate(heard):
            turn = list(arms) if number % 2 == 0 else list(reversed(arms))
            found = {arm: arms[arm].transcribe(name, **_of_arm(arm, asked, number)) for arm in turn}
            same += found["plain"].text == found["speculative"].text
            for arm in arms:
                stats = found[arm].stats
                sums[arm][0] += stats.decoder_ms
                sums[arm][1] += stats.milliseconds
                table.add_row(
                    Path(name).name,
                    arm,
                    f"{stats.encoder_ms / 1e3:.2f}",
                    f"{stats.decoder_ms / 1e3:.2f}",
                    f"{stats.milliseconds / 1e3:.2f}",
                    str(stats.decoded.new_tokens),
                    f"{stats.decoded.block_efficiency:.2f}",
                )
    err.print(table)
    decoder, whole = (a / b for a, b in zip(sums["plain"], sums["speculative"], strict=True))
    err.print(
        f"decoder {decoder:.2f}x, in all {whole:.2f}x; the same text in {same} of {len(heard)}"
        f"{'' if _greedy(asked) else ' (temperatures above 0 draw texts anew)'}",
        markup=False,
    )


def _of_arm(arm: str, asked: dict[str, Any], number: int) -> dict[str, Any]:
    """What is asked for one recording; plain decoding copies from nothing."""
    options = {key: value for key, value in asked.items() if key != "reference"}
    if arm != "plain" and "reference" in asked:
        options["reference"] = asked["reference"][number]
    return options


def _beginning(speculator: "Speculator", name: str) -> "audio.Samples":
    """A recording's first window, for warming up."""
    from outrider.speech import audio

    hearing = speculator.hearing or speculator.sound_prompts
    assert hearing is not None
    rate = hearing.rate
    return audio.look(name, 0, None, rate).read(rate)[: WINDOW * rate]


def _greedy(asked: dict[str, Any]) -> bool:
    """Whether no temperature draws."""
    from outrider.speech.settings import TranscribeSettings

    return not any(TranscribeSettings(**asked).temperatures)
