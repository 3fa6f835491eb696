"""What `outrider certify` decodes: prompts of a file, or sources and how answers to them begin."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import ConfigurationError, PromptError

if TYPE_CHECKING:
    from outrider.speech.speech_model import WhisperModel
    from outrider.text.speculator import Speculator
    from outrider.types import Inputs

CUT = 32  #: last tokens of each prompt: contexts should differ, not be long
MADE_UP = 8  #: sources, where none are given


class Decoded(NamedTuple):
    """One entry for each text that is begun."""

    prompts: list[list[int]]
    inputs: "list[Inputs] | None" = None  #: what is read besides; None: made up, or text alone
    named: str = ""  #: where they come from, for results of several runs


def read(speculator: "Speculator", prompts: Path | None, sources: Path | None) -> Decoded:
    """Prompts as token ids, the last few of each; or sources, made up if there is no file.

    Sources are texts or, for speech to text, recordings: one a line, or JSON lines with `source`.
    """
    from outrider.bench.prompts import read_rows
    from outrider.text.prompts import PromptEncoder

    if speculator.engine.target.reads == "text":
        if sources is not None:
            raise ConfigurationError(
                "--sources is what an encoder-decoder reads; got a model that goes on from its "
                "prompt; give --prompts"
            )
        return Decoded(_prompts(speculator, prompts))
    if prompts is not None:
        raise ConfigurationError(
            "--prompts is what a model without an encoder goes on from; got an encoder-decoder; "
            "give --sources, or neither to have sources made up"
        )
    hearing, reader = (
        speculator.hearing,
        PromptEncoder(
            speculator.engine.target, speculator.tokenizer, speculator.opening, speculator.eos_ids
        ),
    )
    if sources is None:
        begun = _begun(hearing) if hearing is not None else reader.begin()
        return Decoded([begun] * MADE_UP)
    texts = [str(row["source"]) for row in read_rows(sources, "source")]
    if hearing is not None:
        inputs = [_heard(hearing, text, number) for number, text in enumerate(texts)]
        return Decoded([_begun(hearing)] * len(texts), inputs, str(sources.resolve()))
    asked = reader.read(texts)
    return Decoded(asked.prompts, asked.inputs, str(sources.resolve()))


def _prompts(speculator: "Speculator", path: Path | None) -> list[list[int]]:
    from outrider.bench.prompts import read_prompts

    texts = read_prompts(path)
    if speculator.tokenizer is None:
        raise ConfigurationError(
            "prompts are text, but the target has no tokenizer; got none beside its weights; "
            "use outrider.certify.certify with token ids"
        )
    ids = [list(speculator.tokenizer.encode(text))[-CUT:] for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        if len(tokens) < 3:
            raise PromptError(
                f"prompts must have at least 3 tokens; got {len(tokens)} in {text!r}; make it "
                "longer or remove it"
            )
    return ids


def _begun(hearing: "WhisperModel") -> list[int]:
    """A transcript in the model's first language, without times."""
    from outrider.speech.prompt import prompt

    words = hearing.vocabulary
    ids, _ = prompt(words, next(iter(words.languages), None), "transcribe", timestamps=False)
    return ids


def _heard(hearing: "WhisperModel", path: str, number: int) -> "Inputs":
    """The first window of a recording."""
    from outrider.speech import audio, feature_extractor
    from outrider.speech.speech_model import one_row

    recording = audio.look(path, number, None, hearing.rate)
    found = feature_extractor.frames(hearing.extractor, recording.read(hearing.rate))
    return one_row(found.window(0, hearing.frames), hearing.model.device)
