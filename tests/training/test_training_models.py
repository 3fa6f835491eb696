"""Model, optimiser, rollout, losses and the loop that resumes."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training.distill import DraftJob, from_layers
from training.evaluate import tokens_per_step
from training.model import Llama, Shape, load, to_transformers
from training.muon import Optimiser, Rates, orthogonal
from training.overlap import forward_kl, overlap, overlap_loss
from training.rollout import continue_text
from training.schedule import Schedule
from training.train import TargetJob, my_share
from training.unloop import Loops

from training import loop, train

SHAPE = Shape(layers=2, width=32, heads=2, inner=48, vocabulary=61, context=300)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for weight in model.parameters():
        # Far from the small start, so that attention and norms matter to the result.
        weight.data.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def test_logits_are_those_of_transformers(model, tmp_path):
    tokens = torch.randint(0, 61, (2, 290))
    twin = to_transformers(model)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), twin(tokens).logits, atol=2e-4, rtol=1e-4)
    twin.save_pretrained(tmp_path)
    again = load(tmp_path, context=300)
    assert again.shape == SHAPE
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), model(tokens))


def test_rollout_is_greedy_decoding(model):
    texts = continue_text(model, torch.randint(0, 61, (3, 20)), 12, temperature=0)
    with torch.no_grad():
        for place in range(20, 32):
            assert (model(texts[:, :place])[:, -1].argmax(-1) == texts[:, place]).all()


def test_rollout_repeats_with_its_seed(model):
    prompts = torch.randint(0, 61, (4, 8))
    first, same, other = (continue_text(model, prompts, 10, 1.0, seed) for seed in (1, 1, 2))
    assert (first == same).all()
    assert (first != other).any()


def test_orthogonal_brings_singular_values_near_one():
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 20, 50)))
    assert ((values > 0.6) & (values < 1.3)).all()


def test_schedule_rises_stays_and_falls():
    schedule = Schedule(steps=100, warmup=10, flat=0.6)
    scales = [schedule.scale(step) for step in range(100)]
    assert scales[0] == pytest.approx(0.1)
    assert set(scales[10:60]) == {1.0}
    assert scales[99] == pytest.approx(1 / 40)
    assert sorted(scales[60:], reverse=True) == scales[60:]


def test_a_relative_term_is_held_to_a_share_of_the_rest():
    class Job:
        model = Llama(replace(SHAPE, context=16))

        def __init__(self, *terms):
            self.terms = terms

        def losses(self, step):
            weight = self.model.model.norm.weight
            for direction, weighs, relative in self.terms:
                yield loop.Term((direction * weight[0]).sum(), weighs, relative)

    class Optimiser:
        def __init__(self):
            self.model = dict(Job.model.named_parameters())
            self.weights = {name: p.detach().float().clone() for name, p in self.model.items()}

        def step(self, gradients, scale):
            self.found = gradients["model.norm.weight"][0].item()

    def gradient(*terms):
        optimiser = Optimiser()
        return loop.take_step(Job(*terms), optimiser, 0, 1.0), optimiser.found

    assert gradient((4.0, 0.5, False), (100.0, 0.25, True))[1] == pytest.approx(2 + 0.25 * 2)
    assert gradient((4.0, 0.5, False), (1.0, 0.25, True))[1] == pytest.approx(2 + 0.25)
    assert gradient((4.0, 0.5, False), (9.0, 0.25, True))[0] == pytest.approx(2.0)


def test_pieces_of_a_step_cover_it_once(monkeypatch):
    found = []
    monkeypatch.setattr("training.parallel.count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr("training.parallel.rank", lambda rank=rank: rank)
        pieces = list(my_share(step=3, batch=16, rows=4))
        assert sum(weight for _, weight in pieces) == pytest.approx(1)
        found += [number for numbers, _ in pieces for number in numbers]
    assert found == list(range(48, 64))
    with pytest.raises(SystemExit, match="multiple of 2 processes"):
        loop.check_split(12, 8)


@pytest.mark.exhaustive
def test_own_loops_are_renewed_with_each_checkpoint_and_after_a_restart(tmp_path):
    corpus = np.random.default_rng(1).integers(0, 61, 9000).astype(np.uint16)
    for name in ("train", "library", "heldout"):
        corpus.tofile(tmp_path / f"{name}.bin")
    np.array([3], dtype=np.uint16).tofile(tmp_path / "newlines.bin")
    args = argparse.Namespace(
        seed=1,
        unloop=1.0,
        unloop_reference=None,
        unloop_from=0.0,
        save_every=5,
        unloop_rows=4,
        unloop_texts=8,
    )
    torch.manual_seed(0)
    # An untrained model says one token for ever.
    model = Llama(SHAPE)

    def job():
        return TargetJob(model, tmp_path, args, Schedule(10))

    running = job()
    before, after = (
        [running._looping(step) for step in steps] for steps in (range(5), range(5, 8))
    )
    pool = running._own
    assert len(pool.texts) > 3
    for loops in after:
        own = {tuple(row.tolist()) for row in pool.texts}
        assert all(tuple(row.tolist()) in own for row in loops.texts)
        assert loops.marks.any(1).all()
    assert not any(torch.equal(a.texts, b.texts) for a, b in zip(before, after, strict=False))
    running._own = Loops(*(part[:1] for part in pool))
    mixed = running._looping(8)
    assert mixed.texts.shape == after[0].texts.shape
    assert torch.equal(mixed.texts[0], pool.texts[0])
    resumed = job()
    for step, loops in enumerate(after, start=5):
        assert torch.equal(resumed._looping(step).texts, loops.texts)


def test_overlap_is_the_sum_of_minima():
    target = torch.tensor([[0.5, 0.5, 1e-9]]).log()
    draft = torch.tensor([[0.2, 0.3, 0.5]]).log()
    assert overlap(target, draft, 1.0).item() == pytest.approx(0.5)
    assert overlap(target, draft, 0).item() == 0
    loss = overlap_loss(target, draft, [1.0])
    assert loss.item() == pytest.approx(-torch.tensor(0.5).log().item())
    entropy = -(target.exp() * target).sum().item()
    assert forward_kl(target, target).item() == pytest.approx(entropy, abs=1e-6)


def test_tokens_per_step_of_constant_agreement():
    alphas = torch.full((2, 30), 0.8)
    assert tokens_per_step(alphas, 4) == pytest.approx(sum(0.8**k for k in range(5)))


def test_draft_from_layers_copies_them(model):
    draft = from_layers(model, [1])
    assert draft.shape == replace(SHAPE, layers=1)
    mine = draft.model.layers[0].mlp.up_proj.weight
    assert (mine == model.model.layers[1].mlp.up_proj.weight).all()


def test_the_target_reads_a_text_once(tmp_path, model):
    for name in ("train", "library", "heldout"):
        np.random.default_rng(1).integers(0, 61, 6000).astype(np.uint16).tofile(
            tmp_path / f"{name}.bin"
        )
    args = argparse.Namespace(
        seed=2,
        context=160,
        batch=8,
        rows=4,
        kl=0.5,
        times=2,
        library_share=0.5,
        own=1,
        pool=4,
        evaluate_share=8,
    )

    def job():
        return DraftJob(from_layers(model, [0]), model, tmp_path, args, steps=8)

    with torch.compiler.set_stance("force_eager"):
        whole, read = job(), []
        plain = whole._read
        whole._read = lambda texts: read.append(texts) or plain(texts)
        losses = [[term.loss.item() for term in whole.losses(step)] for step in range(8)]
        assert losses[0] != losses[1]
        # Four steps of two fresh pieces, and one pool of own texts for the last four steps.
        assert len(read) == 4 * 2 + 1
        assert len({tuple(texts.flatten().tolist()) for texts in read}) == len(read)
        own = read[-1]
        assert (whole._own(5).texts == own[1]).all()
        resumed = job()
        assert [term.loss.item() for term in resumed.losses(6)] == losses[6]
        assert set(whole.evaluate()) == {"alpha T=1", "alpha T=0.6", "alpha T=0"}


class Copying:
    """A job small enough for a test: say the token before."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = Llama(replace(SHAPE, context=16))

    def losses(self, step):
        for piece in range(2):
            rng = torch.Generator().manual_seed(100 * step + piece)
            tokens = torch.randint(0, 61, (8, 17), generator=rng)
            logits = self.model(tokens[:, 1:]).flatten(0, 1)
            yield loop.Term(F.cross_entropy(logits, tokens[:, :-1].flatten()), 0.5)

    def evaluate(self):
        return {}


def run(out, stop_at=None):
    job = Copying()
    optimiser = Optimiser(job.model, Rates())
    schedule = Schedule(steps=30, warmup=3)
    pace = loop.Pace(out, save_every=5)
    if stop_at is not None:
        # As if killed after a save: the schedule is the long one, the work ends early.
        for step in range(stop_at):
            loop.take_step(job, optimiser, step, schedule.scale(step))
        out.mkdir()
        loop.save(optimiser, job.model, stop_at, out / "last.pt")
        return None
    first = sum(x.loss.item() for x in job.losses(99)) / 2
    loop.train(job, optimiser, schedule, pace)
    last = sum(x.loss.item() for x in job.losses(99)) / 2
    return first, last, optimiser.weights


def test_training_learns_and_resumes_exactly(tmp_path):
    first, last, weights = run(tmp_path / "whole")
    assert last < first - 0.2
    run(tmp_path / "cut", stop_at=10)
    _, _, resumed = run(tmp_path / "cut")
    assert all((weights[name] == resumed[name]).all() for name in weights)
    assert (tmp_path / "whole" / "before_fall.pt").exists()


def test_sizes_belong_to_a_new_model_only(monkeypatch):
    def asked(*options):
        monkeypatch.setattr("sys.argv", ["train", "--data", "d", "--out", "o", *options])
        return train.arguments()

    new = asked("--tokens", "1e6", "--width", "64", "--context", "128")
    train.check(new)
    assert train.shape(new) == Shape(width=64, context=128)
    with pytest.raises(SystemExit, match="--width does nothing with --initial"):
        train.check(asked("--tokens", "1e6", "--width", "64", "--initial", "last.pt"))
