"""What the tokens of a vocabulary spell, in bytes: in these, two vocabularies can be compared.

A token of a byte-level vocabulary ("Ġthe") stands for bytes in an alphabet of 256 characters
(Radford et al. 2019), a piece of SentencePiece ("▁the", "<0x0A>") shows its spaces and spells a
lone byte in hexadecimals, and of a vocabulary of words ("the", "##re") every token that continues
none has a space ahead. Special tokens spell nothing: they are known by their role.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.types import Tokenizer

_KEPT = 4096  #: texts whose tokens are remembered: words come again
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: itself, if it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    shown = {chr(byte): byte for byte in seen}
    return shown | {chr(256 + number): byte for number, byte in enumerate(hidden)}


def name_of(tokenizer: Tokenizer) -> str:
    """What a tokenizer is called in messages: where it is from, and its class."""
    kind = type(tokenizer).__name__
    if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.name_or_path:
        return f"{tokenizer.name_or_path} ({kind})"
    return kind


class TokenBytes:
    """A tokenizer seen as a list of byte strings.

    >>> from transformers import AutoTokenizer
    >>> spelling = TokenBytes(AutoTokenizer.from_pretrained(path))       # doctest: +SKIP
    >>> spelling.spelled(spelling.encode("été".encode()))              # doctest: +SKIP
    b'\\xc3\\xa9t\\xc3\\xa9'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name = name_of(tokenizer)
        self.special: dict[int, str] = {}  #: content of the tokens that spell nothing
        self.roles: dict[str, int] = {}  #: those that begin and end texts
        literal: dict[int, str] = {}
        if isinstance(tokenizer, PreTrainedTokenizerBase):  # others do not tell
            added = tokenizer.added_tokens_decoder.items()
            literal = {number: token.content for number, token in added}
            ids = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
            self.special = dict(ids) | {n: token.content for n, token in added if token.special}
            roles = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
            self.roles = {role: number for role, number in roles.items() if number is not None}
        vocab = tokenizer.get_vocab()
        self.bytes_V: list[bytes | None] = [None] * (max(vocab.values()) + 1)
        # as its decoder says, else by its tokens
        style = _decoded(tokenizer) or _guessed(tokenizer, {*self.special, *literal})
        for token, number in vocab.items():
            if number not in self.special:
                plain = literal.get(number)
                self.bytes_V[number] = style(token) if plain is None else plain.encode()
        #: The token of each byte string; of several the one that is no lone byte in hexadecimals.
        self.ids: dict[bytes, int] = {}
        for _, number in sorted((bool(_BYTE.fullmatch(token)), n) for token, n in vocab.items()):
            if spelled := self.bytes_V[number]:
                self.ids.setdefault(spelled, number)
        self._longest = max(map(len, self.ids), default=0)
        self.opening = tuple(self._opening())  #: what it puts ahead of every text
        self._mid = lru_cache(maxsize=_KEPT)(self._encode)

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self.bytes_V)

    def text(self, token: int) -> str:
        """What a token writes: half a character as U+FFFD, special tokens by their names."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of any token, those of a special one's name included; b"" of an unused id."""
        if token in self.special:
            return self.special[token].encode()
        return (self.bytes_V[token] or b"") if 0 <= token < len(self.bytes_V) else b""

    def spelled(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens, side by side; none of an unused id's."""
        return b"".join(self.bytes_V[n] or b"" for n in ids if n < len(self.bytes_V))

    def encode(self, data: bytes, *, opens: bool = False) -> tuple[int, ...]:
        """Tokens that spell these bytes, as the tokenizer cuts them, without special ones.

        Where it adds, changes or cannot read anything (a prefix space in the middle of a text, a
        character in pieces, letters made small), the longest tokens that spell the bytes themselves
        stand instead; a byte that no token spells is left out. A text that `opens` may have a
        prefix space more.
        """
        return self._encode(data, opens=True) if opens else self._mid(data)

    def _encode(self, data: bytes, opens: bool = False) -> tuple[int, ...]:
        ids: list[int] = []
        while data:
            try:
                text, broken, data = data.decode(), b"", b""
            except UnicodeDecodeError as error:
                text = data[: error.start].decode()
                broken, data = data[error.start : error.end], data[error.end :]
            if text:
                ids += self._told(text, opens and not ids)
            ids += self._pieces(broken)
        return tuple(ids)

    def _told(self, text: str, opens: bool) -> Sequence[int]:
        data = text.encode()
        for given in (text, text[1:]) if text[0] == " " and len(text) > 1 else (text,):
            ids = self._plain(given)
            spelled = self.spelled(ids)
            if spelled == data or (opens and spelled == b" " + data):
                return ids
            if ids and spelled == b" " + data and self.bytes_V[ids[0]] == b" ":
                return ids[1:]
        return self._pieces(data)

    def _plain(self, text: str) -> list[int]:
        """The tokenizer's own tokens, without special ones at either end."""
        ids = [*self._call(text)]
        while ids and ids[-1] in self.special:
            ids.pop()
        while ids and ids[0] in self.special:
            ids.pop(0)
        return ids

    def _call(self, text: str) -> list[int]:
        """Without a warning that a text is longer than some model's context."""
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
            return ids
        return self.tokenizer(text)["input_ids"]

    def _opening(self) -> Sequence[int]:
        sample = next((b.decode("utf-8", "ignore") for b in self.ids if b.isalpha()), "")
        ids = self._call(sample) if sample else []
        ahead = 0
        while ahead < len(ids) and ids[ahead] in self.special:
            ahead += 1
        return ids[:ahead] if ahead < len(ids) else []

    def _pieces(self, data: bytes) -> list[int]:
        """The longest tokens that spell the bytes, from the left."""
        found, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                number = self.ids.get(data[at : at + size])
                if number is not None:
                    found.append(number)
                    break
            else:
                size = 1
            at += size
        return found


_made: Any = lru_cache(maxsize=8)(TokenBytes)


def spelling_of(tokenizer: Tokenizer) -> TokenBytes:
    """A tokenizer's spelling, made once."""
    made: TokenBytes = _made(tokenizer)
    return made


def _decoded(tokenizer: Tokenizer) -> Callable[[str], bytes] | None:
    """How a tokenizer of the tokenizers library makes bytes of tokens; None: it does not say."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return None
    said = json.loads(decoder.__getstate__())
    steps = said["decoders"] if said["type"] == "Sequence" else [said]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        alphabet = _alphabet()
        return lambda token: _byte_level(token, alphabet)
    if "WordPiece" in kinds:
        ahead = next(step["prefix"] for step in steps if step["type"] == "WordPiece")
        return lambda token: _word(token, ahead)
    spaces = [
        step["pattern"]["String"]
        for step in steps
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
    ] + [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    lone = "ByteFallback" in kinds
    if not (spaces or lone):
        return None
    return lambda token: _piece(token, spaces, lone)


def _guessed(tokenizer: Tokenizer, apart: set[int]) -> Callable[[str], bytes]:
    """By what its tokens look like."""
    vocab = tokenizer.get_vocab()
    alphabet = _alphabet()
    if sum(letter in vocab for letter in alphabet) > 128 and "\u0120" in vocab:
        return lambda token: _byte_level(token, alphabet)
    if any(token.startswith("\u2581") for token in vocab):
        return _piece
    ordinary = [number for number in sorted(vocab.values()) if number not in apart][:2]
    text = tokenizer.decode(ordinary, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return _word if " " in text.strip() else str.encode


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


def _piece(token: str, spaces: Sequence[str] = ("\u2581",), lone: bool = True) -> bytes:
    byte = _BYTE.fullmatch(token) if lone else None
    for space in spaces:
        token = token.replace(space, " ")
    return bytes([int(byte[1], 16)]) if byte else token.encode()


def _word(token: str, ahead: str = "##") -> bytes:
    return token.removeprefix(ahead).encode() if token.startswith(ahead) else b" " + token.encode()
