"""A tiny head and tiny layers learn a tiny target; from shuffled laws they learn nothing."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM

from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.testing import VOCAB, llama
from outrider.train.features import TrainText, alpha, read, record
from outrider.train.job import frequent
from outrider.train.students import HeadStudent, LayerStudent, usual_aux_layers
from outrider.train.task import Plan
from outrider.train.trainer import Trainer

PLAN = Plan(steps=20, batch=512, rounds=2, rate=0.1)
AUX_LAYERS = {"head": usual_aux_layers(2), "layers": ()}


@pytest.fixture(scope="module")
def model():
    """A target whose laws hang on the last token above all, so that there is much to learn."""
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                weight.mul_(0.5 if weight.dim() > 1 else 1.0)
        model.lm_head.weight.copy_(3 * model.model.embed_tokens.weight.roll(1, 0))
    return model


@pytest.fixture(scope="module")
def target(model):
    return adapt(model, packed=False)


@pytest.fixture(scope="module")
def texts():
    dice = torch.Generator().manual_seed(0)
    return [
        TrainText(tuple(torch.randint(VOCAB, (48,), generator=dice).tolist())) for _ in range(60)
    ]


def student_of(kind, model, features):
    torch.manual_seed(0)
    ids_K = frequent(features, VOCAB, 28)
    return (
        HeadStudent(model, ids_K, AUX_LAYERS[kind])
        if kind == "head"
        else LayerStudent(model, ids_K, (1,))
    )


def features_of(kind, target, texts, folder):
    record(target, texts, AUX_LAYERS[kind], folder, most=16)
    return read(folder)


@pytest.mark.parametrize("kind", ["head", "layers"])
def test_alpha_rises_on_texts_that_were_held_out(kind, model, target, texts, tmp_path):
    features = features_of(kind, target, texts[:50], tmp_path / "features")
    student = student_of(kind, model, features)
    before = alpha(target, student, texts[50:])
    assert Trainer(student, features, VOCAB, PLAN, tmp_path).train(lambda progress, sums: None)
    after = alpha(target, student, texts[50:])
    for temperature in (0.0, 1.0):
        rise = after.by_temperature[temperature][0] - before.by_temperature[temperature][0]
        assert rise > 0.04, (before, after)


def test_layers_whose_norms_have_no_weights_are_trained(target, texts, tmp_path):
    """As OLMo's."""
    config = OlmoConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=None,
    )  # fmt: skip
    features = features_of("layers", target, texts[:8], tmp_path / "features")
    student = LayerStudent(OlmoForCausalLM(config), frequent(features, VOCAB, 28), (0,))
    trainer = Trainer(student, features, VOCAB, replace(PLAN, steps=2), tmp_path)
    assert trainer.train(lambda progress, sums: None)
    assert trainer.progress.step == 2


def test_from_laws_of_other_places_nothing_is_learnt(model, target, texts, tmp_path):
    """The negative control: the same training, with the laws of each text in another order."""
    shuffled = []
    for text in features_of("head", target, texts[:50], tmp_path / "features"):
        order = torch.randperm(len(text.tokens_N))
        ids, logs = text.top_ids_NM[order], text.top_logs_NM[order]
        shuffled.append(replace(text, top_ids_NM=ids, top_logs_NM=logs))
    student = student_of("head", model, shuffled)
    before = alpha(target, student, texts[50:])
    Trainer(student, shuffled, VOCAB, PLAN, tmp_path).train(lambda progress, sums: None)
    after = alpha(target, student, texts[50:])
    for temperature in (0.0, 1.0):
        rise = after.by_temperature[temperature][0] - before.by_temperature[temperature][0]
        assert rise < 0.04, (before, after)


def test_an_interrupted_training_is_saved_and_gone_on_with(model, target, texts, tmp_path):
    features = features_of("head", target, texts[:8], tmp_path / "features")

    def interrupt(progress, sums):
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(student_of("head", model, features), features, VOCAB, PLAN, tmp_path)
    assert not trainer.train(interrupt)
    assert trainer.progress.step == 3
    student = student_of("head", model, features)
    again = Trainer(student, features, VOCAB, replace(PLAN, steps=5), tmp_path)
    assert again.resume()
    assert again.progress == trainer.progress
    weights, kept = student.module.state_dict(), trainer.student.module.state_dict()
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    assert again.train(lambda progress, sums: None)
    assert again.progress.step == 5


def test_a_draft_can_be_trained_in_any_thread(model, target, texts, tmp_path):
    features = features_of("head", target, texts[:8], tmp_path / "features")
    student = student_of("head", model, features)
    trainer = Trainer(student, features, VOCAB, replace(PLAN, steps=2), tmp_path)
    with ThreadPoolExecutor(1) as pool:  # signals are the main thread's
        assert pool.submit(trainer.train, lambda progress, sums: None).result()


def test_a_broken_checkpoint_is_one_clear_error(model, target, texts, tmp_path):
    features = features_of("head", target, texts[:8], tmp_path / "features")
    trainer = Trainer(student_of("head", model, features), features, VOCAB, PLAN, tmp_path)
    trainer.checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigurationError, match="cannot go on from the checkpoint"):
        trainer.resume()


def test_features_of_a_run_that_was_stopped_are_kept(target, texts, tmp_path):
    record(target, texts[:4], AUX_LAYERS["head"], tmp_path, most=16)
    (shard,) = tmp_path.iterdir()
    before = shard.stat().st_mtime_ns
    record(target, texts[:4], AUX_LAYERS["head"], tmp_path, most=16)
    assert shard.stat().st_mtime_ns == before
    features = read(tmp_path)
    assert [tuple(text.tokens_N.tolist()) for text in features] == [t.tokens for t in texts[:4]]
