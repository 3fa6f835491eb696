"""Beams of encoder-decoders with ragged sources are transformers': T5, BART and Whisper."""

from functools import lru_cache

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationMixin,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from outrider import Beams, Request, Root, SamplingParams, StopConditions
from outrider.drafters import ReferenceLookup
from outrider.engine.beam_search.search import search
from outrider.models import adapt
from outrider.types import Inputs

VOCAB, BUDGET, STOP = 40, 12, 3
LENGTHS = (9, 5, 7)
SMALL = {"vocab_size": VOCAB, "d_model": 32, "pad_token_id": 1, "eos_token_id": STOP}
LAYERS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "bos_token_id": 2,
}


def _t5():
    config = T5Config(**SMALL, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=2)
    return T5ForConditionalGeneration(config)


def _bart():
    config = BartConfig(**SMALL, **LAYERS, max_position_embeddings=64, forced_eos_token_id=None)
    return BartForConditionalGeneration(config)


def _whisper():
    config = WhisperConfig(
        **SMALL,
        **LAYERS,
        num_mel_bins=8,
        max_source_positions=30,
        max_target_positions=40,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


MAKERS = {"t5": _t5, "bart": _bart, "whisper": _whisper}


@lru_cache
def network(family):
    torch.manual_seed(0)
    model = MAKERS[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0).add_(0.05 * torch.randn_like(parameter))
    model.generation_config.forced_eos_token_id = None
    return model


def sources(family):
    random = torch.Generator().manual_seed(1)
    if family == "whisper":
        frames = torch.randn(3, 60, 8, generator=random)
        return Inputs(None, frames, torch.ones(3, 60, dtype=torch.bool))
    ids = torch.randint(4, VOCAB, (3, max(LENGTHS)), generator=random)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return Inputs(torch.where(mask, ids, 1), None, mask)


def theirs(model, inputs, row, beams, **more):
    one = inputs.take([row])
    if one.features is not None:
        states = model.get_encoder()(one.features.transpose(1, 2).to(model.dtype))
    else:
        size = LENGTHS[row]
        states = model.get_encoder()(input_ids=one.ids_BS[:, :size])
    out = GenerationMixin.generate(  # Whisper's own would cut windows
        model,
        encoder_outputs=states,
        decoder_input_ids=torch.tensor([[2]]),
        max_new_tokens=BUDGET,
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_beams,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    texts = []
    for line in out.sequences[:, 1:].tolist():
        end = next((at + 1 for at, token in enumerate(line) if token == STOP), len(line))
        texts.append(line[:end])
    return texts, out.sequences_scores if beams.num_beams > 1 else None


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize(
    "beams", [Beams(2, 1.0, True, 2), Beams(5, 0.0, "never", 5), Beams(4, 2.0)]
)
@torch.inference_mode()
def test_identical_to_transformers(family, beams):
    beams = Beams(beams.num_beams, beams.length_penalty, beams.early_stopping, beams.num_beams)
    inputs, target = sources(family), adapt(network(family))
    requests = [
        Request(
            [2],
            SamplingParams(0),
            StopConditions(BUDGET, (STOP,)),
            inputs.take([row]),
            (5, 6, 7, 8),
        )
        for row in range(3)
    ]
    plain = search(target, Root(), requests, beams, settle=False)
    copied = search(target, ReferenceLookup(4), requests, beams)
    for row in range(3):
        texts, scores = theirs(network(family), inputs, row, beams)
        for found in (plain, copied):
            assert [one.token_ids for one in found.hypotheses[row]] == texts
            mine = torch.tensor([one.score for one in found.hypotheses[row]])
            torch.testing.assert_close(mine, scores, rtol=1e-4, atol=1e-4)
