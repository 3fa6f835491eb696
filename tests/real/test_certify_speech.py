"""Whisper base is certified on a recording, in float32, with its own layers and the shipped draft.

Needs `whisper-base` and recordings below `speech` in OUTRIDER_MODELS. Some minutes on one core.
"""

import wave

import numpy as np
import pytest
import torch
from scipy.signal import resample_poly
from transformers import (
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizerFast,
)

import outrider
from outrider import DraftModel, Engine, SamplingParams, Timestamps
from outrider.models import adapt, layer_subset
from outrider.types import Inputs
from outrider_lab.certify import Power, certify, foreign

pytestmark = pytest.mark.real

RECORDING = "privacy-prompt"
NAMES = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>")


@pytest.fixture(scope="module")
def heard(models_directory, whisper):
    """Log-mel frames [1, 3000, 80] of a recording at 8 kHz."""
    path = next(iter((models_directory / "speech").rglob(f"{RECORDING}.wav")), None)
    if path is None:
        pytest.skip("needs the Asterisk prompts below the folder speech")
    with wave.open(str(path)) as sound:
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2") / 2**15
        samples = resample_poly(samples, 16000, sound.getframerate()).astype("float32")
    made = WhisperFeatureExtractor.from_pretrained(whisper)(samples, 16000, return_tensors="pt")
    frames = made.input_features.transpose(1, 2)
    return Inputs(None, frames, torch.ones(1, frames.shape[1], dtype=torch.bool))


def loaded(folder):
    load = WhisperForConditionalGeneration.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").eval()


def rules(folder, timed):
    """Whisper's own settings, as ours, and its decoder prompt."""
    config = GenerationConfig.from_pretrained(folder)
    tokenizer = WhisperTokenizerFast.from_pretrained(folder)
    prompt = [tokenizer.convert_tokens_to_ids(name) for name in NAMES]
    mark = config.no_timestamps_token_id
    how = SamplingParams(
        1.0,
        logit_bias=dict.fromkeys(config.suppress_tokens, -torch.inf),
        begin_suppress_tokens=tuple(config.begin_suppress_tokens),
        timestamps=Timestamps(mark, config.eos_token_id) if timed else None,
    )
    return (prompt if timed else [*prompt, mark]), how


def with_its_layers(folder):
    model = loaded(folder)
    return adapt(model), adapt(layer_subset.cut(model, (0, 5)), shares=True)


def with_the_shipped_draft(folder):
    """As it comes, in 8 bits where there is a C compiler."""
    asr = outrider.load(folder, draft="whisper-base-draft", dtype="float32", threads=1)
    return asr.engine.target, asr.engine.drafter.model


@pytest.mark.parametrize("pair", [with_its_layers, with_the_shipped_draft])
def test_whisper_with_a_draft_passes(whisper, heard, pair):
    target, draft = pair(whisper)
    engine = Engine(target, DraftModel(draft, (2, 1)))
    prompt, how = rules(whisper, timed=True)
    few = Power(tokens=384, samples=48, equality_tokens=32, new_tokens=32, rows=4, effect=0.3)
    report = certify(engine, [prompt], how, few, inputs=[heard])
    print(report.verdict, report.seconds, report.detectable, report.setup["alpha"])
    for test in report.tests:
        print(test.name, test.statistic, test.p_value, test.detail)
    assert not report.failed, report.as_dict()
    assert report.verdict == "exact", report.as_dict()


def test_transformers_assisted_sampling_is_flagged_and_its_plain_sampling_is_not(whisper, heard):
    """It drops begin_suppress_tokens. What nearly always comes first is among them here, so that a
    few texts show it."""
    model, assistant = loaded(whisper), loaded(whisper)
    prompt, how = rules(whisper, timed=False)
    with torch.no_grad():
        text = torch.tensor([prompt])
        logits = model(heard.features.transpose(1, 2), decoder_input_ids=text).logits[0, -1]
    first = logits.topk(4).indices.tolist()
    begin = [*how.begin_suppress_tokens, *first]
    model.generation_config.begin_suppress_tokens = begin
    how = SamplingParams(1.0, logit_bias=how.logit_bias, begin_suppress_tokens=tuple(begin))
    few = Power(tokens=6, samples=6, new_tokens=1, rows=6)

    def generator(more):
        def generate(prompts, numbers):
            ids = [
                model.generate(
                    heard.features.transpose(1, 2),
                    language="en",
                    task="transcribe",
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=3,
                    **more,
                )
                for _ in numbers
            ]
            return [line[0, :1].tolist() for line in ids]

        return generate

    torch.manual_seed(0)
    plain = foreign(generator({}), model, [prompt], how, few, inputs=[heard])
    assert not plain.failed
    assisted = generator({"assistant_model": assistant})
    report = foreign(assisted, model, [prompt], how, few, inputs=[heard])
    print(report.verdict, report.failed, [t.detail for t in report.tests if t.name == "support"])
    assert report.verdict == "not exact"
    assert "support" in report.failed
