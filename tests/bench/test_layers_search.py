"""`outrider bench layers`: what a draft by some of the layers agrees in, and what that is worth."""

import json

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from outrider.errors import UnsupportedModel
from outrider.models import LlamaRunner, TreeDecoder, layer_subset
from outrider.shipped import shipped
from outrider.testing import encoder_decoders
from outrider_lab.drafters.layer_skip import part
from outrider_lab.papers import app, layers
from tiny import llama

LAYERS, KEPT, HEAT = 4, (0, 2, 3), 0.7


@pytest.fixture(scope="module")
def model():
    return llama(num_hidden_layers=LAYERS)


def laws(model, text, kept, start):
    """Of the whole model and of some layers on its entries, place by place, by transformers."""
    with torch.inference_mode():
        whole = model(torch.tensor([text[:-1]]), use_cache=True)
        cut, few = layer_subset.cut(model, kept), []
        for at in range(start, len(text) - 1):
            past = DynamicCache()
            for place, number in enumerate(kept):
                layer = whole.past_key_values.layers[number]
                past.update(layer.keys[:, :, :at], layer.values[:, :, :at], place)
            few.append(cut(torch.tensor([[text[at]]]), past_key_values=past).logits[0, -1])
    return whole.logits[0, start:], torch.stack(few)


def test_agreement_is_that_of_layers_on_the_whole_models_entries(model):
    target, prompt, answer = (
        TreeDecoder(LlamaRunner(model, False)),
        [3, 1, 4, 1, 5],
        [9, 2, 6, 5, 3],
    )
    text = layers.written(target, prompt, answer, LAYERS, HEAT)
    found = layers.agreement(part(target, KEPT), [text], HEAT)
    whole, few = laws(model, [*prompt, *answer], KEPT, len(prompt) - 1)
    same = (whole.argmax(-1) == few.argmax(-1)).float().mean()
    shared = torch.minimum((whole / HEAT).softmax(-1), (few / HEAT).softmax(-1)).sum(-1).mean()
    assert found["places"] == [len(answer)]
    assert layers.alpha_of(found, "greedy").value == pytest.approx(float(same))
    assert layers.alpha_of(found, "drawn").value == pytest.approx(float(shared), abs=1e-5)
    assert layers.alpha_of(found, "drawn").value < 0.99
    every = layers.agreement(part(target, range(LAYERS)), [text], HEAT)
    assert layers.alpha_of(every, "greedy").value == 1
    assert layers.alpha_of(every, "drawn").value == pytest.approx(1, abs=1e-5)


def test_the_best_length_of_a_draft_and_no_draft_where_none_pays():
    gamma, gain = layers.best(0.9, 0.1)
    by_hand = [(sum(0.9**i for i in range(g + 1)) / (0.1 * g + 1), g) for g in range(13)]
    assert (gain, gamma) == pytest.approx(max(by_hand))
    assert layers.best(0.9, 0.92) == (0, 1.0)


def test_the_command_prints_and_keeps_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.runtime_config.can_pack", lambda dtype: False)
    folder = tmp_path / "target"
    sizes = {"vocab_size": 4096, "max_position_embeddings": 1024}
    llama(num_hidden_layers=LAYERS, **sizes).save_pretrained(folder)
    for file in shipped("target").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    typed = ["layers", "--model", folder, "--out", tmp_path, "--quick", "--threads", 1]
    result = CliRunner().invoke(app, list(map(str, typed)))
    assert result.exit_code == 0, result.output
    tables = json.loads((tmp_path / "layers.json").read_text())["tables"]
    assert [row["layer"] for row in tables["each"]] == list(range(LAYERS))
    assert {row["order"] for row in tables["layers"]} == {"early exit", "cosine", "ablation"}
    for row in tables["layers"]:
        assert 0 < row["c"] < 1
        assert row["speed-up, T = 0"] >= 1
    assert "fewer than 20 prompts: no verdict" in result.output
    said = layers.verdict(tables["layers"], 20)
    assert "use another drafter" in said or "--drafter layer_skip" in said
    measured = (tmp_path / "layers.jsonl").read_text()
    again = CliRunner().invoke(app, list(map(str, typed)))
    assert (tmp_path / "layers.jsonl").read_text() == measured  # nothing is measured twice
    assert again.exit_code == 0


def test_an_encoder_decoder_is_refused():
    with pytest.raises(UnsupportedModel, match="use draft_layers"):
        part(encoder_decoders("bart")[0], (0,))
