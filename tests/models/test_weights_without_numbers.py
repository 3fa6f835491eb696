"""Weights that are no numbers, in any file that is read: one clear error with the file's folder."""

import re

import pytest
import test_dflash
import test_layer_subset
import test_mtp
import test_other_heads
from safetensors.torch import load_file, save_file

import outrider
import tiny_heads
from outrider.errors import NumericalError
from outrider.models.heads import blockwise
from tiny import VOCAB, llama

LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}


def eagle(path):
    return tiny_heads.target(), tiny_heads.speculators(path, tiny_heads.eagle3((2, 3, 3)))


def original(path):
    return tiny_heads.target(), tiny_heads.original(path, tiny_heads.eagle3((2, 3, 3)))


def dflash(path):
    return tiny_heads.target(), test_dflash.authors(path, test_dflash.dflash())


def levels(path):
    model = llama()
    blockwise.save(test_other_heads.heads(model), path, VOCAB)
    return model, path


def layers(path):
    model = llama(num_hidden_layers=3)
    return model, test_layer_subset.folder(path, model, [0, 2])


def hears(path):
    model = test_layer_subset.whisper("three layers")
    return model, test_layer_subset.folder(path, model, [0, 2])


def draft(path):
    llama(seed=1).save_pretrained(path)
    return llama(), path


def mtp(path):
    test_mtp.checkpoint(path)
    return path, path


FOLDERS = [
    *(eagle, original, dflash, levels, layers, hears, draft),
    pytest.param(mtp, marks=test_mtp.reads_mellums),
]


def poisoned(folder, value):
    """The name of a tensor that has this value now, the last one that is of the draft alone."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    named = sorted(name for name, weight in weights.items() if weight.is_floating_point())
    name = next((name for name in named if name.startswith("mtp.")), named[-1])
    weights[name].view(-1)[-1] = value
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("made", FOLDERS, ids=lambda made: made.__name__)
def test_drafts_and_heads_of_no_numbers_are_named(tmp_path, made, value):
    target, folder = made(tmp_path)
    poisoned(folder, value)
    with pytest.raises(NumericalError, match=rf"{re.escape(str(folder))}.*NaN or infinity.*first"):
        outrider.load(target, "mtp" if made is mtp else folder, **LOAD)
