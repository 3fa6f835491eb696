"""Options of `outrider transcribe`."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.speech.formats import FORMATS, TIMES

Files = Annotated[list[str], typer.Argument(help="Recordings: WAV; others by soundfile.")]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Whisper model: local folder or hub name."),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Draft model: path, hub name or, shipped, whisper-base-draft. Default: none.",
    ),
]
DraftLayers = Annotated[
    str | None,
    typer.Option(help="Draft with these layers of the model's own decoder, e.g. 0,5."),
]
Language = Annotated[
    str | None, typer.Option("--language", "-l", help="Code or name. Default: detected.")
]
Task = Annotated[str, typer.Option(help="transcribe, or translate into English.")]
Times = Annotated[str, typer.Option(help=f"Times of {', '.join(TIMES[1:])}s, or none.")]
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
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Above 1: cut at pauses and decode so many windows at once. Default: windows "
        "follow each other, files side by side.",
    ),
]
Temperature = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature",
        "-t",
        help="0 is greedy; may be repeated: the next one is tried where a text will not do. "
        "Default: 0 to 1 by 0.2.",
    ),
]
BestOf = Annotated[int | None, typer.Option(min=1, help="Texts drawn at a temperature above 0.")]
BeamSize = Annotated[
    int | None, typer.Option(min=1, help="Beams of a search at temperature 0. Default: greedy.")
]
Patience = Annotated[
    float | None,
    typer.Option(help="A search ends with beam size * patience texts, as openai-whisper's does."),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(help="A beam's log-probability is divided by its length to this. Default: 1."),
]
InitialPrompt = Annotated[
    str | None, typer.Option(help="Told to the model first: names, spelling.")
]
ConditionOnPreviousText = Annotated[
    bool | None,
    typer.Option(
        "--condition-on-previous-text/--no-condition-on-previous-text",
        help="Tell windows what was said before. Default: where they follow each other.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of temperatures above 0.")]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Also decode plainly, and print both times, encoder and decoder."
    ),
]
