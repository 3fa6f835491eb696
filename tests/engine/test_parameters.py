"""Sampling parameters act at every tree node with that node's own prefix, on both sides.

Reference: transformers' own processors, one node at a time on its whole text.
"""

import itertools

import pytest
import torch
from families import FAMILIES, build
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from transformers.generation.logits_process import WhisperNoSpeechDetection

from outrider import verifiers
from outrider.drafters import DraftModel, PromptLookup, Root
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.sampling import logits_processors
from outrider.sampling.sampling_params import SamplingParams
from outrider.sampling.timestamps import Timestamps
from outrider.tree import branching, chain, from_parents
from outrider.types import Context

VOCAB = 13


def context_of(prompts, made, bound=24):
    """Committed texts: prompts followed by generated tokens."""
    tokens = torch.zeros(len(prompts), bound + 8, dtype=torch.int64)
    texts = [list(p) + list(m) for p, m in zip(prompts, made, strict=True)]
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        tokens[row, len(text) :] = 7  # what lies beyond the length must not matter
    length = torch.tensor([len(t) for t in texts])
    return Context(tokens, length, int(length.max()), torch.zeros(len(texts)), None), texts


SETTINGS = [
    SamplingParams(logit_bias={3: 1.5, 5: -100.0}),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=0.4, presence_penalty=0.3),
    SamplingParams(no_repeat_ngram_size=2),
    SamplingParams(no_repeat_ngram_size=3, repetition_penalty=0.8),
    SamplingParams(no_repeat_ngram_size=1),
    SamplingParams(min_new_tokens=5),
    SamplingParams(),
]


def reference(how, prompt, text, logits):
    """The law's logits after `text`, from transformers' processors and the definitions."""
    scores, ids = logits[None].clone(), torch.tensor([text])
    if how.logit_bias:
        bias = {(t,): v for t, v in how.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if how.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(ids, scores)
    for token in range(VOCAB):
        times = text[len(prompt) :].count(token)
        scores[0, token] -= how.frequency_penalty * times
        scores[0, token] -= how.presence_penalty * (times > 0)
    if how.no_repeat_ngram_size:
        scores = NoRepeatNGramLogitsProcessor(how.no_repeat_ngram_size)(ids, scores)
    if how.min_new_tokens:
        rule = MinNewTokensLengthLogitsProcessor(len(prompt), how.min_new_tokens, [2, 4])
        scores = rule(ids, scores)
    return scores[0]


@pytest.mark.parametrize("as_processors", [False, True], ids=["native", "processors"])
def test_every_node_is_shaped_by_its_own_prefix(as_processors):
    random = torch.Generator().manual_seed(0)
    rows = len(SETTINGS)
    prompts = [torch.randint(0, VOCAB, (2 + r,), generator=random).tolist() for r in range(rows)]
    made = [torch.randint(0, 6, (9 - r,), generator=random).tolist() for r in range(rows)]
    context, texts = context_of(prompts, made)
    tree = from_parents([-1, 0, 0, 1, 1, 2, 3, 5])
    nodes = torch.randint(0, 6, (rows, tree.nodes), generator=random)
    nodes[:, 0] = torch.tensor([t[-1] for t in texts])
    logits = torch.randn(rows, tree.nodes, VOCAB, generator=random)
    settings = SETTINGS
    if as_processors:

        def rule(how, prompt):
            def process(ids, scores):
                return torch.stack(
                    [
                        reference(how, prompt, text.tolist(), row)
                        for text, row in zip(ids, scores, strict=True)
                    ]
                )

            return SamplingParams(processors=(process,))

        settings = [rule(how, p) for how, p in zip(SETTINGS, prompts, strict=True)]
    stops = [[] if as_processors else [2, 4]] * rows  # processors see no text behind a stop token
    built = logits_processors.build(settings, prompts, stops, VOCAB, "cpu")
    shaped = logits_processors.apply(logits, built, context, nodes, tree)
    levels = torch.cat(
        [
            logits_processors.apply(
                logits[:, start:stop],
                built,
                context,
                nodes[:, :stop],
                tree,
                start,
                torch.ones(rows, stop - start, dtype=torch.bool),
            )
            for start, stop in itertools.pairwise(tree.levels)
        ],
        1,
    )
    for row, how in enumerate(SETTINGS):
        banned = set()  # behind a token of no probability processors are not asked
        for node in range(tree.nodes):
            path = tree.ancestors_BNN[0, node].nonzero()[:, 0]
            text = texts[row][:-1] + nodes[row, path].tolist()
            want = reference(how, prompts[row], text, logits[row, node])
            parent = int(tree.parent_BN[0, node])
            if node and (parent in banned or shaped[row, parent, nodes[row, node]] == -torch.inf):
                banned.add(node)
            if not (as_processors and node in banned):
                torch.testing.assert_close(shaped[row, node], want)
            torch.testing.assert_close(levels[row, node], want)


def test_rows_without_parameters_pay_nothing():
    assert (
        logits_processors.build([SamplingParams(0.5, top_k=3)], [[1]], [[]], VOCAB, "cpu") is None
    )


def test_native_parameters_read_nothing_from_the_device():
    prompts, rows = [[1, 2, 3]] * 2, 2
    how = [
        SamplingParams(0, logit_bias={1: 1.0}, repetition_penalty=1.2),
        SamplingParams(min_new_tokens=2),
    ]
    how[1] = SamplingParams(
        min_new_tokens=2, no_repeat_ngram_size=2, frequency_penalty=1, presence_penalty=1
    )
    built = logits_processors.build(how, prompts, [[2]] * rows, VOCAB, "cpu")
    built = built._replace(
        **{k: v.to("meta") for k, v in built._asdict().items() if isinstance(v, torch.Tensor)}
    )
    context, _ = context_of(prompts, [[4]] * 2)
    context = Context(*(c.to("meta") if isinstance(c, torch.Tensor) else c for c in context))
    tree = branching((2, 1), torch.device("meta"))
    shaped = logits_processors.apply(
        torch.zeros(2, tree.nodes, VOCAB, device="meta"),
        built,
        context,
        torch.zeros(2, tree.nodes, dtype=torch.int64, device="meta"),
        tree,
    )
    assert shaped.shape == (2, tree.nodes, VOCAB)


class Counting(LogitsProcessor):
    """Counts its calls: replaying it at tree nodes gives other scores."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls * (torch.arange(scores.shape[1]) == 3)


class Following(LogitsProcessor):
    """Advances its own state by the last token, as incremental grammar matchers do."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(int(input_ids[0, -1]))
        return scores - len(set(self.seen))


class Marked(LogitsProcessor):
    replayable = False

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize("kind", [Counting, Following, Marked])
def test_a_processor_that_cannot_be_replayed_is_refused_by_name(kind):
    target = adapt(build(FAMILIES["Llama"]()))
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} cannot be replayed"):
        Engine(target, Root()).run(
            [[5, 6]], SamplingParams(0, processors=(kind(),)), StopConditions(4)
        )


def test_the_test_for_silence_is_refused_with_what_to_do():
    target, silence = adapt(build(FAMILIES["Llama"]())), WhisperNoSpeechDetection(3, 1)
    with pytest.raises(ConfigurationError, match=r"cannot be replayed .*no_speech_threshold=None"):
        Engine(target, Root()).run(
            [[5, 6]], SamplingParams(0, processors=(silence,)), StopConditions(4)
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("nan")),
        ("min_new_tokens", -1),
        ("no_repeat_ngram_size", 1.5),
        ("processors", (3,)),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=field):
        SamplingParams(**{field: value})


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigurationError, match="token 97, outside the vocabulary of 97"):
        Engine(adapt(build(FAMILIES["Llama"]())), Root()).run(
            [[5]], SamplingParams(0, logit_bias={97: 1.0}), StopConditions(4)
        )


class Grammar(LogitsProcessor):
    """Only texts of a small JSON language may follow the prompt: {"k":[d,d,...]} with digits d.

    Token ids: 10 {   11 }   12 "   13 k   14 :   15 [   16 ]   17 ,   20-29 digits   2 end.
    """

    def __init__(self, prompt):
        self.prompt = prompt

    def __call__(self, input_ids, scores):
        out = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(input_ids.tolist()):
            allowed = self.allowed(text[self.prompt :])
            out[row, allowed] = scores[row, allowed]
        return out

    def allowed(self, made):
        start = [10, 12, 13, 12, 14, 15]
        if len(made) < len(start):
            if made != start[: len(made)]:
                raise ValueError(f"not in the language: {made}")
            return [start[len(made)]]
        last = made[-1]
        digits = list(range(20, 30))
        follow = {15: [*digits, 16], 17: digits, 16: [11], 11: [2]}  # nothing after the stop
        if last in digits:
            return [17, 16]
        if last not in follow:
            raise ValueError(f"not in the language: {made}")
        return follow[last]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_on_chains_trees_and_copies(temperature):
    """Same text as plain decoding with shared noise; the strict grammar never sees a bad text."""
    model = build(FAMILIES["Llama"]())
    target, draft = adapt(model), adapt(build(FAMILIES["Llama"](), seed=5))
    prompts = [
        [50, 51, 52, 10, 12, 13, 12, 14, 15, 21, 17, 22, 17, 23, 16, 60],
        [44, 45],
        [46, 2],  # rows end one by one and stay for a while; a prompt may end with a stop token
    ]
    every = range(len(prompts))
    how = [
        SamplingParams(temperature, seed=s, processors=(Grammar(len(prompts[s])),)) for s in every
    ]
    drafters = [
        Root(),
        DraftModel(draft, (1, 1, 1), shared_noise=True),
        DraftModel(draft, (3, 2), shared_noise=True),
        PromptLookup(4),
    ]
    texts = []
    for drafter in drafters:
        out = [[] for _ in every]
        run = Engine(target, drafter, verifiers.get("match")).run(
            prompts, how, StopConditions(24, (2,))
        )
        for block in run:
            out[block.request_id] += block.token_ids
        texts.append(out)
        for row in every:
            for end in range(len(out[row])):
                assert out[row][end] in Grammar(0).allowed(out[row][:end])
    assert texts[1:] == texts[:1] * 3


EVERYTHING = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 6,
    "logit_bias": {9: 2.0, 11: -3.0},
}


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2), (3,)])
def test_coupled_text_with_every_parameter_equals_plain_decoding(shape):
    target = adapt(build(FAMILIES["Qwen3"]()))
    draft = adapt(build(FAMILIES["Qwen3"]()))
    prompts = [[5, 6, 7, 5, 6], [9], [3, 4, 5, 6, 7, 8, 9, 10], [1, 50, 7]]
    rules = Timestamps(no_timestamps_id=60, end_id=2, max_initial=9)
    how = [
        SamplingParams(0.9, top_p=0.9, seed=1, **EVERYTHING),
        SamplingParams(0, **EVERYTHING),
        SamplingParams(1.2, min_p=0.02, seed=3, repetition_penalty=1.5),
        SamplingParams(
            1.5, seed=4, timestamps=rules, begin_suppress_tokens=(61,), forced_eos_token_id=2
        ),
    ]

    def text(drafter):
        out = [[], [], [], []]
        run = Engine(target, drafter, verifiers.get("match")).run(
            prompts, how, StopConditions(20, (2,))
        )
        for block in run:
            out[block.request_id] += block.token_ids
        return out, run.stats

    plain, _ = text(Root())
    for drafter in (DraftModel(draft, shape, shared_noise=True), PromptLookup(3)):
        fast, stats = text(drafter)
        assert fast == plain
        if drafter.name == "draft_model":
            assert stats.accepted == stats.steps * len(shape)  # same model, same shaping


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafted", [(1, 1), (2, 2)])
def test_the_law_with_penalties_is_exact(drafted):
    """Three tokens of V = 8 against exact enumeration; the draft is another model."""
    from families import based

    vocab, count = 8, 6000
    config = based("llama", vocab_size=vocab)
    model, other = build(config, seed=1), build(config, seed=2)
    prompt = [3, 4, 5, 3]
    how = SamplingParams(
        0.9, top_k=5, repetition_penalty=1.4, no_repeat_ngram_size=2, presence_penalty=0.5
    )
    expected = {}
    for text in itertools.product(range(vocab), repeat=3):
        chance = 1.0
        for step in range(3):
            ids = torch.tensor([[*prompt, *text[:step]]])
            with torch.no_grad():
                row = model(ids).logits[:, -1]
            row = RepetitionPenaltyLogitsProcessor(1.4)(ids, row)
            for token in set(text[:step]):
                row[0, token] -= 0.5
            row = NoRepeatNGramLogitsProcessor(2)(ids, row)[0] / 0.9
            row[row < row.topk(5).values[-1]] = -torch.inf
            chance *= float(row.softmax(-1)[text[step]])
            if chance == 0:
                break
        if chance:
            expected[text] = chance
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    engine = Engine(adapt(model), DraftModel(adapt(other), drafted))
    seen = dict.fromkeys(expected, 0)
    for batch in range(count // 500):
        settings = [
            SamplingParams(**{**vars(how), "seed": 500 * batch + row}) for row in range(500)
        ]
        out = [[] for _ in range(500)]
        for block in engine.run([prompt] * 500, settings, StopConditions(3)):
            out[block.request_id] += block.token_ids
        for text in out:
            seen[tuple(text)] += 1
    rare = [t for t in expected if expected[t] * count < 5]
    groups = [([t], expected[t]) for t in expected if t not in rare]
    groups.append((rare, sum(expected[t] for t in rare)))
    statistic = sum(
        (sum(seen[t] for t in members) - count * p) ** 2 / (count * p)
        for members, p in groups
        if p > 0
    )
    from scipy.stats import chi2

    assert chi2.sf(statistic, len(groups) - 1) > 1e-3


def test_transformers_processors_and_prefix_functions_work_per_row():
    target = adapt(build(FAMILIES["Llama"]()))

    def allowed(row, text):
        return [20 + row, 30 + row, 40 + row]

    both = (
        PrefixConstrainedLogitsProcessor(allowed, num_beams=1),
        LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)]),
    )
    run = Engine(target, DraftModel(target, (2, 1))).run(
        [[5], [6, 7]], SamplingParams(1, seed=0, processors=both), StopConditions(9)
    )
    for block in run:
        assert {token % 10 for token in block.token_ids} == {block.request_id}
    assert chain(1).nodes == 2
