"""Rates of this machine: what is timed, and that none of it is a step of the model itself."""

import pytest
import torch

from outrider.costs import Sizes
from outrider.models import LlamaRunner, TreeDecoder
from outrider.testing import llama
from outrider_lab.bench import rates
from outrider_lab.bench.rates import Steps
from outrider_lab.theory import capacity


def tiny():
    model = llama(vocab_size=128, num_hidden_layers=2, max_position_embeddings=2048)
    return TreeDecoder(LlamaRunner(model, False)), sum(p.numel() for p in model.parameters())


def test_the_machine_is_measured_without_a_step_of_the_model(monkeypatch):
    target, parameters = tiny()
    stepped = []
    monkeypatch.setattr(
        rates, "Steps", lambda model, *how: stepped.append(model) or Steps(model, *how)
    )
    machine = rates.measured(target, Sizes(4 * parameters, 512, parameters, 2, 512), rounds=2)
    assert stepped
    assert target not in stepped
    capacity.check(Sizes(1, 0, 1), machine)
    assert machine.products.at == rates.NODES
    assert min(machine.products.times) > 0  # a busy machine's grow as they like


def test_a_made_up_machine_is_found_though_its_pace_changes():
    """Every part of a call is told apart, and the rounds in which all is slower do not count."""
    target, parameters = tiny()
    sizes = Sizes(4 * parameters, 512, parameters, 2, 512)
    found = rates.Rates(target, sizes, 1)
    found._engine.host = lambda: rates._Host(1e-3, 2e-4, 1e-4, 5e-4)

    def call(rows, nodes, context):
        products = 1e-2 + rows * nodes * 1e-3
        return products + 3e-3 + rows * (4e-4 + nodes * 2e-4 + context * (1e-6 + nodes * 1e-7))

    paces = (1.0, 1.0, 1.0, 1.7, 2.5)
    found._took = {
        kind: [
            pace * (1e-2 + kind * 1e-3 if isinstance(kind, int) else call(*kind)) for pace in paces
        ]
        for kind in found._took
    }
    machine = found.machine()
    for rows, nodes, context in ((1, 1, 64), (3, 5, 300), (16, 9, 2000)):
        own = 1e-3 + rows * (2e-4 + nodes * 1e-4) + (5e-4 if nodes > 1 else 0)
        told = capacity.step(sizes, machine, rows, nodes, context)
        assert told == pytest.approx(call(rows, nodes, context) + own)
    found._took[rates.NODES[-1]] = [each / 2 for each in found._took[rates.NODES[-2]]]
    capacity.check(sizes, found.machine())  # more nodes in less time: a busy machine's, and a rate


def test_products_are_those_of_the_model():
    """What a call multiplies with, in its order: the last ones are the logits."""
    target, _ = tiny()
    products = target.runner.products()
    assert len(products) == 4 * target.runner.layers + 1
    wide = products[-1][1]
    assert products[-1][0](torch.zeros(1, 3, wide)).shape == (1, 3, 128)
    seen = []
    at = torch.arange(3)[None]
    cache = target.open(1, 128)
    from outrider.models.prefill import causal

    for layer in target.runner._layers:
        for of, names in ((layer, ("qkv", "out")), (layer.mlp, ("gate_up", "down"))):
            for name in names:
                run = getattr(of, name)
                setattr(of, name, lambda x, run=run: seen.append(x.shape[-1]) or run(x))
    target.forward(cache, causal(at, at, 128))
    assert seen == [size for _, size in products[:-1]]


def test_steps_take_the_chains_that_are_asked_for():
    target, _ = tiny()
    widths = []
    forward = target.forward
    target.forward = lambda cache, nodes, **how: (
        widths.append(tuple(nodes.tokens_BQ.shape)) or forward(cache, nodes, **how)
    )
    steps = Steps(target, 2, (1, 4), 20, rounds=2)
    for _ in range(2):
        steps.round()
    assert set(steps.seconds()) == {1, 4}
    assert min(steps.seconds().values()) > 0
    assert widths[-6:] == [(2, 1), (2, 1), (2, 4)] * 2
