"""The words of a window and when they are said."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp

from outrider.speech import alignment
from outrider.speech.result import Word
from outrider.speech.speech_model import WhisperModel
from outrider.speech.windows import DecodedWindow

#: Languages that are written without blanks: every character may begin a word.
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_BEFORE = "\"'“¿([{-"  #: belongs to the word behind it; the next to the one ahead
_BEHIND = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_ASCII = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


@dataclass
class _Group:
    """Tokens that are written as one."""

    text: str
    tokens: list[int]  #: their places in the window's text


def of_window(
    ear: WhisperModel, heard: DecodedWindow, prompt: Sequence[int], language: str | None
) -> list[tuple[Word, ...]]:
    """The words of each piece of a window."""
    text, window = heard.text, heard.window
    assert heard.inputs.encoded is not None
    heads = ear.vocabulary.alignment_heads or _upper(ear)
    ids = [*prompt, *text.tokens]
    seen = alignment.weights(ear.model, heard.inputs.encoded.states_BTE, ids, heads)
    own = seen[:, len(prompt) :, : window.count // ear.stride]
    at = alignment.begins(own, int(ear.model.config.median_filter_width))
    ends = [ear.seconds(window.first + ear.stride * int(state)) for state in at]
    starts = [ear.seconds(window.first), *ends]  # a token's query is where the next one is said
    found = []
    for piece in heard.pieces:
        places = range(piece.first, piece.last)
        groups = grouped(ear, [(at, text.tokens[at]) for at in places], language)
        found.append(
            tuple(
                Word(
                    group.text,
                    starts[group.tokens[0]],
                    ends[group.tokens[-1]],
                    sum(exp(text.logprobs[at]) for at in group.tokens) / len(group.tokens),
                )
                for group in groups
            )
        )
    return found


def _upper(ear: WhisperModel) -> list[tuple[int, int]]:
    """All heads of the upper half of the layers, for a model that names none."""
    config = ear.model.config
    layers, heads = int(config.decoder_layers), int(config.decoder_attention_heads)
    return [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]


def grouped(
    ear: WhisperModel, tokens: Sequence[tuple[int, int]], language: str | None
) -> list[_Group]:
    """(place, token) of a text as words; timestamps and special tokens are in none."""
    characters = _characters(ear, [(at, t) for at, t in tokens if t < ear.vocabulary.end_id])
    if language in UNSPACED:
        words = characters
    else:
        words = []
        for one in characters:
            fresh = one.text.startswith(" ") or one.text.strip() in _ASCII or not words
            if fresh:
                words.append(one)
            else:
                words[-1].text += one.text
                words[-1].tokens += one.tokens
    return _punctuated(words)


def _characters(ear: WhisperModel, tokens: Sequence[tuple[int, int]]) -> list[_Group]:
    """The fewest tokens in a row that are whole characters."""
    whole = ear.text([token for _, token in tokens])
    groups, waiting, behind = list[_Group](), list[tuple[int, int]](), 0
    for pair in tokens:
        waiting.append(pair)
        text = ear.text([token for _, token in waiting])
        broken = text.find("\ufffd")
        place = behind + broken
        if broken < 0 or place >= len(whole) or whole[place] == "\ufffd":
            groups.append(_Group(text, [at for at, _ in waiting]))
            behind, waiting = behind + len(text), []
    return groups


def _punctuated(words: list[_Group]) -> list[_Group]:
    """Punctuation goes to the word that it belongs to."""
    for before, behind in reversed(list(pairwise(range(len(words))))):
        mark = words[before]
        follower = next(words[at] for at in range(behind, len(words)) if words[at].tokens)
        if mark.text.startswith(" ") and mark.text.strip() in _BEFORE:
            follower.text, follower.tokens = (
                mark.text + follower.text,
                mark.tokens + follower.tokens,
            )
            mark.text, mark.tokens = "", []
    words = [word for word in words if word.tokens]
    merged: list[_Group] = []
    for word in words:
        if merged and not merged[-1].text.endswith(" ") and word.text in _BEHIND:
            merged[-1].text += word.text
            merged[-1].tokens += word.tokens
        else:
            merged.append(word)
    return merged
