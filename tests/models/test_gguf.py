"""One GGUF file is a model with its tokenizer and chat template."""

import sys

import pytest
import tiny_gguf
import torch

import outrider
from outrider import SamplingParams, Stop
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner
from outrider.models.gguf import quick_reader
from outrider.testing import llama

PACKAGES = "needs the packages gguf and accelerate: pip install 'outrider[gguf]'"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file, and the model that it was made of."""
    pytest.importorskip("gguf", reason=PACKAGES)
    pytest.importorskip("accelerate", reason=PACKAGES)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, tiny_gguf.write(path)


@pytest.fixture(scope="module")
def loaded(written):
    return outrider.load(
        written[0],
        drafter="recall",
        dtype="float32",
        threads=1,
        pack_weights=False,
        planner="fixed",
    )


def test_weights_are_those_that_were_written(written, loaded):
    """By the texts of the model itself, and by a control: another model's differ."""
    prompt = "then the other"
    ids = loaded.tokenizer(prompt)["input_ids"]
    told = (
        loaded.generate(prompt, SamplingParams(0), Stop(20, token_ids=())).completions[0].token_ids
    )
    assert isinstance(loaded.engine.target.runner, LlamaRunner)

    def greedy(model):
        made = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        return made[0, len(ids) :].tolist()

    written[1].generation_config.eos_token_id = None
    assert told == greedy(written[1])
    other = llama(3, vocab_size=len(tiny_gguf.TOKENS))
    assert told != greedy(other)


def test_tokenizer_template_and_end_are_in_it(loaded):
    tokens = loaded.tokenizer
    assert tokens.convert_ids_to_tokens(tokens("the")["input_ids"]) in (["th", "e"], ["t", "he"])
    asked = [{"role": "user", "content": "hi"}]
    text = tokens.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<user>hi<|end|><assistant>"
    assert loaded.eos_ids == (1,)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_folder_of_such_files_says_to_name_one(written, tmp_path, role):
    (tmp_path / "b.gguf").write_bytes(b"")
    (tmp_path / "a.gguf").write_bytes(b"")
    models = [tmp_path] if role == "target" else [llama(), tmp_path]
    with pytest.raises(
        ConfigurationError, match=rf"the {role} model .*; name one of them: \S*a\.gguf$"
    ):
        outrider.load(*models)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", r"\(there is no such file\); check the path"),
        ("garbage", r"\(cut or damaged: .*\); download it again$"),
        ("cut", r"\(cut or damaged: .*\); download it again$"),
        ("folder", r"\(it is a folder\); check the path"),
    ],
)
def test_a_file_that_is_none(written, tmp_path, what, said):
    path = tmp_path / "model.gguf"
    if what == "garbage":
        path.write_bytes(b"no GGUF at all" * 40)
    if what == "cut":
        whole = written[0].read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    if what == "folder":
        path.mkdir()
    with pytest.raises(ConfigurationError, match=r"no GGUF file that can be read " + said) as told:
        outrider.load(path)
    assert "huggingface" not in str(told.value)


def test_packages_that_are_missing_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigurationError, match=r"gguf.*pip install 'outrider\[gguf\]'"):
        outrider.load(tmp_path / "model.gguf")


def fields(path):
    """All that a reader says of a file's metadata."""
    import gguf

    return {
        name: (field.offset, field.data, field.types, [part.tolist() for part in field.parts])
        for name, field in gguf.GGUFReader(path).fields.items()
    }


def test_lists_are_read_in_one_go_as_word_by_word(written, tmp_path):
    """Numbers, strings, an empty list; the package's own reader is back behind it."""
    import gguf

    path = tmp_path / "lists.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["", "a", "\u00e9\u00e8", "b" * 300])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("points", [0.5, 2.0])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    before = gguf.GGUFReader
    for file in (written[0], path):
        want = fields(file)
        with quick_reader(str(file)):
            assert gguf.GGUFReader is not before
            assert fields(file) == want
    assert gguf.GGUFReader is before


@pytest.mark.parametrize("lost", [3, 40])
def test_a_list_that_ends_with_the_file_is_an_error(written, tmp_path, lost):
    import gguf

    path = tmp_path / "cut.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["word"] * 9)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    path.write_bytes(path.read_bytes()[:-lost])
    with quick_reader(str(path)), pytest.raises((ValueError, IndexError)):
        gguf.GGUFReader(path)
