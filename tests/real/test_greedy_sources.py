"""Trained encoder-decoders through their own forward, in float32: greedy text is transformers'.

ANNalog (folder `annalog` of OUTRIDER_MODELS, see annalog.py) and Whisper base (`whisper-base`, with
recordings below `speech`). A minute on one core.
"""

import wave

import annalog
import numpy as np
import pytest
import torch
from scipy.signal import resample_poly
from transformers import GenerationMixin, WhisperFeatureExtractor, WhisperForConditionalGeneration

from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.models import TreeDecoder, adapt, load_checks
from outrider.models.seq2seq.runner import Seq2SeqRunner
from outrider.types import Inputs

pytestmark = pytest.mark.real

MOLECULES = [
    "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "CC(=O)Oc1ccccc1C(=O)O",
    "CN1C=NC2=C1C(=O)N(C(=O)N2C)C",
    "CCO",
]
RECORDINGS = ["vm-tmpexists", "privacy-prompt", "confbridge-rest-list-vol-in"]
GREEDY = SamplingParams(0)


def texts(engine, prompts, limits, inputs):
    """The rows' tokens."""
    run = engine.run(prompts, GREEDY, limits, inputs=inputs)
    out = [[] for _ in prompts]
    for block in run:
        out[block.request_id] += block.token_ids
    return out, run.stats


@pytest.fixture(scope="module")
def molecules(annalog_wheel):
    tokens = annalog.vocabulary(annalog_wheel)
    return annalog.model(annalog_wheel), [annalog.source(tokens, smiles) for smiles in MOLECULES]


@pytest.fixture(scope="module")
def frames(models_directory, whisper):
    """Log-mel frames [3, 3000, 80] of recordings at 8 kHz."""
    found = [next(iter((models_directory / "speech").rglob(f"{n}.wav")), None) for n in RECORDINGS]
    if None in found:
        pytest.skip("needs the Asterisk prompts below the folder speech")
    waves = []
    for path in found:
        with wave.open(str(path)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2") / 2**15
            waves.append(resample_poly(samples, 16000, sound.getframerate()).astype("float32"))
    made = WhisperFeatureExtractor.from_pretrained(whisper)(waves, 16000, return_tensors="pt")
    return made.input_features.transpose(1, 2)


def test_analogues_are_transformers(molecules):
    """Four molecules of different lengths, plain and by a tree, against batches of one."""
    model, sources = molecules
    budget = 60
    expected = []
    for ids in sources:
        line = model.generate(torch.tensor([ids]), max_new_tokens=budget, do_sample=False)
        expected.append(line[0, 1:].tolist())
    assert load_checks.paths(TreeDecoder(Seq2SeqRunner(model)), "target") < 1e-5
    target = adapt(model)  # a lean decoder: it has no forward of its own to be checked against
    inputs = [Inputs(torch.tensor([i]), None, torch.ones(1, len(i)).bool()) for i in sources]
    limits = StopConditions(budget, stop_ids=(annalog.END,))
    assert texts(Engine(target, Root()), [[annalog.START]] * 4, limits, inputs)[0] == expected
    tree = Engine(target, DraftModel(target, (2, 2)), "match")
    fast, stats = texts(tree, [[annalog.START]] * 4, limits, inputs)
    assert fast == expected
    assert stats.mean_acceptance_length > 2.5


def test_transcripts_are_transformers(whisper, frames):
    """Three recordings side by side; what is suppressed is left out on both sides."""
    model = WhisperForConditionalGeneration.from_pretrained(whisper, dtype=torch.float32).eval()
    target = TreeDecoder(Seq2SeqRunner(model))
    assert load_checks.paths(target, "target") < 1e-5
    settings = model.generation_config
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    ids = settings.lang_to_id["<|en|>"], settings.task_to_id["transcribe"]
    prompt = [settings.decoder_start_token_id, *ids, settings.no_timestamps_token_id]
    expected = GenerationMixin.generate(
        model,
        frames.transpose(1, 2),
        decoder_input_ids=torch.tensor([prompt] * 3),
        generation_config=settings,
        max_new_tokens=40,
        do_sample=False,
    )[:, len(prompt) :].tolist()
    end = settings.eos_token_id
    lines = [line[: line.index(end) + 1] if end in line else line for line in expected]
    there = torch.ones(1, frames.shape[1], dtype=torch.bool)
    inputs = [Inputs(None, frames[row : row + 1], there) for row in range(3)]
    limits = StopConditions(40, stop_ids=(end,))
    assert texts(Engine(target, Root()), [prompt] * 3, limits, inputs)[0] == lines
    tree = Engine(target, DraftModel(target, (2, 1)), "match")
    assert texts(tree, [prompt] * 3, limits, inputs)[0] == lines
