"""Tokens as people and clients see them: text, bytes, offsets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.models.token_bytes import spelling_of

_HALF = "\ufffd"  #: how a text ends whose last character is not complete
_UNFINISHED = 3  #: bytes of a character without its last one, at most


@dataclass(frozen=True)
class TokenFormatter:
    """What tokens of a tokenizer are called."""

    tokenizer: PreTrainedTokenizerBase

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def whole(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones with it."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its log-probability. Half a character has bytes that are no text alone."""
        raw = self.bytes_of(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, -9999.0),  # JSON has no infinity
            "bytes": list(raw),
            "id": token,
        }

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token."""
        return spelling_of(self.tokenizer).bytes_of(token)

    def offsets(self, ids: Sequence[int], since: int, count: int) -> list[int]:
        """Where in the text the tokens from a place on begin, in characters.

        A token that goes on with a character begins where that one does.
        """
        whole = since  # tokens whose characters are complete
        while whole > max(since - _UNFINISHED, 0) and self.text(ids[:whole]).endswith(_HALF):
            whole -= 1
        at, before, offsets = len(self.text(ids[:whole])), max(whole - 1, 0), list[int]()
        for place in range(whole, min(since + count, len(ids))):
            if place >= since:
                offsets.append(at)
            text = self.text(ids[before : place + 1])
            if not text.endswith(_HALF):
                at += len(text) - len(self.text(ids[before:whole]))
                before, whole = whole, place + 1
        return offsets
