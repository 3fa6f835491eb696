"""What texts are written from: prompts, chats, nothing, the sources of an encoder, recordings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider import Request, SamplingParams, Speculator, StopConditions
from outrider.engine.batch import encoded
from outrider.errors import ConfigurationError
from outrider.speech.audio import look
from outrider.speech.speech_model import one_row
from outrider.speech.transcriber import window_prompt
from outrider.speech.windows import frames
from outrider_lab.bench.prompts import read_rows
from outrider_lab.recordings import KINDS
from outrider_lab.tasks import prompts as shipped

#: What one task is: a row of a file, with its texts by name.
Rows = Sequence[dict[str, str]]
PROMPT = 64  #: tokens of a prompt that are read, the last ones
#: As many new tokens as a source has, and these: a correction is about as long.
MORE = 32
RATE, WINDOW_S = 16_000, 30  #: of all Whispers


def reads_sources(pair: Speculator) -> bool:
    """Whether the target is an encoder-decoder."""
    return pair.engine.target.reads == "source"


def usual_rows(pair: Speculator) -> list[dict[str, str]]:
    """What a decoder-only model is asked where nobody says: chat and code, as far as it can chat.

    A model with a chat template gets the shipped prompts of six kinds in it, others the held-out
    code. `category` is the task, as in Spec-Bench's files.
    """
    if pair.tokenizer.chat_template is None:
        return [row | {"category": "code"} for row in read_rows()]
    return [
        {"said": task.turns[0], "category": "code" if task.kind == "code" else "chat"}
        for task in shipped.tasks()
    ]


def recorded_rows(folder: Path, language: str, most: int) -> list[dict[str, str]]:
    """The longest recordings that fit into a window, of a folder and those below it; no transcripts
    needed.

    Raises ConfigurationError if there is none.
    """
    files = (file for file in sorted(folder.rglob("*")) if file.suffix.lower() in KINDS)
    seconds = {file: look(file, 0, None, RATE).seconds for file in files}
    fitting = [file for file in seconds if seconds[file] <= WINDOW_S]
    if not fitting:
        raise ConfigurationError(
            f"no recording of {WINDOW_S} s or less among {len(seconds)}; got {str(folder)!r}; give "
            f"a folder with {', '.join(KINDS)}"
        )
    longest = sorted(fitting, key=lambda file: -seconds[file])[:most]
    return [
        {"recording": str(file), "language": language, "category": "speech"} for file in longest
    ]


def tasks(pair: Speculator, rows: Rows) -> list[Request]:
    """A request for every row: its `prompt`'s end, what is `said` to a chat model, or its `source`
    or `recording` as encoder states.

    Every source is read once here and never again. The rules of a generation configuration are
    left out: what is measured are the models' own laws.
    """
    if not reads_sources(pair):
        return [Request(_ids(pair, row)) for row in rows]
    if pair.hearing is not None:
        if any("recording" not in row for row in rows):
            raise ConfigurationError(
                "a speech model hears recordings; got texts for it to read; only bench alpha and "
                "wagner take --recordings FOLDER"
            )
        return [_heard(pair, row) for row in rows]
    target = pair.engine.target
    asked = pair.prompt_encoder.read([row["source"] for row in rows])
    return [
        Request(start, inputs=encoded(target, [inputs]))
        for start, inputs in zip(asked.prompts, asked.sources, strict=True)
    ]


def _ids(pair: Speculator, row: dict[str, str]) -> list[int]:
    if "said" in row:
        return shipped.token_ids(pair.tokenizer, [row["said"]])
    ids: list[int] = pair.tokenizer.encode(row["prompt"].rstrip())[-PROMPT:]
    return ids


def _heard(pair: Speculator, row: dict[str, str]) -> Request:
    """A recording's first window, without timestamps."""
    hearing, target = pair.hearing, pair.engine.target
    assert hearing is not None, "it is a Whisper"
    samples = look(Path(row["recording"]), 0, None, hearing.rate).read(hearing.rate)
    window = frames(hearing.extractor, samples).window(0, hearing.frames)
    ids, _ = window_prompt(hearing.vocabulary, row["language"], "transcribe", timestamps=False)
    return Request(ids, inputs=encoded(target, [one_row(window, target.device)]))


def unasked(pair: Speculator, texts: int) -> list[Request]:
    """As many requests that begin with the token of beginnings alone; none if there is no such
    token, or if the model reads a source."""
    if reads_sources(pair):
        return []
    start = pair.tokenizer.bos_token_id
    return [] if start is None else [Request([start])] * texts


def longest(request: Request) -> int:
    """The most new tokens of an answer to a source."""
    assert request.source is not None
    return int(request.source.mask_BS.sum()) + MORE


def length(pair: Speculator, request: Request, new_tokens: int, wanted: int) -> int:
    """New tokens of a greedy text, of `wanted` or more from every prompt.

    Answers to sources are read to their ends, other texts as far as the target has room.
    """
    room = pair.engine.target.context - len(request.prompt)
    return min(max(new_tokens, wanted if request.inputs is None else longest(request)), room)


def asked(request: Request, sampling: SamplingParams, pair: Speculator, new_tokens: int) -> Request:
    """The task under these settings. Texts of an encoder-decoder end, others go on."""
    ends = pair.eos_ids if reads_sources(pair) else ()
    return replace(request, sampling=sampling, limits=StopConditions(new_tokens, ends))
