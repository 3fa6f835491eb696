"""The engine emits what plain decoding emits, whatever drafts, in whatever batch."""

from functools import lru_cache

import pytest
import torch

from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions, ops, verifiers
from tiny import DRAFTERS, MODELLESS, PROMPTS, TRANSLATED, decode, llama, pair

LENGTH = 64
SHARED = (
    "prompt_lookup",
    "reference_lookup",
    "coupled chain",
    "coupled tree",
    "dynamic tree",
    "coupled dynamic tree",
)


def plain(prompts, sampling, length=LENGTH, rule=None):
    """Row by row, one token a step."""
    target, _ = pair()
    engine = Engine(target, Root(), rule)
    return [decode(engine, [p], sampling, StopConditions(length))[0][0] for p in prompts]


def test_plain_decoding_is_the_argmax_of_transformers():
    model = llama()
    for prompt, text in zip(PROMPTS, plain(PROMPTS, SamplingParams(0), 24), strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(24):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert text == ids[len(prompt) :]


@lru_cache
def greedy():
    return plain(PROMPTS, SamplingParams(0))


def everywhere():
    """Every drafter with our forward; by default a few of them with transformers' own, too."""
    for name in DRAFTERS:
        yield pytest.param(name, "lean", id=f"{name}-lean")
        marks = [] if name in ("chain", *SHARED) else [pytest.mark.slow]
        yield pytest.param(name, "transformers", id=f"{name}-transformers", marks=marks)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "runner"), list(everywhere()))
def test_greedy_text_is_plain_decodings(name, runner):
    target, small = pair(runner=runner)
    engine = Engine(target, DRAFTERS[name](small))
    expected = greedy()
    assert decode(engine, PROMPTS, SamplingParams(0), StopConditions(LENGTH))[0] == expected
    alone, run = decode(engine, PROMPTS[:1], SamplingParams(0), StopConditions(LENGTH))
    assert alone == expected[:1]
    if ("chain" in name or "tree" in name) and name not in (*MODELLESS, *TRANSLATED):
        assert run.stats.mean_acceptance_length > 1.3


@pytest.mark.one_in(6)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", SHARED)
def test_coupled_text_depends_on_the_seed_alone(name, temperature):
    target, small = pair(0.06)
    match = verifiers.get("match")
    engine = Engine(target, DRAFTERS[name](small), match)
    rows = [SamplingParams(temperature, seed=100 + i) for i in range(len(PROMPTS))]
    expected = [
        decode(Engine(target, Root(), match), [p], s, StopConditions(LENGTH))[0][0]
        for p, s in zip(PROMPTS, rows, strict=True)
    ]
    together, run = decode(engine, PROMPTS, rows, StopConditions(LENGTH))
    assert together == expected
    alone = [
        decode(engine, [p], s, StopConditions(LENGTH)) for p, s in zip(PROMPTS, rows, strict=True)
    ]
    assert [text[0] for text, _ in alone] == expected
    if "coupled" in name:  # else the test would show nothing
        assert run.stats.mean_acceptance_length > 1.3
        assert all(one.stats.mean_acceptance_length > 1.3 for _, one in alone)


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_match_keeps_the_text_even_for_drafts_with_noise_of_their_own(name):
    target, small = pair(0.06)
    match = verifiers.get("match")
    sampling = SamplingParams(1.0, seed=5)
    text, run = decode(Engine(target, DRAFTERS[name](small), match), [PROMPTS[0]], sampling)
    assert text == decode(Engine(target, Root(), match), [PROMPTS[0]], sampling)[0]
    assert run.stats.accepted > 0


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0), SamplingParams(1.0, seed=3), SamplingParams(0.7, 5, seed=3)]
)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 1, 1), (3,)])
def test_the_target_as_its_own_drafter_is_always_accepted(counts, sampling):
    target, _ = pair()
    depth = len(counts)
    engine = Engine(target, DraftModel(target, counts))
    _, run = decode(engine, PROMPTS, sampling, StopConditions(12 * (depth + 1)))
    assert run.stats.block_efficiency == depth + 1
    assert all(request.block_efficiency == depth + 1 for request in run.requests)
    assert run.stats.mean_acceptance_length == depth + 1


@pytest.mark.parametrize("name", SHARED)
def test_greedy_and_sampled_rows_mix(name):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small), verifiers.get("match"))
    rows = [
        SamplingParams(0),
        SamplingParams(1.0, seed=1),
        SamplingParams(0.7, top_k=8, seed=2),
        SamplingParams(0),
        SamplingParams(0.9, top_p=0.8, min_p=0.02, seed=3),
    ]
    mixed, _ = decode(engine, PROMPTS, rows, StopConditions(32))
    match = verifiers.get("match")
    for prompt, sampling, text in zip(PROMPTS, rows, mixed, strict=True):
        assert (
            text
            == decode(Engine(target, Root(), match), [prompt], sampling, StopConditions(32))[0][0]
        )


@pytest.mark.parametrize("name", ["chain", "tree", "beam", "paths"])
def test_greedy_rows_stay_greedy_beside_sampled_ones_under_the_default_rule(name):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    rows = [
        SamplingParams(0),
        SamplingParams(1.0, seed=1),
        SamplingParams(0),
        SamplingParams(0.5, seed=2),
        SamplingParams(0),
    ]
    mixed, run = decode(engine, PROMPTS, rows, StopConditions(32))
    assert run.rule.exact
    assert run.rule.name != "match"
    expected = plain(PROMPTS, SamplingParams(0), 32)
    for number in (0, 2, 4):
        assert mixed[number] == expected[number]


#: By default a few of them with the reference's operations, too.
OPERATIONS = [
    pytest.param(name, ops_of, marks=[] if ops_of is None or name in SHARED else [pytest.mark.slow])
    for name in DRAFTERS
    for ops_of in (None, "reference")
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "implementation"), OPERATIONS)
def test_a_row_does_not_depend_on_its_neighbours(name, implementation):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    first, how, others = PROMPTS[0], SamplingParams(0.9, seed=10), PROMPTS[1:]
    neighbours = (
        [SamplingParams(1.0, seed=11)],
        [SamplingParams(0)],
        [SamplingParams(1.0, top_p=0.8, seed=1), SamplingParams(0, repetition_penalty=1.3)],
    )
    with ops.use(implementation):
        alone, _ = decode(engine, [first], how, StopConditions(12))
        for rows in neighbours:
            prompts = [first, *others[: len(rows)]]
            together, _ = decode(engine, prompts, [how, *rows], StopConditions(12))
            assert together[0] == alone[0]


def test_every_seed_gives_its_own_text_and_gives_it_again():
    target, small = pair()
    engine = Engine(target, DraftModel(small, (1, 1, 1)))
    texts = [
        decode(engine, [PROMPTS[0]], SamplingParams(seed=seed))[0] for seed in (1, 2, 1, 2**64 - 1)
    ]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
    assert texts[1] != texts[3]
