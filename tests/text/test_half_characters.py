"""Characters that tokens cut in pieces: stop strings ahead of them, prompts that end inside one."""

from unittest import mock

import pytest

from outrider.text.output_text import Detokenizer
from tokenizers_of import EMOJI, LETTERS, byte_fallback, byte_level

LEVEL = byte_level(b" " + EMOJI[:2], b"b" + EMOJI[:1], b"." + EMOJI[:3])


def ids(tokenizer, data):
    """The lone bytes of a text as tokens."""
    names = dict(LETTERS)
    if "<0x00>" in tokenizer.get_vocab():
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        names |= {32: "▁"} | {ord(letter): letter for letter in "abxyz"}
    return [tokenizer.convert_tokens_to_ids(names[byte]) for byte in data]


@pytest.mark.parametrize(
    ("token", "stop", "text"),
    [
        (b" " + EMOJI[:2], " ", ""),
        (b"b" + EMOJI[:1], "b", ""),
        (b"." + EMOJI[:3], "a.", ""),
    ],
)
def test_a_stop_string_ahead_of_half_a_character_ends_the_text_there(token, stop, text):
    whole = Detokenizer(LEVEL, (stop,))
    ahead = ids(LEVEL, b"a") if stop == "a." else []
    merged = LEVEL.get_vocab()["".join(LETTERS[byte] for byte in token)]
    said = whole.push([*ahead, merged, *ids(LEVEL, b"xyz")])
    assert (said + whole.finish(), whole.text) == (text, text)
    assert whole.stopped_at == len(ahead) + 1


@pytest.mark.parametrize("tokenizer", [LEVEL, byte_fallback()], ids=["level", "fallback"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_token_that_completes_a_prompt_s_character_is_text(tokenizer, cut):
    words = Detokenizer(tokenizer, (), ids(tokenizer, b"x" + EMOJI[:cut]))
    said = [words.push([token]) for token in ids(tokenizer, EMOJI[cut:] + b"y")]
    assert said == [""] * (3 - cut) + ["😀", "y"]
    assert words.finish() == ""


@pytest.mark.parametrize("tokenizer", [LEVEL, byte_fallback()], ids=["level", "fallback"])
def test_half_a_character_of_the_prompt_that_nothing_completes_is_the_prompt_s(tokenizer):
    words = Detokenizer(tokenizer, (), ids(tokenizer, b"x" + EMOJI[:2]))
    assert words.push(ids(tokenizer, b"yz")) + words.finish() == "yz"


def test_a_prompt_that_ends_with_the_sign_for_none_keeps_it():
    words = Detokenizer(LEVEL, (), ids(LEVEL, "x\ufffd".encode()))
    assert words.push(ids(LEVEL, b"y")) + words.finish() == "y"


def test_half_a_character_is_held_back_and_told_in_the_end():
    words = Detokenizer(LEVEL)
    assert words.push(ids(LEVEL, b"a " + EMOJI[:2])) == "a "
    assert words.finish() == "\ufffd"
    words = Detokenizer(LEVEL)
    parts = [words.push([token]) for token in ids(LEVEL, b"a" + EMOJI * 12 + b"b")]
    assert "".join(parts) == "a" + "😀" * 12 + "b"


def test_any_cut_of_any_text_says_the_same():
    text = "é 😀a\ufffd ߷😀😀 ü".encode()
    for tokenizer in (LEVEL, byte_fallback()):
        every = ids(tokenizer, text)
        for cut in range(len(every)):
            words = Detokenizer(tokenizer, (), every[:cut])
            said = "".join(words.push([token]) for token in every[cut:]) + words.finish()
            left = text[cut:]
            while left and left[0] & 0xC0 == 0x80:  # of a character that began in the prompt
                left = left[1:]
            assert said.endswith(left.decode())
            assert len(said) - len(left.decode()) <= 1


@pytest.mark.parametrize("tokenizer", [LEVEL, byte_fallback()], ids=["level", "fallback"])
@pytest.mark.parametrize("per", [1, 3])
@pytest.mark.parametrize(
    "piece", [b"\x80", b"\xf0", b"\xe4\xbd", b"\x80\xe4\xbd\xa0", b"a\x80", b"\xc3\x28\xff"]
)
def test_bytes_of_no_character_are_not_decoded_again_and_again(tokenizer, piece, per):
    """Each of them decoded all those before it, and none was told ahead of the end."""
    decode, sizes, told = tokenizer.decode, [], 0

    def counted(given, **how):
        sizes.append(len(given))
        return decode(given, **how)

    every = ids(tokenizer, piece * 150 + b"\xe4\xbd\xa0 x")
    with mock.patch.object(tokenizer, "decode", counted):
        words = Detokenizer(tokenizer)
        for at in range(0, len(every), per):
            words.push(every[at : at + per])
            told = max(told, at - len(words.text))
        words.finish()
    assert words.text == decode(every)
    assert max(sizes) <= 24
    assert told <= (24 if len(piece) == 1 else len(every))


def test_the_sign_for_none_is_told_while_it_is_written():
    tokenizer = byte_fallback("\ufffd")
    sign = tokenizer.convert_tokens_to_ids("\ufffd")
    words = Detokenizer(tokenizer)
    assert len("".join(words.push([token]) for token in [sign] * 200)) >= 184
    assert words.text + words.finish() == "\ufffd" * 200


def test_a_run_that_may_yet_be_characters_is_held_back():
    """Bytes of whole characters and half of one: a decoder of runs shows none until it is whole."""
    tokenizer = byte_fallback()
    words = Detokenizer(tokenizer)
    every = ids(tokenizer, EMOJI * 8)
    assert words.push(every[:-1]) == ""
    assert words.push(every[-1:]) + words.finish() == "😀" * 8
