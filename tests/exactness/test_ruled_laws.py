"""Where rules act the emitted law is that of transformers' processors, by enumeration.

Truth: the target's logits at every prefix, each processed on its own text. Emitted: every draft
that can be drawn, verified by scores that `shape` makes at the nodes of the tree. `shape` is
float32, and so is the tolerance.
"""

from functools import lru_cache

import enumeration as e
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from outrider import SamplingParams, Timestamps, verifiers
from outrider.sampling import logits_processors
from outrider.types import Context, Laws, Scores

TOLERANCE = 1e-6
VOCAB, DEPTH, PROMPT, SOURCE = 6, 2, [5], [1, 0, 2, 2, 4]
END = len(PROMPT) + DEPTH + 1  #: where a last token is forced: the last of those compared
TIMES = Timestamps(no_timestamps_id=2, end_id=1, max_initial=1)


def whisper():
    config = GenerationConfig(eos_token_id=TIMES.end_id)
    config.no_timestamps_token_id = TIMES.no_timestamps_id
    config.max_initial_timestamp_index = TIMES.max_initial
    return WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))


#: name -> our setting, and transformers' processors
RULES = {
    "timestamps": (SamplingParams(timestamps=TIMES), lambda: [whisper()]),
    "begin and timestamps": (
        SamplingParams(timestamps=TIMES, begin_suppress_tokens=(4,)),
        lambda: [SuppressTokensAtBeginLogitsProcessor([4], 1), whisper()],
    ),
    "first, last and begin": (
        SamplingParams(forced_bos_token_id=3, forced_eos_token_id=1, begin_suppress_tokens=(0, 3)),
        lambda: [
            SuppressTokensAtBeginLogitsProcessor([0, 3], 2),
            ForcedBOSTokenLogitsProcessor(3),
            ForcedEOSTokenLogitsProcessor(END, 1),
        ],
    ),
    "n-grams of the source": (
        SamplingParams(encoder_no_repeat_ngram_size=2),
        lambda: [EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([SOURCE]))],
    ),
}
FORESTS = {
    "chain": lambda world: e.without(world, (1, 1)),
    "tree": lambda world: e.without(world, (2, 1)),
    "i.i.d. children": lambda world: e.separate(world, (2, 1)),
    "placed": lambda world: e.placed(world, (2, 2)),
    "hub": lambda world: e.hub(world, (2, 1)),
}


def path(prefix):
    """The tokens of a prefix by its number."""
    tokens = []
    while prefix:
        prefix, token = divmod(prefix - 1, VOCAB)
        tokens.insert(0, token)
    return tokens


def processed(raw, processors):
    """Laws [C, prefixes, V] from logits that processors have seen, each with its prefix's text."""
    laws = np.zeros_like(raw)
    for prefix in range(raw.shape[1]):
        ids = torch.tensor([PROMPT + path(prefix)] * raw.shape[0])
        scores = torch.from_numpy(raw[:, prefix])
        for processor in processors:
            scores = processor(ids, scores)
        laws[:, prefix] = scores.softmax(-1).numpy()
    return laws


class Ruled:
    """A forest whose scores are the raw logits at its nodes as `shape` changes them."""

    def __init__(self, forest, raw, how, blind):
        self.forest, self.world, self.tree = forest, forest.world, forest.tree
        self.weight_R, self.case_R, self.code_RN = forest.weight_R, forest.case_R, forest.code_RN
        self.raw, self.how, self.blind = raw, how, blind

    def __len__(self):
        return len(self.forest)

    def __getitem__(self, part):
        return Ruled(self.forest[part], self.raw, self.how, self.blind)

    def draft(self):
        return self.forest.draft()

    def scores(self):
        rows = len(self)
        logits = torch.from_numpy(self.raw[self.case_R[:, None], self.code_RN.clip(0)])
        nodes = torch.from_numpy(self.forest.token_RN).clone()
        nodes[:, 0] = PROMPT[-1]
        built = logits_processors.build(
            [self.how] * rows,
            [PROMPT] * rows,
            [()] * rows,
            VOCAB,
            "cpu",
            ends=[END] * rows,
            sources=[SOURCE] * rows,
        )
        tree, size = self.tree, len(PROMPT)
        if self.blind:  # a node sees itself alone
            eye = torch.eye(tree.nodes, dtype=torch.bool)
            parent = torch.full_like(tree.parent_BN, 0)
            tree = tree._replace(ancestors_BNN=eye.expand_as(tree.ancestors_BNN), parent_BN=parent)
        context = Context(torch.tensor([PROMPT] * rows), torch.full((rows,), size), size, None)
        shaped = logits_processors.apply(logits, built, context, nodes, tree).double()
        return Scores(Laws(shaped, torch.ones(rows, dtype=torch.float64), greedy="none"))


@lru_cache
def ruled(rules, name, blind=False, draft_too=True):
    """A forest under rules; the draft keeps them, too, or does not know of them."""
    how, processors = RULES[rules]
    world = e.World(VOCAB, DEPTH, 3, ("random", "equal"))
    raw = np.log(world.target)
    world.target = processed(raw, processors())
    if draft_too:
        world.draft = processed(np.log(world.draft), processors())
    return Ruled(FORESTS[name](world), raw, how, blind)


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("rules", RULES)
def test_law_is_the_processed_targets(rules, name):
    trees, verified = ruled(rules, name), 0
    for rule in verifiers.VERIFIERS.values():
        if rule.exact and verifiers.supports(rule, trees.forest.kinds, trees.tree.is_chain):
            verified += 1
            assert e.errors(rule, trees).max() < TOLERANCE, rule.name
    assert verified >= 2


@pytest.mark.parametrize("rules", RULES)
def test_a_draft_that_keeps_no_rules_costs_acceptance_and_no_exactness(rules):
    knows, does_not = ruled(rules, "tree"), ruled(rules, "tree", draft_too=False)
    rule = verifiers.get("rejection")
    assert e.errors(rule, does_not).max() < TOLERANCE
    assert (e.emitted(rule, knows)[1] > e.emitted(rule, does_not)[1]).any()


@pytest.mark.parametrize("rules", ["timestamps", "n-grams of the source"])
def test_a_node_that_does_not_see_its_path_is_seen(rules):
    assert e.errors(verifiers.get("rejection"), ruled(rules, "tree", blind=True)).max() > 1e-3
