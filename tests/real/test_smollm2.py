"""SmolLM2-135M-Instruct in float32: chats, greedy text, rows that come and go, coupled seeds.

The folder `smollm2` of OUTRIDER_MODELS. Budgets are short: a minute on one core.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import (
    DraftModel,
    EngineRun,
    PromptLookup,
    Request,
    Root,
    SamplingParams,
    Stop,
    StopConditions,
)
from outrider.drafters import DrafterParts, make
from outrider.text.output_text import IncrementalText, Stream

pytestmark = pytest.mark.real

LINE = "red apples, green apples, red apples, green pears"
CHAT = [{"role": "user", "content": f"Repeat this line three times: {LINE}"}]
GREEDY, BUDGET = SamplingParams(temperature=0), 24
PROMPTS = [
    "The capital of France is",
    "def add(a, b):\n    return",
    f"{LINE}, {LINE},",
    "One, two, three, four, five, six,",
    "Water boils at a temperature of",
    "Once upon a time there was",
]
SETTINGS = [
    GREEDY,
    SamplingParams(0.8, seed=1),
    GREEDY,
    GREEDY,
    SamplingParams(1.0, top_p=0.9, seed=2),
    GREEDY,
]
BUDGETS = [6, 14, 16, 20, 9, 12]
CANCELLED, STOPPED = 1, 3


@pytest.fixture(scope="module")
def speculator(smollm2):
    """Eight tokens ahead, whatever they cost: the planner may well rest in texts so short."""
    how = {"num_speculative_tokens": 8, "dtype": "float32", "threads": 1, "pack_weights": False}
    return outrider.load(smollm2, drafter="prompt_lookup", **how)


@pytest.fixture(scope="module")
def chat(smollm2):
    """The conversation's token ids, by transformers' own means."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_greedy_text_of_a_chat_is_plain_decodings_and_transformers(speculator, chat, smollm2):
    stop = Stop(BUDGET)
    result = speculator.generate(CHAT, GREEDY, stop)
    (completion,) = result.completions
    assert result.stats.prompt_tokens == len(chat)
    assert (
        completion.token_ids
        == speculator.plain().generate([chat], GREEDY, stop).completions[0].token_ids
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = torch.tensor([chat])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=BUDGET
    )
    assert completion.token_ids == expected[0, len(chat) :].tolist()
    assert completion.stats.accepted > 3  # it repeats the line: less is no speculation


def test_rows_that_join_are_cancelled_or_stop_have_the_text_of_the_row_alone(speculator):
    engine, tokenizer = speculator.engine, speculator.tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    requests = [
        Request(prompt, how, StopConditions(budget, speculator.eos_ids))
        for prompt, how, budget in zip(prompts, SETTINGS, BUDGETS, strict=True)
    ]
    rule = "match"  # a request's text is then its seed's, whoever else is sampled
    engine = outrider.Engine(engine.target, engine.drafter, rule)
    alone = []
    for request in requests:
        run = EngineRun(engine, 1, 128)
        run.submit(request)
        run.close()
        alone.append([token for block in run for token in block.token_ids])
    word = tokenizer.decode(alone[STOPPED][6:9])  # three tokens of its text end it

    stops = [Stop(budget, (word,) if row == STOPPED else ()) for row, budget in enumerate(BUDGETS)]
    run = EngineRun(engine, 3, 128)
    run.submit_all(requests[:4])
    each = zip(stops, prompts, strict=True)
    answers = [IncrementalText(tokenizer, stop, ids, speculator.eos_ids) for stop, ids in each]
    stream = Stream(run, answers)
    for number, block in enumerate(stream):
        if number == 2:
            assert run.submit_all(requests[4:]) == [4, 5]
            run.close()
        if block.request_id == CANCELLED and run.reasons[CANCELLED] is None:
            run.end(CANCELLED)
    done = stream.result().completions
    for row, (completion, text) in enumerate(zip(done, alone, strict=True)):
        if row not in (CANCELLED, STOPPED):
            assert completion.token_ids == text
            assert completion.finish_reason in ("length", "stop")
    assert done[CANCELLED].finish_reason == "cancelled"
    told = done[CANCELLED].token_ids
    assert 0 < len(told) < len(alone[CANCELLED])
    assert told == alone[CANCELLED][: len(told)]
    assert done[STOPPED].finish_reason == "stop"
    whole = tokenizer.decode(alone[STOPPED])
    assert done[STOPPED].text == whole[: whole.index(word)]
    assert len(done[STOPPED].token_ids) < len(alone[STOPPED])


def test_a_coupled_seeded_text_is_the_same_for_two_drafters(speculator, chat):
    how, stop = SamplingParams(0.9, seed=7), Stop(16)
    target = speculator.engine.target
    drafters = [PromptLookup(4), DraftModel(target, (1, 1, 1), shared_noise=True)]
    expected = speculator.plain(shared_noise=True).generate([chat], how, stop)
    for drafter in drafters:
        result = speculator.using(drafter, "match").generate([chat], how, stop)
        assert result.completions[0].token_ids == expected.completions[0].token_ids
    assert result.stats.accepted > 4  # the target as its own drafter, with its own noise


@pytest.mark.parametrize("name", ["suffix", "recall"])
def test_copies_and_likely_tokens_leave_the_text_as_it_is(speculator, name):
    tokenizer = speculator.tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    stops = [Stop(budget) for budget in BUDGETS]
    seeded = [replace(how, seed=how.seed or 9) for how in SETTINGS]
    drafter = make(name, DrafterParts(target=speculator.engine.target))
    for rows in (range(1), range(6)):  # alone and beside others
        asked = [[each[row] for row in rows] for each in (prompts, seeded, stops)]
        plain = speculator.using(Root(), "match").generate(*asked)
        found = speculator.using(drafter, "match").generate(*asked)
        for ours, theirs in zip(found.completions, plain.completions, strict=True):
            assert ours.token_ids == theirs.token_ids
    assert found.stats.accepted > 12  # lists of apples and numbers go on as they did


def test_nobody_has_to_name_a_drafter(smollm2):
    loaded = outrider.load(smollm2, dtype="float32", threads=1, pack_weights=False)
    assert loaded.engine.drafter.name == "recall"
    prompt = f"{LINE}, {LINE},"
    result = loaded.generate(prompt, GREEDY, Stop(BUDGET))
    assert result.completions[0].token_ids == (
        loaded.plain().generate(prompt, GREEDY, Stop(BUDGET)).completions[0].token_ids
    )
    assert result.stats.engine_steps < BUDGET
