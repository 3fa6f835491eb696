"""Bytes of tokens, and texts in another vocabulary, which are told anew where they change."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from letters import DRAFT, TARGET, Letters
from outrider.models.token_bytes import TokenBytes
from outrider.models.token_remap import (
    RetokenizedText,
    VocabularyMap,
    common_prefix_length,
)
from outrider.shipped import shipped

TEXTS = ("def f(x):\n    return x\n", "été ☃ 日本語", "  two  spaces\n\n\ttab", "a" * 300)


def byte_level(merges=(), opening=False):
    """Bytes and these merges; with `opening` every text begins with <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    if opening:
        ids = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def pieces():
    """SentencePiece as Llama has it: a prefix space, unknown characters byte by byte."""
    words = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz():", "re", "▁re", "▁x", "de"]
    merges = [("r", "e"), ("▁", "re"), ("▁", "x"), ("d", "e")]
    vocab = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<bos>")


MERGES = (("r", "e"), ("d", "e"), ("Ġ", "x"), ("Ġ", "re"), ("Ġ", "Ġ"))
TOKENIZERS = {
    "byte-level": lambda: byte_level(MERGES),
    "other merges": lambda: byte_level((("e", "t"), ("Ġ", "r"), ("e", "f")), opening=True),
    "pieces": pieces,
    "shipped": lambda: AutoTokenizer.from_pretrained(shipped("target")),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_spell_their_text(name, text):
    spelling = TokenBytes(TOKENIZERS[name]())
    assert spelling.spelled(spelling.encode(text.encode())) == text.encode()
    half = "é☃".encode()[:-1]  # a character whose last byte is yet to come
    assert spelling.spelled(spelling.encode(half)) == half


def test_a_tokenizer_that_changes_the_text_is_spelled_by_its_longest_tokens():
    small = byte_level(MERGES)
    small.backend_tokenizer.normalizer = normalizers.Lowercase()
    spelling = TokenBytes(small)
    ids = spelling.encode(b"Re re")
    assert spelling.spelled(ids) == b"Re re"
    assert len(ids) == 3  # "R", "e", " re"


@pytest.mark.parametrize("text", TEXTS[:3])
@pytest.mark.parametrize("target", TOKENIZERS)
@pytest.mark.parametrize("draft", TOKENIZERS)
def test_a_text_that_grows_and_is_cut_reads_as_from_the_start(target, draft, text):
    """As the draft's own tokenizer reads it: wherever it was cut, whatever stood there before."""
    words = VocabularyMap(TokenBytes(TOKENIZERS[target]()), TokenBytes(TOKENIZERS[draft]()))
    ids = list(words.target.encode(text.encode() * 3))
    retold, choose, length = RetokenizedText(words, 10_000), random.Random(0), 0
    while length < len(ids):
        wrong = [choose.choice(ids) for _ in range(choose.randint(0, 2))]
        retold.follow([*ids[:length], *wrong], length)
        length, since = min(length + choose.randint(1, 4), len(ids)), length
        retold.follow(ids[:length], since)
        spelled = words.target.spelled(ids[:length])
        assert words.draft.spelled(retold.ids) in (spelled, b" " + spelled)
    whole = words.draft.encode(text.encode() * 3, opens=True)
    assert retold.ids == [*words.draft.opening, *whole]


def test_a_text_that_is_too_long_is_read_from_a_later_place_on():
    words = VocabularyMap(TokenBytes(byte_level(MERGES)), TokenBytes(byte_level(())))
    ids = list(words.target.encode(b"return x\n" * 40))
    retold = RetokenizedText(words, limit=50)
    for length in range(1, len(ids) + 1):
        retold.follow(ids[:length], length - 1)
        assert len(retold.ids) <= 50
        assert words.target.spelled(ids[:length]).endswith(words.draft.spelled(retold.ids))
    retold.follow(ids[:2], 2)  # and back to where it began
    assert words.draft.spelled(retold.ids) == words.target.spelled(ids[:2])


def test_special_tokens_are_read_by_name_or_role_and_end_what_is_said():
    words = VocabularyMap(TokenBytes(byte_level(MERGES)), TokenBytes(TOKENIZERS["shipped"]()))
    bos, eos = words.target.roles["bos"], words.target.roles["eos"]
    text = [bos, *words.target.encode(b"re"), eos, *words.target.encode(b"x")]
    retold = RetokenizedText(words, 100)
    retold.follow(text, 0)
    end = words.draft.roles["eos"]  # the shipped tokenizer opens texts with it, too
    assert retold.ids == [end, *words.draft.encode(b"re"), end, *words.draft.encode(b"x")]
    said = [*words.draft.encode(b"x re"), end, *words.draft.encode(b"gone")]
    assert words.back(said) == [*words.target.encode(b"x re"), eos]
    assert (eos, end) in words.shared


def test_common_tokens_are_those_of_the_same_bytes():
    words = VocabularyMap(TokenBytes(Letters(TARGET)), TokenBytes(Letters(DRAFT)))
    assert words.common == 29
    assert all(TARGET[ours] == DRAFT[theirs] for ours, theirs in words.shared)
    words = VocabularyMap(TokenBytes(pieces()), TokenBytes(byte_level(MERGES)))
    by_bytes = {words.target.spelled([t]): words.draft.spelled([d]) for t, d in words.shared}
    assert {b" re", b"de", b"\n"} <= set(by_bytes)
    assert all(ours == theirs for ours, theirs in by_bytes.items())


@pytest.mark.parametrize(
    ("one", "other", "count"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 4], [1, 2, 3], 2)]
)
def test_the_common_beginning_of_two_texts(one, other, count):
    assert common_prefix_length(one, other) == count
    assert common_prefix_length(list(range(99)) + one, list(range(99)) + other) == 99 + count
