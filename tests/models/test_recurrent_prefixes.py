"""Models with states: prompts that begin alike go on from checkpoints, and texts go on."""

import pytest
import torch
from recurrent_models import made, perturbed

from outrider import SamplingParams, StopConditions, verifiers
from outrider.drafters import DraftModel, Root
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.models import TreeDecoder, runner_of
from outrider.models.prefill import ingest
from outrider.models.prefix_cache import CHECKPOINTS, LINE, PrefixCache

MEGABYTE = 1 << 20
KINDS = [  # one of each kind of mixer
    "falcon_h1",
    "lfm2",
    "qwen3_5_text",
    *[
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "inkling2_text",
            "jamba",
            "kimi_linear",
            "minimax",
            "qwen4_exp_text",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zaya",
        )
    ],
]
VOCAB = 97


def words(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=random).tolist()


HEAD = words(150)
#: Two that differ behind 150 tokens, one twice, one that goes on, one of another beginning.
PROMPTS = [
    [*HEAD, *words(60, 1)],
    [*HEAD, *words(70, 2)],
    [*HEAD, *words(70, 2)],
    [*HEAD, *words(70, 2), 9, 4],
    words(40, 3),
]


def decoder(model):
    return TreeDecoder(runner_of(model)(model))


def texts(engine, prompts, prefixes, max_num_seqs=2, budget=9, **more):
    """The text of each prompt, and how much of it was copied."""
    run = EngineRun(engine, max_num_seqs, 400, prefixes=prefixes)
    run.submit_all(
        [
            Request(prompt, SamplingParams(0.8, seed=seed), StopConditions(budget), **more)
            for seed, prompt in enumerate(prompts)
        ]
    )
    run.close()
    found = [[] for _ in prompts]
    for block in run:
        found[block.request_id] += block.token_ids
    return found, [run.cached(number) for number in range(len(prompts))]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_go_on_from_checkpoints_and_texts_stay_what_they_are(kind):
    model = made(kind)
    target, draft = decoder(model), decoder(perturbed(model))
    for drafter in (Root(), DraftModel(draft, (2, 2), shared_noise=True)):
        engine = Engine(target, drafter, verifiers.get("match"))
        expected, nothing = texts(engine, PROMPTS, None)
        assert nothing == [0] * len(PROMPTS)
        prefixes = PrefixCache(8 * MEGABYTE)
        found, copied = texts(engine, PROMPTS, prefixes)
        assert found == expected
        assert copied == [0, 128, 192, 192, 0]
        again, copied = texts(engine, PROMPTS, prefixes)
        assert again == expected
        assert copied == [192, 192, 192, 192, 0]


def test_where_a_prompt_goes_on_otherwise_a_checkpoint_is_kept_for_the_next():
    target = decoder(made("lfm2"))
    engine = Engine(target, Root())
    prefixes = PrefixCache(8 * MEGABYTE)
    chats = [[*HEAD, *words(60, seed)] for seed in (1, 2, 3)]
    copied = [texts(engine, [chat], prefixes, budget=1)[1][0] for chat in chats]
    assert copied == [0, 0, 128]  # the second one finds out where it leaves the first one


def test_checkpoints_count_as_memory_and_few_are_kept():
    target = decoder(made("qwen3_5_text"))
    engine = Engine(target, Root())
    prefixes = PrefixCache(64 * MEGABYTE)
    longer, sizes = words(20, 5), []
    for turn in range(CHECKPOINTS + 2):
        longer = [*longer, *words(LINE - 10, turn)]
        texts(engine, [longer], prefixes, budget=1)
        sizes.append(prefixes.bytes)
    assert len(prefixes) == 1
    lines = prefixes.lines(target, longer, None)
    assert len(lines) == CHECKPOINTS + 1
    assert max(lines) == len(longer) // LINE * LINE
    state = sum(log.state[0].nbytes for log in _opened(target, longer).recurrent.logs.values())
    assert sizes[-1] > CHECKPOINTS * state
    small = PrefixCache(state // 2)
    assert texts(engine, [longer] * 2, small, max_num_seqs=1, budget=1)[1] == [0, 0]
    assert small.bytes == len(small) == 0


def _opened(target, text):
    cache, length = target.open(1, 512), torch.tensor([len(text)])
    ingest(target, cache, torch.tensor([text]), len(text), settled_B=length)
    return cache


def test_another_state_is_another_text(monkeypatch):
    """The negative control: who goes on from a state that is not its own writes something else."""
    engine = Engine(decoder(made("falcon_h1")), Root())
    expected, _ = texts(engine, PROMPTS[:1], None)
    prefixes, other = PrefixCache(8 * MEGABYTE), [*words(150, 7), *PROMPTS[0][150:]]
    texts(engine, [other], prefixes)
    monkeypatch.setattr(prefixes, "common", lambda one, known: min(len(one), len(known)))
    found, copied = texts(engine, PROMPTS[:1], prefixes)
    assert copied == [192]
    assert found != expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 30, 50])
def test_a_text_goes_on_where_another_run_has_left_it(kind, cut):
    """As a replica does that is given what one that was killed has written."""
    model = made(kind)
    draft = decoder(perturbed(model))
    target, prompt = decoder(model), words(70, 4)
    rule = verifiers.get("match")
    (whole,), _ = texts(Engine(target, Root(), rule), [prompt], None, budget=60)
    drafted = Engine(target, DraftModel(draft, (2, 2), shared_noise=True), rule)
    prefixes = PrefixCache(8 * MEGABYTE)
    texts(drafted, [prompt], prefixes, budget=1)
    (rest,), (copied,) = texts(
        drafted, [[*prompt, *whole[:cut]]], prefixes, budget=60 - cut, written=cut
    )
    assert rest == whole[cut:]
    assert copied == 64


@torch.inference_mode()
def test_logits_behind_a_place_inside_a_prompt():
    model = made("qwen3_5_text")
    target = decoder(model)
    prompts, places = [words(100), words(30, 1), words(70, 2)], [80, None, 3]
    run = EngineRun(Engine(target, Root()), 3, 200)
    run.submit_all(
        [
            Request(prompt, SamplingParams(0), StopConditions(3), watched=place)
            for prompt, place in zip(prompts, places, strict=True)
        ]
    )
    run.close()
    list(run)
    for number, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        found = run.prompt_logits(number)
        if place is None:
            assert found is None
            continue
        expected = model(input_ids=torch.tensor([prompt])).logits[0, place]
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
