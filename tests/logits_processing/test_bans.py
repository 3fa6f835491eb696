"""Bans and forced tokens at tree nodes against transformers' processors on each node's own text."""

from dataclasses import replace

import pytest
import torch
from nodes import joined, random_case
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from outrider import SamplingParams
from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError
from outrider.sampling import logits_processors
from outrider.sampling.logits_processors import among, repeats
from outrider.tree import branching
from outrider.types import Context
from tiny import DRAFTERS, pair

VOCAB, STOPS = 11, (0, 4)
SETTINGS = [
    SamplingParams(begin_suppress_tokens=(0, 3, 9), min_new_tokens=2),
    SamplingParams(forced_bos_token_id=0, begin_suppress_tokens=(5,)),
    SamplingParams(forced_eos_token_id=4, min_new_tokens=9),
    SamplingParams(encoder_no_repeat_ngram_size=2, no_repeat_ngram_size=3),
    SamplingParams(),
    SamplingParams(encoder_no_repeat_ngram_size=1, begin_suppress_tokens=(0,)),
    SamplingParams(forced_bos_token_id=7, forced_eos_token_id=0, encoder_no_repeat_ngram_size=3),
    SamplingParams(min_new_tokens=1, begin_suppress_tokens=(10, 2)),
]


def ends(case):
    """Rows end within the tree, some of them at its root or beyond it."""
    return [len(text) + 1 + row % 5 for row, text in enumerate(case.texts)]


def sources(seed):
    random = torch.Generator().manual_seed(seed)
    sizes = [1, 2, 5, 12, 3, 6, 20, 4]
    return [torch.randint(0, VOCAB, (size,), generator=random).tolist() for size in sizes]


def reference(case, settings, read):
    def process(row, ids, scores):
        how, size, rules = settings[row], len(case.prompts[row]), []
        if how.no_repeat_ngram_size:
            rules.append(NoRepeatNGramLogitsProcessor(how.no_repeat_ngram_size))
        if how.encoder_no_repeat_ngram_size:
            of = torch.tensor([read[row]] * len(ids))
            n = how.encoder_no_repeat_ngram_size
            rules.append(EncoderNoRepeatNGramLogitsProcessor(n, of))
        if how.min_new_tokens:
            least = how.min_new_tokens
            rules.append(MinNewTokensLengthLogitsProcessor(size, least, list(STOPS)))
        forced = how.forced_bos_token_id is not None
        if how.begin_suppress_tokens:
            begin = size + forced
            rules.append(SuppressTokensAtBeginLogitsProcessor(how.begin_suppress_tokens, begin))
        scores = LogitsProcessorList(rules)(ids, scores)
        if forced:  # transformers knows prompts of one token alone
            scores = ForcedBOSTokenLogitsProcessor(how.forced_bos_token_id)(
                ids[:, size - 1 :], scores
            )
        if how.forced_eos_token_id is not None:
            end = ends(case)[row]
            scores = ForcedEOSTokenLogitsProcessor(end, how.forced_eos_token_id)(ids, scores)
        return scores

    return case.reference(process)


def test_every_node_as_transformers_has_it():
    for seed in range(12):
        case, read = random_case(VOCAB, seed, rows=8), sources(seed)
        want = reference(case, SETTINGS, read)
        more = {"ends": ends(case), "sources": read}
        built = case.built(SETTINGS, STOPS, **more)
        assert torch.equal(case.by(built), want)
        assert torch.equal(case.level_by_level(built), want)


@pytest.mark.parametrize(
    ("row", "other"),
    [
        (0, {"begin_suppress_tokens": (0, 3)}),
        (0, {"min_new_tokens": 1}),
        (1, {"forced_bos_token_id": 1}),
        (1, {"begin_suppress_tokens": ()}),
        (2, {"forced_eos_token_id": None}),
        (3, {"encoder_no_repeat_ngram_size": 3}),
        (6, {"forced_eos_token_id": 1}),
    ],
)
def test_each_rule_acts(row, other):
    """With any of them changed nodes differ: the comparison above sees it."""
    changed = list(SETTINGS)
    changed[row] = replace(changed[row], **other)
    differ = 0
    for seed in range(5):
        case, read = random_case(VOCAB, seed, rows=8), sources(seed)
        shaped = case.shaped(changed, STOPS, ends(case), read)
        differ += not torch.equal(shaped, reference(case, SETTINGS, read))
    assert differ


def test_rows_of_every_kind_come_and_go():
    case, read = random_case(VOCAB, 4, rows=8), sources(4)
    settings = [replace(how, min_new_tokens=0) for how in SETTINGS]
    want = reference(case, settings, read)
    rows = joined(case, settings, ends=ends(case), sources=read)
    assert torch.equal(case.by(rows), want)
    assert rows.soonest == min(ends(case)[2], ends(case)[6])


def test_rules_over_some_tokens_are_the_rules_over_all():
    some, settings = torch.tensor([7, 0, 3, 9]), [SETTINGS[0], SamplingParams(), SETTINGS[7]]
    settings[1:1] = [SamplingParams(logit_bias={9: 1.5, 0: -float("inf"), 2: 3.0})]
    differ = 0
    for seed in range(4):
        case = random_case(VOCAB, seed, rows=4)
        built, logits = case.built(settings, STOPS), case.logits[..., some]
        found, other = (
            logits_processors.apply(logits, among(built, ids), case.context, case.nodes, case.tree)
            for ids in (some, some.flip(0))
        )
        assert torch.equal(found, case.by(built)[..., some])
        differ += not torch.equal(found, other)  # they act on the tokens that they name
    assert differ
    for how in (SETTINGS[1], SETTINGS[3], SamplingParams(repetition_penalty=1.2)):
        assert among(case.built([how] * 4, sources=sources(0)[:4]), some) is None


def test_bans_of_a_beginning_end_where_every_row_has_begun():
    settings = [SETTINGS[0], replace(SETTINGS[7], min_new_tokens=3)]
    case = random_case(VOCAB, 0, rows=2)  # no token is made in one row, one in the other
    built, size = case.built(settings, STOPS), len(case.prompts[1])
    assert built.opened == max(len(case.prompts[0]) + 2, size + 3)
    want = case.by(built)
    case.context = case.context._replace(least=built.opened - 1)
    assert torch.equal(case.by(built), want)
    case.context = case.context._replace(least=built.opened)  # not so: a row is shorter
    assert not torch.equal(case.by(built), want)


def test_nothing_is_read_from_the_device():
    case = random_case(VOCAB, 4, rows=8)
    built = case.built(SETTINGS, STOPS, ends=ends(case), sources=sources(4))

    def away(store):
        moved = {k: v.to("meta") for k, v in store._asdict().items() if torch.is_tensor(v)}
        return store._replace(**moved)

    shaped = logits_processors.apply(
        case.logits.to("meta"), away(built), away(case.context), case.nodes.to("meta"),
        away(case.tree),
    )  # fmt: skip
    assert shaped.shape == case.logits.shape


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"begin_suppress_tokens": 5}, "begin_suppress_tokens must be a tuple of token ids; got 5"),
        ({"begin_suppress_tokens": (1.5,)}, "begin_suppress_tokens must be a tuple of token ids"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id must be a whole number of at least 0"),
        ({"forced_eos_token_id": [2]}, "forced_eos_token_id must be a whole number"),
        ({"encoder_no_repeat_ngram_size": -1}, "encoder_no_repeat_ngram_size must be a whole"),
    ],
)
def test_values_of_another_kind_are_refused(wrong, says):
    with pytest.raises(ConfigurationError, match=says):
        SamplingParams(**wrong)


@pytest.mark.parametrize("name", ["begin_suppress_tokens", "forced_bos_token_id"])
def test_tokens_outside_the_vocabulary_are_refused(name):
    how = SamplingParams(**{name: (97,) if name.startswith("begin") else 97})
    with pytest.raises(ConfigurationError, match=f"{name} names token 97, outside the vocabulary"):
        logits_processors.validate([how], [[1]], [()], 97, "cpu")


def test_a_source_that_is_not_there_is_asked_for():
    target, draft = pair()
    engine = Engine(target, DRAFTERS["chain"](draft))
    with pytest.raises(ConfigurationError, match="got request 0 without source ids; leave it out"):
        engine.run([[1, 2]], SamplingParams(encoder_no_repeat_ngram_size=2))


class Written(TorchDispatchMode):
    """Bytes that torch's calls write in here."""

    bytes = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        made = call(*args, **(kwargs or {}))
        had = {one.data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.data_ptr() not in had:  # no view
            self.bytes += made.nbytes
        return made


@pytest.mark.parametrize("before", range(4))
def test_n_grams_are_found_on_a_device_as_on_the_host(before):
    random = torch.Generator().manual_seed(before)
    last = torch.randint(-1 if before == 3 else 0, 3, (2, 5, before), generator=random)
    for nodes in (1, 5):
        where = torch.randint(-1, 4, (2, nodes, 400), generator=random)
        found = [repeats(last, where, 4, on_host) for on_host in (True, False)]
        assert torch.equal(*found)
        assert found[0].any()


def test_n_grams_behind_a_long_text_take_a_few_bytes_a_token_and_node():
    """No node has a copy of what is committed, of eight bytes a token."""
    took = {}
    for length, nodes in ((64, 1), (64, 9), (4096, 1), (4096, 9)):
        text_1L = torch.arange(length + 1)[None] % 997
        context = Context(text_1L, torch.tensor([length]), length, None)
        tree = branching((1,) * (nodes - 1))
        settings = SamplingParams(no_repeat_ngram_size=3)
        shaping = logits_processors.build([settings], [[1]], [[]], 997, "cpu")
        with Written() as written:
            logits = torch.zeros(1, nodes, 997)
            logits_processors.apply(logits, shaping, context, text_1L[:, :nodes], tree)
        took[length, nodes] = written.bytes
    one, nine = ((took[4096, nodes] - took[64, nodes]) / (4096 - 64) for nodes in (1, 9))
    assert one < 64
    assert (nine - one) / 8 < 8
