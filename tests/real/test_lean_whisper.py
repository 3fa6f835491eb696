"""Whisper base on recorded speech: the lean runner against transformers, drafts of its own layers.

The folders `whisper-base` and `speech` of OUTRIDER_MODELS. Half a minute on one core.
"""

import pytest
import torch
from training.whisper_recordings import asterisk, joined
from training.whisper_speech import RATE
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.models.calibrate import Setting
from outrider.models.layer_subset import LayerSubset, LayerSubsetSource
from outrider.models.linear import can_pack
from outrider.models.prefill import causal
from outrider.models.sources import ModelSource
from outrider.types import Inputs

pytestmark = pytest.mark.real

PROMPT = [50258, 50259, 50359, 50363]  # English, transcribe, no timestamps
END, CPU = 50257, torch.device("cpu")


@pytest.fixture(scope="module")
def columns(whisper, speech):
    """Log-mel frames of one window, [1, mels, frames]."""
    window = next(joined(asterisk(speech, "en")))
    extractor = WhisperFeatureExtractor.from_pretrained(whisper)
    return extractor(window.samples, sampling_rate=RATE, return_tensors="pt")["input_features"]


def inputs(columns):
    frames = columns.transpose(1, 2)
    return Inputs(None, frames, torch.ones(frames.shape[:2], dtype=torch.bool))


def driven(path, dtype):
    packed = can_pack(getattr(torch, dtype))
    source, setting = ModelSource(path, "target"), Setting(1, dtype, packed)
    target = source.driven(setting, CPU, 51865)
    return target, LayerSubsetSource(source, LayerSubset((0, 5))).driven(setting, CPU, 51865)


def text(target, drafter, source):
    run = Engine(target, drafter, "match").run(
        [PROMPT], SamplingParams(0), StopConditions(48, (END,)), inputs=[source]
    )
    return [token for block in run for token in block.token_ids], run.stats


@torch.inference_mode()
def test_states_scores_and_text_are_transformers(whisper, columns):
    model = WhisperForConditionalGeneration.from_pretrained(whisper).float()
    target, _ = driven(whisper, "float32")
    source = target.encode(inputs(columns))
    states = model.model.encoder(columns).last_hidden_state
    assert (source.encoded.states_BTE - states).abs().max() < 1e-3 * states.abs().max()
    found, _ = text(target, Root(), source)
    ids = torch.tensor([PROMPT + found])
    expected = model(encoder_outputs=(states,), decoder_input_ids=ids).logits
    at = torch.arange(ids.shape[1])[None]
    scores = target.forward(target.open(1, 128, source), causal(ids, at, 128)).logits_BQV
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()
    assert expected[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_drafts_of_its_own_layers_leave_the_text_alone(whisper, columns, dtype):
    target, draft = driven(whisper, dtype)
    source = target.encode(inputs(columns))
    expected, _ = text(target, Root(), source)
    for counts in ((1, 1, 1), (2, 2)):
        found, stats = text(target, DraftModel(draft, counts), source)
        assert found == expected
        assert stats.drafted
    found, stats = text(target, DraftModel(target, (1, 1, 1)), source)
    assert found == expected
    assert stats.draft_acceptance_rate > 0.95  # the model is its own draft
