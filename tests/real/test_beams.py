"""Beams of trained models are transformers': SmolLM2, ANNalog and Whisper base, in float32.

The folders `smollm2`, `annalog`, `whisper-base` and `speech` of OUTRIDER_MODELS.
"""

from dataclasses import replace

import annalog
import numpy as np
import pytest
import torch
import transformers
from training.whisper_recordings import asterisk, joined
from training.whisper_speech import RATE
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import outrider
from outrider import Beams, Request, Root, SamplingParams, Stop, StopConditions
from outrider.drafters import ReferenceLookup
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.search import search
from outrider.integrations.generate import SpeculativeGenerate
from outrider.models import adapt
from outrider.types import Inputs

pytestmark = pytest.mark.real

MOLECULES = ["CC(=O)Oc1ccccc1C(=O)O", "CC(C)Cc1ccc(cc1)C(C)C(=O)O"]
FIRST, END = [50258, 50259, 50359, 50363], 50257  # English, transcribe, no timestamps


def test_a_chat_model(smollm2):
    speculator = outrider.load(smollm2, drafter="prompt_lookup", dtype="float32", threads=1)
    prompt = "One, two, three, four, five, six,"
    found = speculator.generate(prompt, stop=Stop(12), beams=Beams(4, num_return_sequences=2))
    network = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = speculator.tokenizer(prompt, return_tensors="pt")
    how = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12, "do_sample": False}
    expected = network.generate(**ids, **how)
    start = ids["input_ids"].shape[1]
    for one, line in zip(found.completions, expected[:, start:].tolist(), strict=True):
        assert one.token_ids == line[: len(one.token_ids)]
    fast = network.generate(
        **ids, **how, custom_generate=SpeculativeGenerate(drafter="prompt_lookup")
    )
    assert torch.equal(fast, expected)


def test_molecules(annalog_wheel):
    network, tokens = annalog.model(annalog_wheel), annalog.vocabulary(annalog_wheel)
    target = adapt(network)
    for smiles in MOLECULES:
        ids = torch.tensor([annalog.source(tokens, smiles)])
        expected = network.generate(ids, max_length=60, num_beams=5, num_return_sequences=5)
        source = Inputs(ids, None, torch.ones_like(ids).bool())
        request = Request(
            [annalog.START], SamplingParams(0), StopConditions(59, (annalog.END,)), source
        )
        beams = Beams(5, num_return_sequences=5)
        for drafter in (Root(), ReferenceLookup(6)):
            (row,) = search(target, drafter, [request], beams).hypotheses
            for one, line in zip(row, expected[:, 1:].tolist(), strict=True):
                assert one.token_ids == line[: len(one.token_ids)]


def test_speech(whisper, speech):
    network = WhisperForConditionalGeneration.from_pretrained(whisper, dtype=torch.float32)
    extractor = WhisperFeatureExtractor.from_pretrained(whisper)
    samples = [window.samples for window in joined(asterisk(speech, "en"))][:2]
    columns = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"):
        setattr(network.generation_config, name, None)
    with torch.inference_mode():
        expected = GenerationMixin.generate(  # Whisper's own would cut windows
            network,
            encoder_outputs=network.get_encoder()(columns),
            decoder_input_ids=torch.tensor([FIRST] * 2),
            max_new_tokens=32,
            num_beams=5,
            do_sample=False,
        )
    there = torch.ones(2, columns.shape[2], dtype=torch.bool)
    heard = Inputs(None, columns.transpose(1, 2), there)
    requests = [
        Request(FIRST, SamplingParams(0), StopConditions(32, (END,)), heard.take([row]))
        for row in range(2)
    ]
    target = adapt(network)
    plain = search(target, Root(), requests, Beams(5))
    for row, line in zip(plain.hypotheses, expected[:, len(FIRST) :].tolist(), strict=True):
        assert row[0].token_ids == line[: len(row[0].token_ids)]
    copied = [
        replace(request, reference=row[0].token_ids)
        for request, row in zip(requests, plain.hypotheses, strict=True)
    ]
    pace = LookaheadDepth(6, adapts=False)
    ahead = search(target, ReferenceLookup(6), copied, Beams(5), pace=pace)
    assert [row[0].token_ids for row in ahead.hypotheses] == [
        row[0].token_ids for row in plain.hypotheses
    ]
    assert ahead.counts.calls < plain.counts.calls


WAYS = {
    "short": (1, {}),
    "long": (3, {"return_timestamps": True}),
    "chunks": (3, {"chunk_length_s": 15, "batch_size": 2, "ignore_warning": True}),
    "words": (2, {"return_timestamps": "word"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_the_speech_pipeline_as_it_comes(whisper, speech, way):
    """Its five beams: windows one after another, chunks side by side, times of words."""
    count, how = WAYS[way]
    recordings = [window.samples for window in joined(asterisk(speech, "en"))][:count]
    transformers.logging.set_verbosity_error()
    model = WhisperForConditionalGeneration.from_pretrained(
        whisper, dtype=torch.float32, attn_implementation="eager" if way == "words" else "sdpa"
    )
    asr = transformers.pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(whisper, pad_token="<|endoftext|>"),
        feature_extractor=WhisperFeatureExtractor.from_pretrained(whisper),
    )
    call = SpeculativeGenerate(drafter="none")
    told = [
        asr(np.concatenate(recordings), generate_kwargs={"language": "en", **more}, **how)
        for more in ({}, {"custom_generate": call})
    ]
    assert told[0] == told[1]
    assert call.total.new_tokens > 30
