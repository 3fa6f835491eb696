"""Tiny tokenizers of each kind that models have, built by the tokenizers library."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

LETTERS = bytes_to_unicode()
EMOJI = "😀".encode()


def wrapped(tokenizer, *special):
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def shown(data):
    """Bytes as a byte-level vocabulary writes them."""
    return "".join(LETTERS[byte] for byte in data)


def byte_level(*merged, special=("<|im_end|>",)):
    """All bytes, and tokens of these bytes and of what they begin with. </s> is special, too."""
    parts = dict.fromkeys(data[:n] for data in merged for n in range(2, len(data) + 1))
    tokens = [*LETTERS.values(), *(shown(data) for data in parts)]
    merges = [(shown(data[:-1]), shown(data[-1:])) for data in parts]
    made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return wrapped(made, *special)


def byte_fallback(*words, special=("<|im_end|>",)):
    """A SentencePiece-like vocabulary: lone bytes in hexadecimals, spaces as U+2581."""
    letters = ["▁", *'abcdefghijklmnopqrstuvwxyz{}:,"', "é"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    made = Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return wrapped(made, *special)


def word_pieces():
    """A vocabulary of words and of pieces that go on with them."""
    tokens = ["[UNK]", "the", "##re", "cat"]
    made = Tokenizer(models.WordPiece({t: n for n, t in enumerate(tokens)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return wrapped(made)
