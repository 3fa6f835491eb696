"""Corpus, tokenizer, windows and n-gram table."""

import numpy as np
import pytest
from training.corpus import Corpus, blocks, build
from training.filters import is_worth_learning, tidy
from training.heldout import is_held_out
from training.ngram import NgramTable, count_ngrams
from training.sources import Source
from training.tokenizer import train_tokenizer
from training.tokens import Windows, read_mixture

CODE = '''import os


class Shelf:
    """Holds books in the order in which they came, and gives them back in the same order."""

    def __init__(self, books=()):
        self.books = list(books)  # a copy: what the caller does with its own list is its business

    def lend(self, title, reader):
        for book in self.books:
            if book.title == title and not book.lent:
                book.lent = reader
                return book
        raise LookupError(f"{title!r} is not on this shelf, or somebody else is reading it")
'''


@pytest.mark.parametrize(
    ("path", "held"),
    [
        ("csv.py", True),
        ("test/test_csv.py", True),
        ("_pydatetime.py", False),
        ("backports/graphlib.py", True),
        ("test/test_string/test_templatelib.py", True),
        ("stringprep.py", False),
        ("some_package/heapq/__init__.py", True),
    ],
)
def test_held_out_by_name(path, held):
    assert is_held_out(path) is held


def test_tables_are_refused_and_code_is_kept():
    assert is_worth_learning("shelf.py", CODE)
    assert not is_worth_learning("numbers_table.py", "x = [" + "1234, " * 60 + "]\n" * 2)
    assert not is_worth_learning("encodings/cp1252.py", CODE)
    assert tidy("if x:\r\n\treturn  \n") == "if x:\n        return\n"


def test_blocks_put_together_are_the_text():
    assert "\n".join(blocks(CODE)) == CODE
    decorated = "import a\n@b\ndef c():\n    pass\n"
    assert blocks(decorated) == ["import a", "@b\ndef c():\n    pass\n"]


def source(tmp_path, package, path, text):
    file = tmp_path / package / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return Source(package, "PSF-2.0", path, file)


def test_no_copy_of_a_held_out_file_is_trained_on(tmp_path):
    own = CODE.replace("Shelf", "Rack").replace("book", "coat").replace("title", "colour")
    corpus = build(
        iter(
            [
                source(tmp_path, "python-3", "shelf.py", own),
                source(tmp_path, "python-3", "csv.py", CODE),
                source(tmp_path, "other", "vendored_copy.py", CODE + own),
            ]
        )
    )
    assert [row["name"] for row in corpus.heldout] == ["python-3/csv.py"]
    assert not any("Shelf" in row["text"] or "book.lent" in row["text"] for row in corpus.train)
    assert any("Rack" in row["text"] for row in corpus.train)
    assert {row["split"] for row in corpus.manifest} == {"train", "heldout"}


def test_the_same_file_is_taken_once(tmp_path):
    corpus = Corpus()
    for version in ("python-3.11", "python-3.12"):
        corpus.add(source(tmp_path, version, "shelf.py", CODE), CODE)
    assert len(corpus.train) == 1


def test_newline_and_indentation_are_tokens_of_their_own():
    tokenizer = train_tokenizer([CODE] * 3, 400)
    assert tokenizer.decode(tokenizer.encode(CODE).ids) == CODE
    for cut in (CODE.index("\n        self") + 1, CODE.index("        for") + 8):
        whole = tokenizer.encode(CODE).ids
        prompt = tokenizer.encode(CODE[:cut]).ids
        assert whole[: len(prompt)] == prompt


def test_windows_depend_on_seed_and_number_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    windows = Windows(tokens, 16, seed=3)
    later = Windows(tokens, 16, seed=3)
    number = windows.per_epoch + 5
    _ = [windows[n] for n in range(number)]
    assert (windows[number] == later[number]).all()
    inputs, targets = windows.batch(range(4))
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    epoch = np.concatenate([windows[n][:-1] for n in range(windows.per_epoch)])
    assert len(set(epoch.tolist())) == len(epoch)


def test_ngram_laws_sum_to_one_and_know_the_text(tmp_path):
    rng = np.random.default_rng(0)
    tokens = np.tile(rng.integers(0, 50, size=40), 20).astype(np.uint16)
    table = count_ngrams(tokens, 50, order=4, at_least=2)
    table.save(tmp_path / "table.safetensors")
    table = NgramTable.load(tmp_path / "table.safetensors", 50)
    for place in (3, 17, 100):
        context = tokens[:place].tolist()
        law = table.law(context)
        assert law.sum() == pytest.approx(1, abs=1e-12)
        assert (law > 0).all()
        assert law.argmax() == tokens[place]
    assert table.law([]).sum() == pytest.approx(1, abs=1e-12)
    assert table.law([7, 7, 7, 7]).sum() == pytest.approx(1, abs=1e-12)


def test_ngram_keys_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="order <= 3"):
        count_ngrams(np.zeros(10, dtype=np.uint16), 60_000, order=4)


def test_a_mixture_has_its_share_of_the_library(tmp_path):
    for name, first in (("train", 0), ("library", 30)):
        (first + np.arange(3000) % 30).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    mixture = read_mixture(tmp_path, length=16, seed=1)
    early, _ = mixture.batch(range(80), share=0.0)
    late, targets = mixture.batch(range(80), share=0.25)
    assert (early < 30).all()
    assert (late >= 30).all(1).sum().item() == pytest.approx(20, abs=1)
    assert (late[:, 1:] == targets[:, :-1]).all()
    assert (mixture.batch(range(8), share=1.0)[0] >= 30).all()
