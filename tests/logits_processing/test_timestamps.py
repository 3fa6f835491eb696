"""The timestamp rules at tree nodes against transformers' processor on each node's own text."""

from dataclasses import replace

import pytest
import torch
from nodes import joined, random_case
from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor
from transformers.generation import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from outrider import SamplingParams
from outrider.errors import ConfigurationError
from outrider.sampling import logits_processors
from outrider.sampling.timestamps import Timestamps

#: 20 text ids, the end, 4 other special ids, and 25 timestamps.
VOCAB = 50
RULE = Timestamps(no_timestamps_id=24, end_id=20, max_initial=6)
RULES = [RULE, replace(RULE, max_initial=0), replace(RULE, max_initial=None), None]
RULES += [RULE, replace(RULE, end_id=22), Timestamps(30, 20, 3), RULE]


def tokens(shape, generator):
    """Timestamps half of the time, and not too far apart: rules of pairs and order both act."""
    text = torch.randint(0, 31, shape, generator=generator)
    stamp = torch.randint(25, 40, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, stamp, text)


def processor(rule, begin):
    config = GenerationConfig(eos_token_id=rule.end_id)
    config.no_timestamps_token_id = rule.no_timestamps_id
    config.max_initial_timestamp_index = rule.max_initial
    return WhisperTimeStampLogitsProcessor(config, begin_index=begin)


def reference(case, rules):
    def process(row, ids, scores):
        if rules[row] is None:
            return scores
        return processor(rules[row], len(case.prompts[row]))(ids, scores)

    return case.reference(process)


def test_ten_thousand_paths_as_transformers_has_them():
    paths = timed = 0
    settings = [SamplingParams(timestamps=rule) for rule in RULES]
    for seed in range(63):
        case = random_case(VOCAB, seed, draw=tokens)
        want, shaped = reference(case, RULES), case.shaped(settings)
        assert torch.equal(shaped, want)
        if seed < 5:  # as drafters ask
            assert torch.equal(case.level_by_level(case.built(settings)), want)
        paths += want.shape[0] * want.shape[1]
        timed += int((want[..., :20] == -torch.inf).all(-1).sum())
    assert paths > 10_000
    assert 0.2 < timed / paths < 0.8  # a timestamp must come, and need not: both often


def test_a_path_read_from_another_node_is_seen():
    case = random_case(VOCAB, 1, draw=tokens)
    settings = [SamplingParams(timestamps=rule) for rule in RULES]
    want = reference(case, RULES)
    for field in ("parent_BN", "ancestors_BNN"):  # another row's topology
        turned = case.tree._replace(**{field: getattr(case.tree, field).roll(1, 0)})
        assert not torch.equal(case.shaped(settings, tree=turned), want)
    for rule in (replace(RULE, max_initial=7), replace(RULE, end_id=19)):
        assert not torch.equal(case.shaped([SamplingParams(timestamps=rule)] * 8), want)


def test_the_order_of_whispers_rules():
    """Begin, suppress, timestamps: what is banned counts nothing when timestamps are weighed."""
    begin, never = [3, 26], [5, 6, 7, 8, 9, 10, 11, 12, 30]
    how = SamplingParams(
        logit_bias=dict.fromkeys(never, -torch.inf), begin_suppress_tokens=begin, timestamps=RULE
    )
    shaped, wanted, swapped = [], [], []
    for seed in range(4):
        case = random_case(VOCAB, seed, draw=tokens)

        def process(row, ids, scores, case=case, turned=False):
            size = len(case.prompts[row])
            chain = [
                SuppressTokensAtBeginLogitsProcessor(begin, size),
                SuppressTokensLogitsProcessor(never),
                processor(RULE, size),
            ]
            return LogitsProcessorList(reversed(chain) if turned else chain)(ids, scores)

        shaped.append(case.shaped([how] * 8))
        wanted.append(case.reference(process))
        swapped.append(case.reference(lambda *args, ask=process: ask(*args, turned=True)))
    assert torch.equal(torch.cat(shaped), torch.cat(wanted))
    assert not torch.equal(torch.cat(swapped), torch.cat(wanted))


def test_rows_with_other_rules_come_and_go():
    case = random_case(VOCAB, 7, draw=tokens)
    settings = [SamplingParams(timestamps=rule) for rule in RULES]
    want = reference(case, RULES)
    assert torch.equal(case.by(joined(case, settings)), want)
    settings[2], settings[3] = settings[3], settings[2]
    assert not torch.equal(case.by(joined(case, settings)), want)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"no_timestamps_id": 50.5}, "no_timestamps_id must be a whole number"),
        ({"end_id": 60}, "end_id must be smaller than no_timestamps_id=24; got 60"),
        ({"end_id": -1}, "end_id must be a whole number of at least 0"),
        ({"max_initial": True}, "max_initial must be a whole number"),
    ],
)
def test_rules_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(ConfigurationError, match=says):
        replace(RULE, **wrong)


def test_a_rule_of_another_kind_or_vocabulary_is_refused():
    with pytest.raises(ConfigurationError, match=r"timestamps must be Timestamps or None; got 50"):
        SamplingParams(timestamps=50)
    with pytest.raises(ConfigurationError, match="timestamps names token 25, outside the voc"):
        logits_processors.validate([SamplingParams(timestamps=RULE)], [[1]], [()], 25, "cpu")
