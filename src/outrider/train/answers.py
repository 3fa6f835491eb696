"""The target's own answers to prompts: what a draft has to foresee is what the target writes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.speculator import Speculator
from outrider.text.stop import Stop
from outrider.text.tokens import encode
from outrider.train.features import TrainText
from outrider.train.texts import TextPiece

#: Temperatures of answers in turn: as people use models, and once as it is.
TEMPERATURES = (0.0, 0.7, 0.0, 0.7, 1.0)


def answered(
    speculator: Speculator,
    prompts: Sequence[TextPiece],
    path: Path,
    *,
    tokens: int = 224,
    rows: int = 16,
    seed: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[TrainText, bool | None]]:
    """Answers of up to so many tokens, each with whether it is held out.

    They are written to `path` as they come, a JSON object a line; those that are there already
    from a run that was stopped are read. Raises ConfigurationError for answers to other prompts.
    """
    done = _read(path)
    _check(speculator, prompts, [text for text, _ in done], path)
    with path.open("a", encoding="utf-8") as file:
        for first in range(len(done), len(prompts), rows):
            numbers = range(first, min(first + rows, len(prompts)))
            ids = [_prompt(speculator, prompts[number].prompt) for number in numbers]
            settings = [
                SamplingParams(TEMPERATURES[n % len(TEMPERATURES)], seed=seed + n) for n in numbers
            ]
            made = speculator.generate(ids, settings, Stop(tokens))
            for number, prompt, completion in zip(numbers, ids, made.completions, strict=True):
                text = TrainText((*prompt, *completion.token_ids), len(prompt))
                done.append((text, prompts[number].held_out))
                row = {"start": text.start, "held_out": done[-1][1], "tokens": text.tokens}
                file.write(json.dumps(row) + "\n")
            file.flush()
            show(len(done), len(prompts))
    return [(text, held) for text, held in done if len(text.tokens) > text.start + 8]


def _prompt(speculator: Speculator, prompt: str) -> list[int]:
    """A prompt as a turn of a conversation, where the tokenizer knows how to write one."""
    tokenizer = speculator.tokenizer
    chats = isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.chat_template is not None
    return encode(tokenizer, [{"role": "user", "content": prompt}] if chats else prompt)


def _check(
    speculator: Speculator, prompts: Sequence[TextPiece], done: Sequence[TrainText], path: Path
) -> None:
    """Answers that are there already must be to the first of these prompts."""
    right = len(done) <= len(prompts) and all(
        list(text.tokens[: text.start]) == _prompt(speculator, piece.prompt)
        for text, piece in zip(done, prompts, strict=False)
    )
    if not right:
        raise ConfigurationError(
            f"{str(path)!r} was begun on other prompts; got {len(prompts)} new ones; give another "
            "--out, or delete that file's folder"
        )


def _read(path: Path) -> list[tuple[TrainText, bool | None]]:
    if not path.exists():
        return []
    whole = path.read_text("utf-8")
    whole = whole[: whole.rfind("\n") + 1]  # a line that was cut off is written again
    path.write_text(whole, "utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [(TrainText(tuple(row["tokens"]), row["start"]), row["held_out"]) for row in rows]
