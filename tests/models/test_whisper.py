"""The lean Whisper computes what transformers computes, for rows that join and leave, and alike at
every width."""

import copy

import pytest
import torch
from tiny_whisper import FRAMES, MELS, SHAPES, VOCAB, audio, whisper
from transformers import WhisperForCausalLM

import outrider.models.bart
from outrider.errors import ConfigurationError
from outrider.models import TreeDecoder, adapt, batch_invariance, calibrate, load_checks
from outrider.models.attention import BatchInvariantAttention, unscaled
from outrider.models.bart import Cross
from outrider.models.bart_encoder import fits
from outrider.models.linear import can_pack
from outrider.models.prefill import causal, of_tree
from outrider.models.whisper import WhisperRunner
from outrider.tree import branching
from outrider.types import Encoded, Inputs

PACKINGS = [False, True] if can_pack() else [False]


@torch.inference_mode()
def own(model, ids, inputs):
    """transformers' forward over one sequence of a row of its own."""
    if inputs.features is None:
        states = inputs.encoded.states_BTE
        return model(torch.tensor([ids]), encoder_outputs=(states,)).logits[0]
    features = inputs.features.transpose(1, 2)
    return model(features, decoder_input_ids=torch.tensor([ids])).logits[0]


def gap(scores, expected):
    """The largest difference, relative to the largest logit."""
    return float((scores - expected).abs().max() / expected.abs().max())


class Rows:
    """Rows in one cache, each with its own audio, against transformers."""

    def __init__(self, model, rows):
        self.module, self.model = model, TreeDecoder(WhisperRunner(model, False))
        self.cache = self.model.open(rows, 128).narrow(0)
        self.texts, self.sources = [], []

    def join(self, seat, source, prompt):
        """A row that was read alone takes a seat, all but its last token in the cache."""
        own = self.model.open(1, 128, source)
        if len(prompt) > 1:
            at = torch.arange(len(prompt) - 1)[None]
            self.model.forward(own, causal(torch.tensor([prompt[:-1]]), at, 128), last=1)
        self.cache = self.cache.put([seat], own)
        self.texts[seat : seat + 1] = [list(prompt)]
        self.sources[seat : seat + 1] = [source]

    def leave(self, hole):
        last = len(self.texts) - 1
        self.cache = self.cache.put([hole], self.cache.take([last])).narrow(last)
        for rows in (self.texts, self.sources):
            rows[hole] = rows[last]
            rows.pop()

    def step(self):
        """The largest error of a tree's logits; the path 1, 3 is kept."""
        tree, rows = branching((2, 2)), len(self.texts)
        drafted = (torch.arange(rows * tree.nodes) * 5 + 2).view(rows, -1) % VOCAB
        drafted[:, 0] = torch.tensor([text[-1] for text in self.texts])
        first = torch.tensor([len(text) - 1 for text in self.texts])
        logits = self.model.forward(self.cache, of_tree(drafted, tree, first, 128)).logits_BQV
        worst = 0.0
        for row, (text, source) in enumerate(zip(self.texts, self.sources, strict=True)):
            for leaf in range(3, 7):
                path = tree.ancestors_BNN[0, leaf].nonzero()[:, 0]
                whole = text[:-1] + drafted[row, path].tolist()
                expected = own(self.module, whole, source)[len(text) - 1 :]
                worst = max(worst, gap(logits[row, path], expected))
            text += drafted[row, [1, 3]].tolist()
        self.model.keep(self.cache, first, torch.tensor([[1, 3]] * rows))
        return worst


def played(model, source):
    """Rows join, leave and are replaced; the largest error of all."""
    rows, worst = Rows(model, 2), 0.0
    for seat in range(3):  # one more than there are rows
        rows.join(seat, source(seat), [3, 4, 9, 6][: seat + 1])
        worst = max(worst, rows.step())
    rows.leave(0)
    worst = max(worst, rows.step())
    rows.join(1, source(7), [3, 9, 2])
    return max(worst, rows.step())


@torch.inference_mode()
def test_rows_that_join_and_leave_score_trees_as_transformers_does():
    assert played(whisper(), lambda seed: audio(1, seed)) < 1e-5


@torch.inference_mode()
def test_rows_that_do_not_follow_their_seats_are_caught(monkeypatch):
    monkeypatch.setattr(Cross, "take", lambda cross, rows: cross)  # the row that moves in is lost
    assert played(whisper(), lambda seed: audio(1, seed)) > 1e-2


@torch.inference_mode()
def test_a_decoder_alone_reads_the_targets_states():
    def states(seed):
        made = TreeDecoder(WhisperRunner(whisper(), False)).encode(audio(1, seed))
        return made._replace(features=None)

    assert played(whisper(kind=WhisperForCausalLM), states) < 1e-5


@pytest.mark.parametrize("packed", PACKINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lean_runner_equals_transformers(shape, packed):
    model, source = whisper(shape), audio(2)
    assert fits(model)
    ids = [(7 * i + 3) % VOCAB for i in range(30)]
    lean = TreeDecoder(WhisperRunner(model, packed))
    at = torch.arange(30).expand(2, -1)
    with torch.inference_mode():
        cache = lean.open(2, 128, source)
        logits = lean.forward(cache, causal(torch.tensor([ids, ids]), at, 128)).logits_BQV
    for row in range(2):
        assert gap(logits[row], own(model, ids, source.take([row]))) < 1e-5


@torch.inference_mode()
def test_checks_and_calibration_make_audio_up():
    lean = adapt(whisper())
    assert isinstance(lean.runner, WhisperRunner)
    assert lean.reads == "source"
    assert load_checks.paths(lean, "target") is None
    assert load_checks.trees(lean, "target") < 1e-4
    assert min(calibrate.cost(lean, (1, 3), repeats=1).values()) > 0
    assert adapt(whisper(kind=WhisperForCausalLM)).reads == "states"


@torch.inference_mode()
def test_the_last_nodes_alone_and_their_states():
    lean, source = adapt(whisper()), audio(1)
    nodes = causal(torch.arange(6)[None] + 2, torch.arange(6)[None], 128)
    whole = lean.forward(lean.open(1, 128, source), nodes, aux_layers=(-1, 1))
    end = lean.forward(lean.open(1, 128, source), nodes, last=2, aux_layers=(-1, 1))
    assert end.logits_BQV.shape == (1, 2, VOCAB)
    torch.testing.assert_close(end.logits_BQV, whole.logits_BQV[:, -2:], rtol=1e-5, atol=1e-5)
    head = whisper().proj_out
    torch.testing.assert_close(head(end.hidden[0]), end.logits_BQV, rtol=1e-5, atol=1e-5)
    states = lean.encode(source).encoded.states_BTE
    own = whisper()(
        encoder_outputs=(states,), decoder_input_ids=nodes.tokens_BQ, output_hidden_states=True
    )
    below = own.decoder_hidden_states[1]
    torch.testing.assert_close(whole.hidden[1], below, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.hidden[1], below[:, -2:], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def equal_at_all_widths(rows):
    """Whether scores in bfloat16 are the same bits in calls of any width, in any batch."""
    model = copy.deepcopy(whisper()).to(torch.bfloat16)
    lean = adapt(model, packed=can_pack(torch.bfloat16))
    several = lean.encode(audio(rows))
    ids = torch.tensor([[(7 * i + 3) % VOCAB for i in range(24)]])
    at = torch.arange(24)[None]

    def scores(inputs, count, widths):
        cache, parts, start = lean.open(count, 128, inputs), [], 0
        for width in widths:
            span = slice(start, start + width)
            nodes = causal(ids[:, span].expand(count, -1), at[:, span].expand(count, -1), 128)
            parts.append(lean.forward(cache, nodes).logits_BQV)
            start += width
        return torch.cat(parts, 1)[-1]

    whole = scores(several, rows, [8, 8, 8])
    others = [
        scores(several, rows, [1] * 24),
        scores(several, rows, [2, 3, 4, 5, 6, 1, 3]),
        scores(several.take([rows - 1]), 1, [1, 4] * 4 + [4]),
    ]
    return all(torch.equal(whole, other) for other in others)


@pytest.mark.parametrize("rows", [1, 3])
def test_bfloat16_scores_do_not_depend_on_the_width_of_a_call(rows):
    """What makes plain and speculative text equal bit by bit, and a row's in any batch."""
    assert equal_at_all_widths(rows)


def test_another_path_for_narrow_calls_is_caught(monkeypatch):
    def switching(q, keys, values, mask):
        if q.shape[-2] > 4:
            return unscaled(q, keys, values, mask)
        mask = None if mask is None else mask.float()
        return unscaled(q.float(), keys.float(), values.float(), mask).bfloat16()

    def padded(rows):
        steady = BatchInvariantAttention(switching, rows), batch_invariance.BatchInvariance()
        monkeypatch.setattr(outrider.models.bart, "steady", lambda *_: steady)
        return equal_at_all_widths(1)

    assert not padded(batch_invariance.PaddingPolicy())
    assert padded(batch_invariance.PaddingPolicy((5, 6, 7, 8), 1))


@torch.inference_mode()
def test_what_cannot_be_read_is_refused():
    lean = adapt(whisper())
    short = audio(1)._replace(features=torch.zeros(1, FRAMES - 2, MELS))
    with pytest.raises(
        ConfigurationError, match=r"log-mel frames \[B, 40, 8\]; got features \[1, 38, 8\]"
    ):
        lean.open(1, 128, short)
    states = torch.zeros(1, FRAMES // 2, 16)
    other = Inputs(
        None, None, torch.ones(1, FRAMES // 2).bool(), Encoded(states, states[..., 0] == 0)
    )
    with pytest.raises(ConfigurationError, match=r"states of width 32; got states of width 16"):
        lean.open(1, 128, other)
    text = Inputs(torch.ones(1, 4, dtype=torch.int64), None, torch.ones(1, 4).bool())
    with pytest.raises(ConfigurationError, match="reads log-mel frames"):
        lean.open(1, 128, text)
