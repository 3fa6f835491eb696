"""What a caller of generate may add: honoured as plain generate does it, or refused by name."""

import copy
from contextlib import nullcontext

import pytest
import torch
from families import FAMILIES, based, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from outrider.errors import ConfigurationError
from outrider.integrations.generate import SpeculativeGenerate, generate, speculative

GREEDY = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def target():
    model = build(FAMILIES["Llama"](), "sdpa")
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    return model


@pytest.fixture(scope="module")
def draft(target):
    """Often of the target's opinion, so that rows of a batch advance at different paces."""
    near = copy.deepcopy(target)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in near.parameters():
            if weight.dim() > 1:
                weight += 0.02 * torch.randn(weight.shape, generator=random)
    return near


def prompts(rows=1, length=8):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(7))


class LastTokens(StoppingCriteria):
    """One bool for the whole batch."""

    def __call__(self, input_ids, scores, **kwargs):
        return int(input_ids[0, -1]) in (19, 74)


class EveryRow(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return bool((input_ids[:, -1] > 20).all())


class OwnLimit(StoppingCriteria):
    """Another limit for each row, by its place in the batch."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 10 + 3 * row for row in range(len(input_ids))])


class Counts(StoppingCriteria):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 5)


class OnScores(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.stack(scores).amax((0, 2)) > 12 - len(scores)


CRITERIA = {
    "a length": lambda: [MaxLengthCriteria(9)],
    "a length beyond the budget": lambda: [MaxLengthCriteria(24)],
    "a length behind the prompt": lambda: [MaxLengthCriteria(3)],
    "an end token": lambda: [EosTokenCriteria(19)],
    "both": lambda: [MaxLengthCriteria(20), EosTokenCriteria([19, 74])],
    "one bool": lambda: [LastTokens()],
    "every row": lambda: [EveryRow()],
    "row by row": lambda: [OwnLimit()],
    "counting": lambda: [Counts()],
    "several": lambda: [OwnLimit(), EveryRow(), MaxLengthCriteria(18)],
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos", [[2, *range(30, 45)], None], ids=["eos", "none"])
@pytest.mark.parametrize("which", CRITERIA)
def test_criteria_of_the_caller_end_what_they_end_in_plain_generate(
    target, draft, which, eos, rows
):
    def called(**more):
        criteria = StoppingCriteriaList(CRITERIA[which]())
        how = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": eos}
        return target.generate(prompts(rows), stopping_criteria=criteria, **how, **more)

    assert torch.equal(called(custom_generate=speculative, draft_model=draft), called())


@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_reads_the_scores(target, draft, rows):
    how = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    how["stopping_criteria"] = StoppingCriteriaList([OnScores()])
    plain = target.generate(prompts(rows), **how)
    fast = target.generate(prompts(rows), custom_generate=speculative, draft_model=draft, **how)
    assert torch.equal(fast.sequences, plain.sequences)
    assert fast.sequences.shape[1] < 28


def test_a_criterion_that_returns_nonsense_is_named(target):
    class Mute(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return None

    with pytest.raises(ConfigurationError, match="stopping criterion Mute must return a bool"):
        target.generate(
            prompts(2),
            custom_generate=speculative,
            stopping_criteria=StoppingCriteriaList([Mute()]),
            **GREEDY,
        )


def mask(*values):
    return {"attention_mask": torch.tensor([values])}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"position_ids": torch.arange(100, 108)[None]}, "position_ids other than 0, 1, 2"),
        ({"position_ids": torch.arange(8)[None] * 2}, "position_ids other than 0, 1, 2"),
        # newer versions of transformers make positions of a mask first
        (mask(1, 1, 1, 1, 1, 1), "attention_mask (as long as the prompt|must hold a 0 or 1)"),
        (mask(0, 1, 1, 1, 1, 1), "attention_mask must hold a 0 or 1 for every token"),
        (mask(0, 0, 2, 2, 2, 2, 2, 2), "attention_mask must hold a 0 or 1 for every token"),
        ({"past_key_values": DynamicCache()}, "past_key_values .* would stay empty"),
        ({"force_words_ids": [[5]]}, "force_words_ids"),
        ({"use_mtp": True}, "which has none; use another draft"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups=2"),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "diversity_penalty=0.5"),
        pytest.param(
            {"cache_implementation": "offloaded"},
            "cache_implementation='offloaded'",
            marks=pytest.mark.skipif(
                torch.version.cuda is not None and not torch.cuda.is_available(),
                reason="transformers cannot make this cache: torch for CUDA, but no driver",
            ),
        ),
        ({"synced_gpus": True}, "synced_gpus= does not reach outrider"),
        ({"assistant_tokenizer": object()}, "draft_tokenizer is for a draft model; got object"),
    ],
)
def test_what_would_be_ignored_is_refused(target, given, words):
    with pytest.raises(ConfigurationError, match=words):
        target.generate(prompts(), custom_generate=speculative, **GREEDY, **given)


def test_a_single_group_of_beams_is_no_other_way(target):
    how = {**GREEDY, "num_beams": 2, "num_beam_groups": 1, "diversity_penalty": 0.0}
    plain = target.generate(prompts(), num_beams=2, **GREEDY)
    assert torch.equal(target.generate(prompts(), custom_generate=speculative, **how), plain)


def test_positions_that_say_nothing_new_are_taken(target):
    plain = target.generate(prompts(), **GREEDY)
    given = {"position_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8).bool()}
    assert torch.equal(
        target.generate(prompts(), custom_generate=speculative, **given, **GREEDY), plain
    )


def test_a_nucleus_of_nothing_keeps_one_token_as_there(target, draft):
    how = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.0, "top_k": 7, "temperature": 0.9}
    plain = target.generate(prompts(2), **how)
    fast = target.generate(prompts(2), custom_generate=speculative, draft_model=draft, **how)
    assert torch.equal(fast, plain)


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_arguments_that_transformers_keeps_to_itself_are_refused_with_their_names(target, draft):
    """They never reach a custom function: an ignored draft model would only be slow."""
    with pytest.raises(ConfigurationError, match=r"assistant_model= .* pass draft_model="):
        target.generate(
            prompts(),
            custom_generate=SpeculativeGenerate(),
            assistant_model=draft,
            max_new_tokens=4,
        )
    streamer = Streamer()
    with pytest.raises(ConfigurationError, match=r"streamer= .* pass out_streamer="):
        target.generate(prompts(), custom_generate=speculative, streamer=streamer, max_new_tokens=4)
    assert streamer.ended, "nobody may wait for tokens that never come"
    with pytest.raises(ConfigurationError, match=r"pass tokenizer=\.\.\., too"):
        generate(target, prompts(), assistant_model=draft, assistant_tokenizer=object(), **GREEDY)


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise ValueError("one of its own")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"use_mtp": True}, ConfigurationError),
        ({"draft_model": 3}, ConfigurationError),
        ({"num_beams": 2}, ConfigurationError),
        ({"logits_processor": LogitsProcessorList([Failing()])}, ValueError),
        ({}, None),
    ],
)
def test_a_streamer_is_ended_once_whatever_happens(target, more, error):
    class Once(Streamer):
        def end(self):
            assert not self.ended
            super().end()

    streamer = Once()
    how = {**GREEDY, "custom_generate": speculative, "out_streamer": streamer, **more}
    with pytest.raises(error) if error else nullcontext():
        target.generate(prompts(), **how)
    assert streamer.ended


def test_the_end_of_the_context_is_said(draft):
    model = build(based("llama", max_position_embeddings=24))
    model.generation_config.pad_token_id = 0
    how = {"do_sample": False, "eos_token_id": None, "custom_generate": speculative}
    with pytest.warns(UserWarning, match="row 0 ended at the model's context of 24 tokens"):
        made = model.generate(prompts(), max_new_tokens=30, **how)
    assert made.shape == (1, 24)
    model.generate(prompts(), max_new_tokens=16, **how)  # warnings are errors here


def words():
    """A tokenizer with a word for every id."""
    known = {"abcdef": 0, **{f"<{i}>": i for i in range(1, 97)}}  # transformers asks for it
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(known, unk_token="abcdef")))


@pytest.mark.parametrize("where", ["keyword", "configuration", "the model's configuration"])
def test_stop_strings_are_found_wherever_they_stand(target, where):
    model = copy.deepcopy(target)
    plain = model.generate(prompts(), **GREEDY)
    strings = [f"<{plain[0, 12]}>"]
    end = plain[0, 8:].tolist().index(int(plain[0, 12])) + 9
    how = {"max_new_tokens": 20, "do_sample": False}
    if where == "keyword":
        how["stop_strings"] = strings
    elif where == "configuration":
        how = {"generation_config": GenerationConfig(stop_strings=strings, **how)}
    else:
        model.generation_config.stop_strings = strings
    found = generate(model, prompts(), tokenizer=words(), **how)
    assert found.tolist() == plain[:, :end].tolist()
    with pytest.raises(ConfigurationError, match="stop_strings need tokenizer="):
        generate(model, prompts(), **how)
    if where == "configuration":
        assert how["generation_config"].stop_strings == strings


class ByPlace(LogitsProcessor):
    """A bias for each row of the batch, looked up by number."""

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, input_ids, scores):
        return torch.stack([line + self.bias[row] for row, line in enumerate(scores)])


class Broadcast(ByPlace):
    def __call__(self, input_ids, scores):
        return scores + self.bias


class FirstRow(LogitsProcessor):
    """Reads the first text only."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, int(input_ids[0].sum()) % 97] += 4
        return scores


def by_row(rows):
    bias = 3 * torch.randn(rows, 97, generator=torch.Generator().manual_seed(1))
    return [ByPlace(bias), Broadcast(bias), FirstRow()]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("which", range(3), ids=["by place", "broadcast", "first row"])
def test_processors_that_mind_their_row_work_alone_and_are_refused_in_a_batch(
    target, draft, which, shape
):
    how = {**GREEDY, "logits_processor": LogitsProcessorList([by_row(1)[which]])}
    fast = {"custom_generate": speculative, "draft_model": draft, "branching": shape}
    plain = target.generate(prompts(), **how)
    assert torch.equal(target.generate(prompts(), **fast, **how), plain)
    how["logits_processor"] = LogitsProcessorList([by_row(3)[which]])
    name = type(by_row(3)[which]).__name__
    with pytest.raises(ConfigurationError, match=f"logits processor {name} cannot be replayed"):
        target.generate(prompts(3), **fast, **how)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "asked", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}]
)
def test_processors_with_a_prompt_for_every_row_work_in_batches(target, draft, asked, copies):
    how = {"max_new_tokens": 10, "num_return_sequences": copies, **asked}
    how |= {"do_sample": True, "top_k": 1} if copies > 1 else {"do_sample": False}
    plain = target.generate(prompts(2), **how)
    fast = {"custom_generate": speculative, "draft_model": draft, "branching": (2, 2)}
    assert torch.equal(target.generate(prompts(2), **fast, **how), plain)


def test_allowed_tokens_differ_by_row(target, draft):
    def allowed(row, text):
        return [(int(text[-1]) * 3 + row + k) % 97 for k in range(5)]

    how = {**GREEDY, "prefix_allowed_tokens_fn": allowed}
    plain = target.generate(prompts(3), **how)
    fast = target.generate(prompts(3), custom_generate=speculative, draft_model=draft, **how)
    assert torch.equal(fast, plain)
