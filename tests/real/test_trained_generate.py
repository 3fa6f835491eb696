"""`generate` and the speech pipeline with `custom_generate` on trained models: plain's results.

Whisper base (folder `whisper-base` of OUTRIDER_MODELS, recordings below `speech`) and ANNalog
(folder `annalog`, see annalog.py), float32. Two to three minutes on one core.
"""

import wave

import annalog
import numpy as np
import pytest
import torch
import transformers
from scipy.signal import resample_poly
from transformers import GenerationMixin, WhisperForConditionalGeneration

from outrider.integrations.generate import SpeculativeGenerate

pytestmark = pytest.mark.real

MOLECULES = ["CC(C)Cc1ccc(cc1)C(C)C(=O)O", "CC(=O)Oc1ccccc1C(=O)O", "CCO"]
RECORDINGS = ["vm-tmpexists", "privacy-prompt", "confbridge-rest-list-vol-in"]
RATE = 16_000


@pytest.fixture(autouse=True)
def quiet():
    """transformers has advice for some of these calls."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def sounds(models_directory):
    folders = sorted(models_directory.glob("speech/**/en_US_f_Allison"))
    if not folders:
        pytest.skip("needs recordings of asterisk-core-sounds-en-wav below the folder speech")
    made = []
    for name in RECORDINGS:
        with wave.open(str(folders[0] / f"{name}.wav")) as read:
            samples = np.frombuffer(read.readframes(read.getnframes()), np.int16)
            made.append(resample_poly(samples / 32768, RATE, read.getframerate()).astype("float32"))
    return made


@pytest.fixture(scope="module")
def whisper(whisper):
    model = WhisperForConditionalGeneration.from_pretrained(whisper, dtype=torch.float32).eval()
    processor = transformers.WhisperFeatureExtractor.from_pretrained(whisper)
    tokenizer = transformers.WhisperTokenizer.from_pretrained(whisper)
    tokenizer.pad_token_id = model.config.pad_token_id
    return model, processor, tokenizer


def long_recording(sounds):
    """Prompts one after another, 35 seconds: two windows."""
    pause = np.zeros(RATE // 2, np.float32)
    return np.concatenate([part for _ in range(6) for one in sounds for part in (one, pause)])[
        : 35 * RATE
    ]


LONG = {
    "conditioned": {"condition_on_prev_tokens": True},
    "thresholds": {
        "temperature": (0.0, 0.2),
        "logprob_threshold": -1.0,
        "compression_ratio_threshold": 2.4,
        "no_speech_threshold": 0.6,
    },
}


@pytest.mark.parametrize("way", LONG)
def test_long_recordings(whisper, sounds, way):
    model, processor, _ = whisper
    frames = processor(
        long_recording(sounds),
        sampling_rate=RATE,
        truncation=False,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    how = {**frames, "language": "en", "return_timestamps": True, **LONG[way]}
    plain = model.generate(**how)
    call = SpeculativeGenerate(drafter="reference_lookup")
    fast = model.generate(custom_generate=call, reference=plain[0].tolist(), **how)
    assert torch.equal(fast, plain)
    assert call.total.mean_acceptance_length > 2.5


def test_the_pipeline(whisper, sounds):
    """Files side by side, chunks of a long one, and words with their times."""
    model, processor, tokenizer = whisper
    asr = transformers.pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=tokenizer,
        feature_extractor=processor,
    )
    call = SpeculativeGenerate()
    for given, how in (
        (sounds[:2], {"batch_size": 2}),
        (long_recording(sounds), {"chunk_length_s": 20, "batch_size": 2, "ignore_warning": True}),
        (sounds[0], {"return_timestamps": "word"}),
    ):
        plain, fast = (
            asr(given, generate_kwargs={"num_beams": 1, "language": "en", **more}, **how)
            for more in ({}, {"custom_generate": call})
        )
        assert fast == plain
    assert "".join(chunk["text"] for chunk in plain["chunks"]) == plain["text"]
    assert len(plain["chunks"]) > 5


def test_assisted_decoding_drops_the_rule_that_ours_keeps(whisper):
    """Silence: what may not come first has a score of -inf in plain and speculative decoding."""
    model, processor, _ = whisper
    frames = processor(np.zeros(RATE, np.float32), sampling_rate=RATE, return_tensors="pt")
    how = {"language": "en", "max_new_tokens": 2, "return_dict_in_generate": True}
    how |= {"output_scores": True, **frames}
    banned = model.generation_config.begin_suppress_tokens
    first = {
        "plain": model.generate(**how).scores[0][0, banned],
        "ours": model.generate(custom_generate=SpeculativeGenerate(), **how).scores[0][0, banned],
        "assisted": model.generate(assistant_model=model, **how).scores[0][0, banned],
    }
    model.generation_config.force_unique_generate_call = None
    assert bool((first["plain"] == -torch.inf).all())
    assert bool((first["ours"] == -torch.inf).all())
    assert bool(first["assisted"].isfinite().any())


def test_molecules(annalog_wheel):
    model, tokens = annalog.model(annalog_wheel), annalog.vocabulary(annalog_wheel)
    sources = [annalog.source(tokens, smiles) for smiles in MOLECULES]
    longest = max(map(len, sources))
    ids = torch.tensor([[*ids, *[annalog.PAD] * (longest - len(ids))] for ids in sources])
    how = {"attention_mask": (ids != annalog.PAD).long(), "max_new_tokens": 60}
    call = SpeculativeGenerate(drafter="reference_lookup")
    for more in ({}, {"encoder_no_repeat_ngram_size": 6}, {"min_length": 20}):
        plain = GenerationMixin.generate(model, ids, **how, **more)
        fast = GenerationMixin.generate(model, ids, custom_generate=call, **how, **more)
        assert torch.equal(fast, plain)
    assert call.total.mean_acceptance_length > 1.5
