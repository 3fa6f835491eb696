"""The suffix automaton against its specification, and the drafter that copies by it."""

import random
import tracemalloc

import pytest
import torch

from outrider import (
    Engine,
    EngineRun,
    PromptLookup,
    Root,
    SamplingParams,
    StopConditions,
    verifiers,
)
from outrider.drafters import Recall, Suffix, automaton, deterministic_tree
from outrider.drafters.automaton import Automaton
from outrider.drafters.memory import NoMemory
from outrider.drafters.tree_drafting import bare
from outrider.engine.request import Request
from outrider.engine.step import run_kernel
from outrider.errors import ConfigurationError
from outrider.sampling import sampling_params
from outrider.types import Context, DrawKind, Draws, Laws, Scores, Verdict
from tiny import PROMPTS, decode, pair


def longest_match(tokens):
    """The specification: the longest suffix that stands in the text before, by comparison."""
    for size in range(len(tokens) - 1, 0, -1):
        tail = list(tokens[-size:])
        if any(list(tokens[at : at + size]) == tail for at in range(len(tokens) - size)):
            return size
    return 0


def context(texts):
    width = max(map(len, texts))
    padded = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    rows = sampling_params.rows([SamplingParams(0)] * len(texts), torch.device("cpu"))
    return Context(padded, torch.tensor([len(text) for text in texts]), width, rows)


def proposed(drafter, texts, memory=None):
    """What each row is offered."""
    rows = context(texts)
    memory = drafter.open(rows, 64) if memory is None else memory
    draft = drafter.propose(memory, rows, drafter.shapes[0])
    counts = (draft.draws_BNK.expand(len(texts), -1, -1) >= 0).sum((1, 2)).tolist()
    tokens = draft.tokens_BN[:, 1:].tolist()
    return [row[:count] for row, count in zip(tokens, counts, strict=True)]


def told(drafter, memory, rows, tokens):
    """A plain step of one row that emitted this token."""
    none = torch.zeros(1, 0, dtype=torch.int64)
    verdict = Verdict(none, torch.tensor([0]), torch.tensor([tokens]))
    drafter.commit(memory, rows, bare(rows), verdict, None)


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_suffix_that_stood_before_is_known_after_every_token(seed):
    draws = random.Random(seed)
    letters, text, automaton = draws.choice([2, 3, 6]), [], Automaton()
    for _ in range(draws.randrange(2, 60)):
        token = draws.randrange(letters)
        text.append(token)
        automaton.push(token)
        size, place = automaton.match, automaton.place
        assert size == longest_match(text)
        assert not size or (place < len(text) and text[place - size : place] == text[-size:])


def test_a_text_that_was_copied_goes_on_alone():
    first = Automaton([1, 2, 3, 1, 2])
    second = first.copy()
    first.push(3)
    second.push(9)
    assert (first.match, second.match) == (3, 0)
    assert (len(first.tokens), first.tokens[-1], second.tokens[-1]) == (6, 3, 9)


def test_a_token_costs_no_more_than_a_kilobyte_and_two_states():
    draws = random.Random(0)
    text = [int(200 * draws.random() ** 3) for _ in range(8000)]
    tracemalloc.start()
    automaton = Automaton(text)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1024 * len(text)
    assert len(automaton._next) <= 2 * len(text)


def test_the_copy_behind_the_longest_match_is_proposed_and_goes_on_with_itself():
    assert proposed(Suffix(3), [[1, 2, 3, 4, 5, 9, 3, 7, 8, 1, 2, 3]]) == [[4, 5, 9]]
    assert proposed(Suffix(5), [[4, 7, 7], [1, 2, 1, 2], [1, 2, 3]]) == [
        [7, 7, 7, 7, 7],
        [1, 2, 1, 2, 1],
        [],
    ]


def test_a_device_compares_the_text_with_itself():
    text = [1, 2, 3, 4, 5, 9, 3, 7, 8, 1, 2, 3]
    assert proposed(Suffix(3), [text], NoMemory()) == [[4, 5, 9]]


def calls(drafter, prompt, text):
    """Target calls until a target that writes `text` has written it."""
    done, count, memory = list(prompt), 0, drafter.open(context([prompt]), 64)
    whole = [*prompt, *text]
    while len(done) < len(whole):
        rows = context([done])
        draft = drafter.propose(memory, rows, drafter.shapes[0])
        offer, rest = draft.tokens_BN[0, 1:].tolist(), whole[len(done) :]
        kept = 0
        while kept < min(len(offer), len(rest) - 1) and offer[kept] == rest[kept]:
            kept += 1
        path = [*range(1, kept + 1), *[-1] * (draft.tree.max_depth - kept)]
        verdict = Verdict(
            torch.tensor([path]).view(1, -1).long(),
            torch.tensor([kept]),
            torch.tensor([rest[kept]]),
        )
        drafter.commit(memory, rows, draft, verdict, None)
        done += rest[: kept + 1]
        count += 1
    return count


def test_no_more_calls_than_prompt_lookup_where_text_repeats():
    draws = random.Random(1)
    words = [[draws.randrange(50) for _ in range(draws.randrange(2, 9))] for _ in range(12)]
    text = [token for _ in range(60) for token in draws.choice(words)]
    assert calls(Suffix(8), text[:20], text[20:]) <= calls(PromptLookup(8), text[:20], text[20:])


def test_what_a_copy_is_worth_is_learnt_from_tokens_that_nobody_drafted():
    drafter, text = Suffix(4), [1, 2, 3, 1]
    right, wrong = drafter.open(context([text]), 64), drafter.open(context([text]), 64)
    before = drafter.foresee(right, context([text]))
    for step in range(30):
        told(drafter, right, context([text]), (2, 3, 1)[step % 3])  # goes on as it did
        told(drafter, wrong, context([text]), 4 + step)  # never
    for step in range(3):  # both repeat themselves now
        told(drafter, wrong, context([text]), 4 + step)
    assert drafter.foresee(right, context([text]))[0][4] > 3.5 > before[0][4]
    assert right.rows[0].odds.chance(0) != wrong.rows[0].odds.chance(0)


def test_a_row_foresees_nothing_of_another():
    drafter, texts = Suffix(4), [[1, 2, 1], [5, 6, 5]]
    both, alone = drafter.open(context(texts), 64), drafter.open(context(texts[1:]), 64)
    none = torch.zeros(2, 0, dtype=torch.int64)
    for step in range(20):
        verdict = Verdict(none, torch.zeros(2).long(), torch.tensor([2 - step % 2, 6 - step % 2]))
        drafter.commit(both, context(texts), bare(context(texts)), verdict, None)
        told(drafter, alone, context(texts[1:]), 6 - step % 2)
    foreseen = drafter.foresee(both, context(texts))
    assert foreseen[1] == drafter.foresee(alone, context(texts[1:]))[0]


def test_earlier_texts_are_copied_and_change_no_text():
    target = pair()[0]
    drafter = Suffix(6, earlier=200)
    engine = Engine(target, drafter)
    how = SamplingParams(0.9, seed=3)
    plain, _ = decode(Engine(target, Root(), "match"), PROMPTS[:1], [how], StopConditions(24))
    counts = []
    for _ in range(2):
        run = EngineRun(engine, 1, 128)
        run.submit(Request(PROMPTS[0], how, StopConditions(24)))
        run.close()
        text = [token for block in run for token in block.token_ids]
        assert text == plain[0]
        counts.append(run.requests[0].steps)
    assert counts[1] < counts[0]  # the same request again: it copies its own answer


@pytest.mark.parametrize("name", ["suffix", "recall"])
@pytest.mark.parametrize("tokens", [5, 60], ids=["a row moves", "nobody moves"])
def test_rows_that_move_are_learnt_from_to_their_end(name, tokens):
    drafter = {"suffix": Suffix(8, earlier=9999), "recall": Recall(8, earlier=9999)}[name]
    run = EngineRun(Engine(pair(0.4)[0], drafter, "match"), 2, 128)
    for seed, most in enumerate((tokens, 60)):
        run.submit(Request(PROMPTS[seed], SamplingParams(1.0, seed=seed), StopConditions(most)))
    while not run.done:
        run.step()
    known = [token for token in drafter._earlier.begun().tokens if token >= 0]
    assert 0 <= len(known) - tokens - 60 < 16  # a step's last tokens may lie behind the budget


def test_only_matching_rules_verify_copies_of_earlier_texts():
    assert verifiers.default(Suffix(4, earlier=8).kinds).name == "match"
    with pytest.raises(ConfigurationError, match="cannot verify"):
        Engine(pair()[0], Suffix(4, earlier=8), "rejection")
    Engine(pair()[0], Suffix(4), "rejection")


def first_tokens(rule, seeds, copied):
    """What a rule emits first for each seed, with what it emitted before on offer."""
    law = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    tokens = []
    for seed in range(seeds):
        draws = Draws(torch.tensor([seed]), torch.tensor([4]))
        token = 0
        for draft in ([1], [1, None])[: 1 + copied]:
            draft = deterministic_tree.chains(
                [[token if t is None else t for t in draft]], DrawKind.FIXED
            )
            rows = law.log().expand(1, draft.tree.nodes, 4)
            verdict = run_kernel(rule, draft, Scores(Laws(rows, torch.ones(1))), draws)
            kept = int(verdict.count_B) > 0
            token = int(draft.tokens_BN[0, 1]) if kept else int(verdict.next_B)
        tokens.append(token)
    counts = torch.bincount(torch.tensor(tokens), minlength=4).double()
    return tokens, float((counts / seeds - law).abs().sum() / 2)


def test_why_a_rule_of_chance_must_not_verify_them():
    """A copy of the text with the same seed has seen the noise that verifies it."""
    rejection, match = verifiers.get("rejection"), verifiers.get("match")
    _, right = first_tokens(rejection, 900, copied=False)
    _, wrong = first_tokens(rejection, 900, copied=True)
    assert right < 0.04 < 0.06 < wrong
    assert first_tokens(match, 200, copied=True) == first_tokens(match, 200, copied=False)


def test_earlier_texts_are_bounded_and_kept_apart():
    kept = automaton.RequestHistory(10)
    for number in range(12):
        text = kept.begun()
        kept.watch(text)
        for token in (100 + number, 7, 8):
            text.push(token)
    begun = kept.begun()
    assert len(begun.tokens) <= 24
    assert all(x < 0 for at, x in enumerate(begun.tokens) if begun.tokens[at - 1 : at] == [8])
    drafter = Suffix(6, earlier=100)
    memory = drafter.open(context([[1, 2, 3]]), 64)
    told(drafter, memory, context([[1, 2, 3]]), 4)
    told(drafter, memory, context([[1, 2, 3]]), 5)
    assert proposed(drafter, [[9, 4]]) == [[5]]  # and not what separates it from this text


def test_of_a_text_that_is_over_its_tokens_alone_are_kept():
    """States of what stood before it and of itself: some hundred bytes a token of both."""
    kept, states = automaton.RequestHistory(500), []
    tracemalloc.start()
    for number in range(20):
        text = kept.begun()
        kept.watch(text)
        for token in range(400):
            text.push(token * (number + 1) % 397)
        states.append(len(text._next))
        del text
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept._watched) == 20
    assert used < 100 * sum(states)


def test_earlier_texts_need_a_host():
    rows = context([[1, 2]])
    away = rows._replace(length_B=rows.length_B.to("meta"))
    with pytest.raises(ConfigurationError, match="leave earlier out"):
        Suffix(4, earlier=8).open(away, 64)
