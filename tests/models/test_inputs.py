"""A model that reads more than its text: inputs are owned by the cache and follow its rows.

A tiny random T5 stands for all encoder-decoders; test_seq2seq.py has the families.
"""

from functools import lru_cache

import pytest
import torch
from rows_with_sources import played
from transformers import T5Config, T5ForConditionalGeneration

from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner, TreeDecoder, adapt, calibrate, load_checks
from outrider.models.seq2seq.runner import CrossAttentionCache, Seq2SeqRunner
from outrider.types import Inputs
from tiny import llama

VOCAB = 32
LENGTHS = (9, 5, 7)


def sources(lengths, seed=1):
    """Padded source texts of these lengths."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=random)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Inputs(ids * mask, None, mask)


@lru_cache
def t5(noise=0.0):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=3.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return model


def pair():
    return adapt(t5()), adapt(t5(0.1))


@torch.inference_mode()
def test_checks_and_calibration_make_inputs_up():
    target, _ = pair()
    assert load_checks.paths(target, "target") < 1e-4
    assert load_checks.trees(target, "target") < 1e-4
    assert min(calibrate.cost(target, (1, 3), repeats=1).values()) > 0


def test_a_model_that_ignores_positions_is_caught():
    target, _ = pair()
    target.runner._patches = []
    with pytest.raises(ConfigurationError, match="T5ForConditionalGeneration"):
        load_checks.paths(target, "target")


def test_inputs_for_a_model_of_text_alone_are_refused():
    text = TreeDecoder(LlamaRunner(llama(), False))
    assert text.probe(3) is None
    with pytest.raises(ConfigurationError, match=r"reads text alone.*leave inputs out"):
        text.open(3, 128, sources(LENGTHS))


@torch.inference_mode()
def test_rows_that_join_and_leave_read_their_own_source():
    assert played(pair()[0], sources((9, 5, 7, 12))) < 1e-4


@pytest.mark.parametrize("broken", ["take", "put"])
@torch.inference_mode()
def test_inputs_that_do_not_follow_their_rows_are_noticed(broken, monkeypatch):
    whole_take, whole_put = CrossAttentionCache.take, CrossAttentionCache.put

    def put(self, into, other):
        return whole_put(self, into, other) if max(into) >= self.rows else self

    if broken == "take":  # the first rows instead of those asked for
        monkeypatch.setattr(
            CrossAttentionCache, "take", lambda self, rows: whole_take(self, range(len(rows)))
        )
    else:  # new rows alone
        monkeypatch.setattr(CrossAttentionCache, "put", put)
    assert played(pair()[0], sources((9, 5, 7, 12))) > 0.01


def decode(drafter, sampling, limits=None, max_num_seqs=3):
    """Texts of three rows that read sources of three lengths."""
    target, draft = pair()
    inputs = sources(LENGTHS)
    run = EngineRun(Engine(target, drafter(draft), "match"), max_num_seqs, 128)
    each = limits or [StopConditions(20)] * 3
    settings = sampling if isinstance(sampling, list) else [sampling] * 3
    for row, (how, end) in enumerate(zip(settings, each, strict=True)):
        run.submit(Request([0], how, end, inputs.take([row])))
    run.close()
    texts = [[], [], []]
    for block in run:
        texts[block.request_id] += block.token_ids
    return texts, run.stats


DRAFTERS = {
    "root": lambda draft: Root(),
    "chain": lambda draft: DraftModel(draft, (1,) * 4, shared_noise=True),
    "tree": lambda draft: DraftModel(draft, (2, 2, 1), shared_noise=True),
}
SEEDS = [SamplingParams(1.0, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_text_is_plain_decodings(name):
    expected, _ = decode(DRAFTERS["root"], SEEDS)
    texts, stats = decode(DRAFTERS[name], SEEDS)
    assert texts == expected
    assert stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_end_at_different_times(name):
    """The batch loses its first two rows: the third goes on with its own source."""
    expected, _ = decode(DRAFTERS["root"], SEEDS)
    limits = [StopConditions(3), StopConditions(4), StopConditions(20)]
    for max_num_seqs in (3, 2, 1):
        texts, _ = decode(DRAFTERS[name], SEEDS, limits, max_num_seqs)
        assert texts == [expected[0][:3], expected[1][:4], expected[2]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_transformers(name):
    inputs = sources(LENGTHS)
    expected = t5().generate(
        input_ids=inputs.ids_BS,
        attention_mask=inputs.mask_BS.long(),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    texts, _ = decode(DRAFTERS[name], SamplingParams(0))
    assert texts == expected[:, 1:].tolist()


class Counting(TreeDecoder):
    """Counts what its encoder reads."""

    read = 0

    def encode(self, inputs):
        if inputs.encoded is None:
            type(self).read += len(inputs.mask_BS)
        return super().encode(inputs)


@torch.inference_mode()
def test_each_source_is_encoded_once_and_known_states_never_again():
    target = Counting(Seq2SeqRunner(t5()))
    inputs = sources(LENGTHS)
    Counting.read = 0
    kept = [target.encode(inputs.take([row])) for row in range(2)] + [inputs.take([2])]
    assert Counting.read == 2
    prompts = [[0]] * 3
    texts = [[], [], []]
    for block in Engine(target, Root()).run(
        prompts, SamplingParams(0), StopConditions(9), inputs=kept
    ):
        texts[block.request_id] += block.token_ids
    assert Counting.read == 3
    assert texts == [
        line[:9] for line in decode(DRAFTERS["root"], SamplingParams(0), [StopConditions(9)] * 3)[0]
    ]


def test_references_are_the_requests_own_or_the_sources():
    inputs = sources(LENGTHS)
    run = Engine(pair()[0], Root()).run(
        [[0]] * 3,
        SamplingParams(0),
        StopConditions(9),
        inputs=[inputs.take([row]) for row in range(3)],
        references=[(), (5, 6, 7), ()],
    )
    next(run)
    context = run.batch.context
    rows = [[t for t in line if t >= 0] for line in context.reference_BS.tolist()]
    ids = [line[:size] for line, size in zip(inputs.ids_BS.tolist(), LENGTHS, strict=True)]
    assert rows == [ids[0], [5, 6, 7], ids[2]]
