"""Filters keep what transformers' warpers keep (ties excepted), and laws are what they say."""

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider import ConfigurationError, SamplingParams, ops
from outrider.sampling.sampling_params import rows

SETTINGS = [
    SamplingParams(1.0),
    SamplingParams(0.7, seed=2**63 + 5),
    SamplingParams(1.0, top_k=5),
    SamplingParams(0.6, top_k=1),
    SamplingParams(1.0, top_k=500),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(0.5, top_p=0.3),
    SamplingParams(2.0, top_p=1e-6),
    SamplingParams(1.0, min_p=0.1),
    SamplingParams(1.5, min_p=1.0),
    SamplingParams(0.8, top_k=20, top_p=0.9),
    SamplingParams(1.3, top_k=20, min_p=0.02),
    SamplingParams(0.9, top_p=0.95, min_p=0.01),
    SamplingParams(0.7, top_k=12, top_p=0.85, min_p=0.03),
]


def theirs(logits, s):
    """transformers' processors in their order, [R, V]."""
    scores = logits / s.temperature
    if s.top_k:
        scores = TopKLogitsWarper(min(s.top_k, logits.shape[-1]))(None, scores)
    if s.top_p < 1:
        scores = TopPLogitsWarper(s.top_p)(None, scores)
    if s.min_p:
        scores = MinPLogitsWarper(s.min_p)(None, scores)
    return scores


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_filters_keep_what_transformers_keeps(setting):
    torch.manual_seed(0)
    logits = 3 * torch.randn(1, 40, 100)
    ours = ops.scaled(ops.warp(logits, rows([setting])))[0]
    expected = theirs(logits[0], setting)
    assert torch.equal(torch.isfinite(ours), torch.isfinite(expected))
    torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def test_every_row_has_its_own_parameters():
    torch.manual_seed(1)
    logits = 3 * torch.randn(len(SETTINGS), 6, 100)
    ours = ops.scaled(ops.warp(logits, rows(SETTINGS)))
    for row, setting in enumerate(SETTINGS):
        expected = theirs(logits[row], setting).softmax(-1)
        torch.testing.assert_close(ours[row].softmax(-1), expected, rtol=1e-5, atol=1e-7)


def test_taking_rows_takes_their_parameters():
    torch.manual_seed(2)
    logits = 3 * torch.randn(len(SETTINGS), 2, 50)
    whole, some = rows(SETTINGS), torch.tensor([9, 2, 12])
    expected = ops.scaled(ops.warp(logits, whole))[some]
    assert torch.equal(ops.scaled(ops.warp(logits[some], whole.take(some.tolist()))), expected)


def test_ties_at_the_threshold_stay_in():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    kept = torch.isfinite(ops.scaled(ops.warp(logits, rows([SamplingParams(1.0, top_k=2)]))))
    assert kept.tolist() == [[[True, True, True, True, False]]]
    kept = torch.isfinite(ops.scaled(ops.warp(logits, rows([SamplingParams(1.0, top_p=0.5)]))))
    assert kept.tolist() == [[[True, True, True, True, False]]]


def test_temperature_zero_is_the_first_argmax():
    logits = torch.tensor([[[0.0, 3.0, 3.0, 1.0]]])
    settings = rows([SamplingParams(0, top_k=3, top_p=0.5)])
    assert settings.greedy == "all"
    assert ops.probs(ops.warp(logits, settings)).tolist() == [[[0.0, 1.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_values_outside_their_range_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=rf"{message} must .*; got .*; use "):
        SamplingParams(**settings)


def test_without_a_seed_torchs_generator_decides():
    torch.manual_seed(5)
    first = rows([SamplingParams(), SamplingParams()]).seed_B
    again = rows([SamplingParams()]).seed_B
    torch.manual_seed(5)
    assert torch.equal(rows([SamplingParams(), SamplingParams()]).seed_B, first)
    assert len({*first.tolist(), *again.tolist()}) == 3
