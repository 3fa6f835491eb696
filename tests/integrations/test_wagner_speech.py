"""Whisper in the paper's protocol: word errors, drafts with and without an encoder, bad input."""

import json
import math
import wave

import numpy as np
import pytest
import torch
import whispers
from safetensors.torch import save_file
from transformers import GenerationMixin

from outrider.errors import AudioError, ConfigurationError, VocabularyMismatch
from outrider.models.layer_subset import LayerSubsetSource
from outrider.models.sources import ModelSource
from outrider.shipped import shipped
from outrider_lab.papers import (
    wagner,
    wagner_engine,
    wagner_pairs,
    wagner_speech,
    wagner_tables,
)
from outrider_lab.papers.score import word_errors
from outrider_lab.recordings import read_folder


def written(folder, name, seconds, seed=0):
    with wave.open(str(folder / name), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((whispers.sound(seconds, seed) * 32767).astype(np.int16).tobytes())


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders: a Whisper, another as its draft, recordings with transcripts."""
    folder = tmp_path_factory.mktemp("speech")
    for name, seed in (("target", 0), ("draft", 1)):
        whispers.whisper(seed).save_pretrained(folder / name)
        whispers.tokenizer().save_pretrained(folder / name)
        whispers.extractor().save_pretrained(folder / name)
    recordings = folder / "recordings"
    (recordings / "book").mkdir(parents=True)
    written(recordings, "a.wav", 1.5)
    (recordings / "a.txt").write_text("A first\nrecording.")
    written(recordings / "book", "b-1.wav", 1.0, 1)
    written(recordings / "book", "b-2.wav", 0.5, 2)
    written(recordings, "untold.wav", 0.5, 3)
    (recordings / "book" / "b.trans.txt").write_text("b-1 THE SECOND ONE\nb-2 \nb-9 NOWHERE\n")
    return folder


def draft_folder(target, folder, layers, ids):
    """Layers of the target as a draft with a restricted head."""
    folder.mkdir(exist_ok=True)
    (folder / "draft.json").write_text(json.dumps({"of": "tiny", "layers": layers}))
    parts = {"ids": torch.tensor(ids)}
    for name, part in target.get_decoder().named_parameters():
        for number, layer in enumerate(layers):
            if name.startswith(f"layers.{layer}."):
                own = name.replace(f"layers.{layer}.", f"layers.{number}.")
                parts[own] = part.detach().bfloat16()
        if name.startswith("layer_norm."):
            parts[name] = part.detach().bfloat16()
    save_file(parts, folder / "draft.safetensors")
    return folder


def pair_of(places, draft="draft", language="fr"):
    recordings = read_folder(places / "recordings")
    return wagner_speech.speech_pair(
        str(places / "target"), str(places / draft), recordings, language, "cpu"
    )


def test_recordings_have_texts_beside_them_or_in_lists(places):
    found = read_folder(places / "recordings")
    assert [(one.file.name, one.text) for one in found] == [
        ("a.wav", "A first recording."), ("b-1.wav", "THE SECOND ONE"),
    ]  # fmt: skip


def test_words_are_counted_after_normalisation():
    english = word_errors("en")
    assert english(["It's twenty two, Mr. Smith!"], ["it is 22 mister smith"]) == 0
    assert english(["a red dog", "yes"], ["a blue dog", "yes"]) == 1 / 4
    assert math.isnan(english(["something"], [""]))
    assert word_errors("fr")(["vingt-deux"], ["22"]) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["own encoder", "layer of the target"])
def test_all_tables_of_a_speech_pair(places, kind, monkeypatch):
    monkeypatch.setattr(wagner_tables, "BOUNDS", (1e3,))
    if kind != "own encoder":
        draft_folder(whispers.whisper(0), places / "layer", [1], list(range(40, 120)))
    pair = pair_of(places, "draft" if kind == "own encoder" else "layer")
    pair = wagner_pairs.replace(pair, longest=6)
    settings, tables = wagner_tables.run(pair, quick=True, gammas=(1,), prompts=2, large=False)
    assert settings["score"] == "WER"
    assert settings["bound"] == 1e3
    assert len(tables["methods"]) == 4
    assert all(row["calls"] > 0 for row in tables["methods"])
    assert all(0 <= row["WER"] < 20 for row in tables["methods"])
    theirs = tables["published-methods"]
    assert theirs[1] == {
        "target": "small.en", "data": "LibriSpeech", "part": "other"
    } | theirs[1]  # fmt: skip
    assert not any("ROUGE" in name for row in theirs for name in row)


def test_a_draft_folder_proposes_its_ids_alone_by_the_layers_law(places):
    """Its laws are the target's cut to one layer, renormalised over the ids of its head."""
    target = whispers.whisper(0)
    ids = list(range(55, 75))
    folder = draft_folder(target, places / "one", [0], ids)
    source = LayerSubsetSource(ModelSource(target, "target"), folder)
    draft = wagner_speech.decoder(source, "float32", torch.device("cpu"))
    short = whispers.whisper(0)
    short.model.decoder.layers = short.model.decoder.layers[:1]
    tokens = torch.tensor([[60, 61, 70]])
    with torch.no_grad():
        states = target.model.encoder(torch.randn(1, 80, 200)).last_hidden_state
        logits = draft(tokens, encoder_outputs=(states,)).logits
        whole = short(encoder_outputs=(states,), decoder_input_ids=tokens).logits
    law, expected = logits.softmax(-1), whole[..., ids].softmax(-1)
    assert (law[..., ids] - expected).abs().max() < 0.02  # weights in bf16
    assert law[..., ids].sum(-1) == pytest.approx(torch.ones(1, 3))
    assert (whole.softmax(-1)[..., ids] - expected).abs().max() > 0.1  # the head matters


def test_greedy_texts_are_the_targets_own(places):
    pair = pair_of(places)
    for number in range(2):
        arguments = pair.prompts[number].arguments
        plain = GenerationMixin.generate(pair.target, **arguments, max_new_tokens=12)[0]
        settings = {"tokens": 12, "gamma": 3, "seed": 0, "temperature": 1e-4}
        assert wagner.generate(pair, number, **settings) == plain[4:].tolist()


def test_whole_recordings_plain_and_drafted(places):
    draft_folder(whispers.whisper(0), places / "whole", [0, 1], list(range(40, 364)))
    pair = pair_of(places, "whole")
    names = str(places / "target"), str(places / "whole")
    rows = wagner_engine.run(pair, *names, "fr", "float32", 2)
    assert [(row["arm"], row["temperature"]) for row in rows] == [
        ("plain", 0.0), ("draft", 0.0), ("plain", 1.0), ("draft", 1.0),
    ]  # fmt: skip
    assert rows[0]["texts"] == rows[1]["texts"]
    assert rows[0]["tokens_a_step"] <= 1 < rows[1]["tokens_a_step"]
    assert all(row["tokens"] > 4 and row["score"] >= 0 for row in rows)
    assert 0 < rows[3]["alpha"] < 1


def test_bad_input_is_named(places, tmp_path):
    with pytest.raises(AudioError, match="no folder of recordings"):
        read_folder(tmp_path / "none")
    written(tmp_path, "a.wav", 1.0)
    with pytest.raises(AudioError, match="got 1 recordings"):
        read_folder(tmp_path)
    (tmp_path / "a.txt").write_text("something")
    written(tmp_path, "long.wav", 2.5)
    (tmp_path / "long.txt").write_text("something long")
    found = read_folder(tmp_path)
    names = (str(places / "target"), str(places / "draft"))
    assert "1 recordings too long" in wagner_speech.speech_pair(*names, found, None, "cpu").name
    with pytest.raises(AudioError, match="into a window of 2 s"):
        wagner_speech.speech_pair(*names, found[1:], None, "cpu")
    whispers.whisper(2, english=True).save_pretrained(places / "english")
    with pytest.raises(VocabularyMismatch, match="multilingual draft"):
        pair_of(places, "english")
    with pytest.raises(ConfigurationError, match="klingon"):
        pair_of(places, language="klingon")
    pair = str(shipped("target")), str(shipped("draft"))
    with pytest.raises(ConfigurationError, match="a Whisper as the target"):
        wagner_speech.speech_pair(*pair, found, None, "cpu")
