"""No image and no recording is read twice: counted, wherever in a prompt it stands again."""

import installed
import media_models
import pytest
import supported_models  # noqa: F401  (puts benchmarks/model_types on the path)
import torch
from test_multi_modal import GREEDY, NEW, model_of, target_of, texts

from outrider import ConfigurationError, StopConditions, UnsupportedModel
from outrider.drafters import Root
from outrider.engine.request import Request
from outrider.models import adapt
from outrider.models.config import placeholders
from outrider.models.encoder_cache import EncoderCache, split
from outrider.models.layer_subset import cut
from outrider.models.prefix_cache import PrefixCache
from outrider.types import MultiModalInputs

FAST = ("gemma3", "idefics3", "llava", "qwen3_vl")
#: Cross attention keeps keys and values of an image with the row, and a prefix of it. Others have
#: one picture (GIT, Kosmos), several in one row that nobody tells apart (MiniCPM), or frames: of
#: these the prompts before are kept, not their pictures alone.
WHOLE = ("git", "idefics", "instructblipvideo", "kosmos-2", "kosmos-2.5", "mllama")
WHOLE += ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
KINDS = [
    pytest.param(kind, marks=installed.marks(kind) + [pytest.mark.exhaustive] * (kind not in FAST))
    for kind in media_models.TYPES
    if kind not in WHOLE
]


def request(kind, ids, kwargs):
    inputs = MultiModalInputs(kwargs, placeholders(model_of(kind).config))
    return Request(ids, GREEDY, StopConditions(NEW), inputs=inputs)


def prompt(kind, *seeds, behind=5):
    """A prompt with these pictures one behind the other, all of one size."""
    made = [media_models.prompt(kind, model_of(kind), seed, 3, behind) for seed in seeds]
    ids = [token for part, _ in made for token in part]
    names = made[0][1]
    kwargs = {
        name: torch.cat([given[name] for _, given in made], int(name.endswith("type_ids")))
        for name in names
    }
    return request(kind, ids, kwargs)


def counted(kind, monkeypatch, asked, prefixes):
    """How many images or recordings are read for each request; their texts are as without."""
    target, reads = target_of(kind), []
    own = EncoderCache._one

    def one(self, part, name, read, given):
        def counting(**kwargs):
            reads.append(name)
            return read(**kwargs)

        return own(self, part, name, counting, given)

    monkeypatch.setattr(EncoderCache, "_one", one)
    found = []
    for each in asked:
        before = len(reads)
        right = texts(target, Root(), [each])
        assert len(reads) == before  # nothing is kept but where prompts are
        assert texts(target, Root(), [each], prefixes=prefixes) == right
        found.append(len(reads) - before)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_read_once_wherever_it_stands(kind, monkeypatch):
    asked = [prompt(kind, 1), prompt(kind, 1, 2), prompt(kind, 2, behind=8), prompt(kind, 3, 2, 1)]
    prefixes = PrefixCache(1 << 20)
    assert counted(kind, monkeypatch, asked, prefixes) == [1, 1, 0, 1]
    assert 0 < prefixes.encoded.bytes
    prefixes.clear()
    assert prefixes.encoded.bytes == 0
    assert counted(kind, monkeypatch, asked[:1], prefixes) == [1]


def test_what_has_no_room_is_read_again(monkeypatch):
    prefixes = PrefixCache(0)
    assert counted("llava", monkeypatch, [prompt("llava", 1)] * 2, prefixes) == [1, 1]
    assert prefixes.encoded.bytes == 0


def test_a_recording_is_read_once(monkeypatch):
    kind = "voxtral"
    ids, kwargs = media_models.prompt(kind, model_of(kind), 1)
    asked = [request(kind, [*ids[:first], *ids[2:]], kwargs) for first in (2, 1)]
    assert counted(kind, monkeypatch, asked, PrefixCache(1 << 20)) == [1, 0]


def test_pictures_are_told_apart():
    pixels, sizes = torch.arange(24.0).view(12, 2), torch.tensor([[1, 2, 4], [1, 2, 2]])
    pair = split({"pixel_values": pixels, "image_grid_thw": sizes, "layer": -1})
    assert [len(one["pixel_values"]) for one in pair] == [8, 4]
    assert [one["image_grid_thw"].tolist() for one in pair] == [[[1, 2, 4]], [[1, 2, 2]]]
    assert [one["layer"] for one in pair] == [-1, -1]
    five = torch.ones(1, 3, 3, 4, 4)
    five[:, 1] = 0  # padding
    assert len(split({"pixel_values": five})) == 2
    whole = (
        {"pixel_values": pixels[:11], "image_grid_thw": sizes},
        {"pixel_values": five, "image_sizes": torch.ones(1, 2)},  # tiles of one
        {"pixel_values": torch.ones(2, 3, 4, 4), "image_sizes": torch.ones(3, 2)},
        {"pixel_values": pixels},  # patches of who knows how many
    )
    assert [len(split(given)) for given in whole] == [1] * 4


def test_what_an_image_of_cross_attention_needs():
    ids, kwargs = media_models.prompt("mllama", model_of("mllama"), 1)
    reader = target_of("mllama").media
    mask = kwargs["cross_attention_mask"]

    def refused(given, words):
        inputs = MultiModalInputs(given, reader.placeholders)
        with pytest.raises(ConfigurationError, match=words):
            reader.examine_media(ids, inputs)

    changing = mask.clone()
    changing[:, -1] = 0
    refused(kwargs | {"cross_attention_mask": changing}, "changes behind the last placeholder")
    refused(kwargs | {"cross_attention_mask": mask[..., 0]}, r"\[1, tokens, images, tiles\]")
    without = {name: value for name, value in kwargs.items() if name != "cross_attention_mask"}
    refused(without, "with a cross_attention_mask")
    with pytest.raises(UnsupportedModel, match="leave draft_layers out"):
        adapt(cut(model_of("mllama"), (0, 1)))
