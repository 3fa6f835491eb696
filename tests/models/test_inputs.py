"""A model that reads more than its text: inputs are owned by the cache and follow its rows.

A tiny random T5 stands for all encoder-decoders. Its runner lives here: the seam is what is tested.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from outrider import DraftModel, Engine, Limits, Root, Sampling
from outrider.engine.engine import Run
from outrider.engine.request import Request
from outrider.errors import ConfigurationError
from outrider.models import CausalModel, LlamaRunner, calibrate, check
from outrider.models.cache import SlotCache
from outrider.models.causal import Reader, additive
from outrider.models.nodes import causal, of_tree
from outrider.tree import branching
from outrider.types import Encoded, Inputs, Nodes, Output
from tiny import llama

VOCAB = 32
LENGTHS = (9, 5, 7)


def sources(lengths, seed=1):
    """Padded source texts of these lengths."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=random)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Inputs(ids * mask, None, mask)


class Encoder:
    """The encoder's states are what a row keeps of its source."""

    shares = False

    def __init__(self, model):
        self.model = model

    def encode(self, inputs):
        mask = inputs.mask_BS
        encoder = self.model.encoder
        states = encoder(input_ids=inputs.ids_BS, attention_mask=mask.long()).last_hidden_state
        return Encoded(states, mask)

    def keep(self, encoded):
        return encoded

    def probe(self, rows):
        return sources([7 + row for row in range(rows)])


class T5Runner:
    """T5's decoder: its position bias is computed from positions instead of slots."""

    trees, packed, name = True, False, "T5ForConditionalGeneration"
    context, device, dtype = 1 << 20, torch.device("cpu"), torch.float32

    def __init__(self, model):
        self.model, self.vocab_size = model, model.config.vocab_size
        self.layers = model.config.num_decoder_layers
        self.reader: Reader = Encoder(model)

    @contextmanager
    def _biased(self, keys_BW, positions_BQ) -> Iterator[None]:
        attention = self.model.decoder.block[0].layer[0].SelfAttention

        def bias(*_, **__):
            buckets = attention._relative_position_bucket(
                keys_BW[:, None] - positions_BQ[:, :, None],
                bidirectional=False,
                num_buckets=attention.relative_attention_num_buckets,
                max_distance=attention.relative_attention_max_distance,
            )
            return attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)

        attention.compute_bias = bias
        try:
            yield
        finally:
            del attention.compute_bias

    def __call__(self, cache: SlotCache, nodes: Nodes, last, hidden) -> Output:
        source = cache.inputs
        assert isinstance(source, Encoded), "rows without a source"
        keys_BW = cache.place(nodes.positions_BQ)[:, : cache.width]
        with self._biased(keys_BW, nodes.positions_BQ):
            output = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=source.states_BTE),
                attention_mask=source.mask_BT.long(),
                decoder_input_ids=nodes.tokens_BQ,
                decoder_attention_mask=additive(nodes.visible_BQW, self.dtype),
                past_key_values=EncoderDecoderCache(cache, DynamicCache()),
                use_cache=True,
                output_hidden_states=hidden,
            )
        wanted = slice(None if last is None else -last, None)
        states = output.decoder_hidden_states[-1][:, wanted] if hidden else None
        return Output(output.logits[:, wanted], states)

    def plain(self, tokens_1Q, inputs=None):
        return self.model(
            input_ids=inputs.ids_BS,
            attention_mask=inputs.mask_BS.long(),
            decoder_input_ids=tokens_1Q,
            use_cache=False,
        ).logits

    def narrowed(self, size):
        return nullcontext()


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
    return CausalModel(T5Runner(t5())), CausalModel(T5Runner(t5(0.1)))


@torch.inference_mode()
def test_checks_and_calibration_make_inputs_up():
    target, _ = pair()
    assert check.paths(target, "target") < 1e-4
    assert check.trees(target, "target") < 1e-4
    assert min(calibrate.cost(target, (1, 3), repeats=1).values()) > 0


def test_a_model_that_ignores_positions_is_caught():
    target, _ = pair()
    target.runner._biased = lambda keys, positions: nullcontext()
    with pytest.raises(ConfigurationError, match="T5ForConditionalGeneration"):
        check.paths(target, "target")


def test_inputs_for_a_model_of_text_alone_are_refused():
    text = CausalModel(LlamaRunner(llama(), False))
    assert text.probe(3) is None
    with pytest.raises(ConfigurationError, match=r"reads text alone.*leave inputs out"):
        text.open(3, 128, sources(LENGTHS))


class Rows:
    """Rows in the seats of one cache, each with its own text, against the model's own forward."""

    def __init__(self, model, seats):
        self.model, self.cache = model, model.open(seats, 128).narrow(0)
        self.texts, self.sources = [], []

    def join(self, seat, source, prompt):
        """A row that was read alone takes a seat, all but its last token in the cache."""
        own = self.model.open(1, 128, source)
        at = torch.arange(len(prompt) - 1)[None]
        if len(prompt) > 1:
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
        """The largest relative error of a tree's logits; the path 1, 3 is kept."""
        tree, rows = branching((2, 2)), len(self.texts)
        drafted = (torch.arange(rows * tree.nodes) * 5 + 2).view(rows, -1) % VOCAB
        drafted[:, 0] = torch.tensor([text[-1] for text in self.texts])
        first = torch.tensor([len(text) - 1 for text in self.texts])
        nodes = of_tree(drafted, tree, first, 128)
        logits = self.model.forward(self.cache, nodes).logits_BQV
        worst = 0.0
        for row, (text, source) in enumerate(zip(self.texts, self.sources, strict=True)):
            for leaf in range(3, 7):
                path = tree.ancestors_BNN[0, leaf].nonzero()[:, 0]
                whole = torch.tensor([text[:-1]]).long().view(1, -1)
                whole = torch.cat([whole, drafted[row, path][None]], 1)
                own = self.model.runner.plain(whole, source)[0, len(text) - 1 :]
                gap = (logits[row, path] - own).abs().max() / own.abs().max()
                worst = max(worst, float(gap))
            text += drafted[row, [1, 3]].tolist()
        # the last of the two is pending: it is written by the next call
        self.model.keep(self.cache, first, torch.tensor([[1, 3]] * rows))
        return worst


def played(model):
    """Rows with sources of four lengths join, leave and are replaced; the largest error of all."""
    rows, worst = Rows(model, 3), 0.0
    for seat, length in enumerate(LENGTHS):
        rows.join(seat, sources([length], seed=seat), [0] + [4] * seat)
        worst = max(worst, rows.step())
    rows.leave(0)
    worst = max(worst, rows.step())
    rows.join(1, sources([12], seed=7), [0, 3, 9, 2])
    worst = max(worst, rows.step())
    rows.leave(1)
    return max(worst, rows.step())


@torch.inference_mode()
def test_rows_that_join_and_leave_read_their_own_source():
    assert played(pair()[0]) < 1e-4


@pytest.mark.parametrize("broken", ["take", "put"])
@torch.inference_mode()
def test_inputs_that_do_not_follow_their_rows_are_noticed(broken, monkeypatch):
    if broken == "take":
        monkeypatch.setattr(Encoded, "take", lambda self, rows: self.narrow(len(rows)))
    else:
        whole = Encoded.put
        monkeypatch.setattr(
            Encoded,
            "put",
            lambda self, seats, other: (
                whole(self, seats, other) if max(seats) >= len(self.mask_BT) else self
            ),
        )
    assert played(pair()[0]) > 0.01


def decode(drafter, sampling, limits=None, seats=3):
    """Texts of three rows that read sources of three lengths."""
    target, draft = pair()
    inputs = sources(LENGTHS)
    run = Run(Engine(target, drafter(draft), "match"), seats, 128)
    each = limits or [Limits(20)] * 3
    settings = sampling if isinstance(sampling, list) else [sampling] * 3
    for row, (how, end) in enumerate(zip(settings, each, strict=True)):
        run.submit(Request([0], how, end, inputs.take([row])))
    run.close()
    texts = [[], [], []]
    for block in run:
        texts[block.row] += block.token_ids
    return texts, run.stats


DRAFTERS = {
    "root": lambda draft: Root(),
    "chain": lambda draft: DraftModel(draft, (1,) * 4, coupled=True),
    "tree": lambda draft: DraftModel(draft, (2, 2, 1), coupled=True),
}
SEEDS = [Sampling(1.0, seed=seed) for seed in range(3)]


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
    limits = [Limits(3), Limits(4), Limits(20)]
    for seats in (3, 2, 1):
        texts, _ = decode(DRAFTERS[name], SEEDS, limits, seats)
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
    texts, _ = decode(DRAFTERS[name], Sampling(0))
    assert texts == expected[:, 1:].tolist()


class Counting(CausalModel):
    """Counts what its encoder reads."""

    read = 0

    def encode(self, inputs):
        if inputs.encoded is None:
            type(self).read += len(inputs.mask_BS)
        return super().encode(inputs)


@torch.inference_mode()
def test_each_source_is_encoded_once_and_known_states_never_again():
    target = Counting(T5Runner(t5()))
    inputs = sources(LENGTHS)
    Counting.read = 0
    kept = [target.encode(inputs.take([row])) for row in range(2)] + [inputs.take([2])]
    assert Counting.read == 2
    prompts = [[0]] * 3
    texts = [[], [], []]
    for block in Engine(target, Root()).run(prompts, Sampling(0), Limits(9), inputs=kept):
        texts[block.row] += block.token_ids
    assert Counting.read == 3
    assert texts == [line[:9] for line in decode(DRAFTERS["root"], Sampling(0), [Limits(9)] * 3)[0]]


def test_references_are_the_requests_own_or_the_sources():
    inputs = sources(LENGTHS)
    run = Engine(pair()[0], Root()).run(
        [[0]] * 3,
        Sampling(0),
        Limits(9),
        inputs=[inputs.take([row]) for row in range(3)],
        references=[(), (5, 6, 7), ()],
    )
    next(run)
    context = run.batch.context
    rows = [[t for t in line if t >= 0] for line in context.reference_BS.tolist()]
    ids = [line[:size] for line, size in zip(inputs.ids_BS.tolist(), LENGTHS, strict=True)]
    assert rows == [ids[0], [5, 6, 7], ids[2]]
