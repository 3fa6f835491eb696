"""Which of transformers' processors become settings, and that the law is the same law then."""

import itertools

import pytest
import torch
from nodes import random_case
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, generation as hf

from outrider import SamplingParams, Timestamps
from outrider.integrations.logits_processor_mapping import Prompts, settings

VOCAB, WIDTH, END = 12, 4, 9
ABOUT = Prompts(WIDTH, False, [2], VOCAB, END)
ONE = Prompts(1, False, [2], VOCAB, END)
SOURCES = [[3, 4, 5, 3, 6], [7, 7], [1]]
BAN = -torch.inf


class Plus(LogitsProcessor):
    """One of a user's own."""

    def __call__(self, input_ids, scores):
        return scores + (input_ids[:, -1:] == torch.arange(scores.shape[1]))


def timestamps(begin=WIDTH, end=5, **more):
    config = GenerationConfig(eos_token_id=end)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 7, 2
    return hf.WhisperTimeStampLogitsProcessor(config, begin, **more)


def source_ngrams(rows):
    return hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor(rows))


def begin(ids, place):
    return hf.SuppressTokensAtBeginLogitsProcessor(ids, place)


PENALTY = hf.RepetitionPenaltyLogitsProcessor(1.2)
BIGRAMS = hf.NoRepeatNGramLogitsProcessor(2)
SUPPRESS = hf.SuppressTokensLogitsProcessor([3, 50_256])
LEAST = hf.MinNewTokensLengthLogitsProcessor(WIDTH, 3, [2])
FIRST, LAST = hf.ForcedBOSTokenLogitsProcessor(6), hf.ForcedEOSTokenLogitsProcessor(END, 2)
BAD = hf.NoBadWordsLogitsProcessor([[8]], [2])
WHISPER = Timestamps(no_timestamps_id=7, end_id=5, max_initial=2)

#: name -> processors, the prompts they were made for, fields, how many are replayed
LISTS = {
    "generate's own order": (
        [BAD, PENALTY, BIGRAMS, LEAST, LAST, SUPPRESS, begin([9, 90], WIDTH)],
        ABOUT,
        {
            "logit_bias": {8: BAN, 3: BAN},
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "min_new_tokens": 3,
            "forced_eos_token_id": 2,
            "begin_suppress_tokens": (9,),
        },
        0,
    ),
    "Whisper's order": (
        [begin([2, 9], WIDTH), SUPPRESS, timestamps()],
        ABOUT,
        {"logit_bias": {3: BAN}, "begin_suppress_tokens": (2, 9), "timestamps": WHISPER},
        0,
    ),
    "padded": (
        [begin([2, 9], WIDTH), LEAST, timestamps(), LAST],
        ABOUT._replace(padded=True),
        {
            "begin_suppress_tokens": (2, 9),
            "min_new_tokens": 3,
            "timestamps": WHISPER,
            "forced_eos_token_id": 2,
        },
        0,
    ),
    "a first token": (
        [FIRST, begin([9], 2)],
        ONE,
        {"forced_bos_token_id": 6, "begin_suppress_tokens": (9,)},
        0,
    ),
    "too late for a first token": ([FIRST, begin([9], 2)], ABOUT, {}, 0),
    "biases": (
        [hf.SequenceBiasLogitsProcessor({(4,): 1.5, (5,): -2.0}), SUPPRESS, PENALTY],
        ABOUT,
        {"logit_bias": {4: 1.5, 5: -2.0, 3: BAN}, "repetition_penalty": 1.2},
        0,
    ),
    "n-grams of the source": (
        [source_ngrams([[3, 4, 5], [7, 7, 1]])],
        ABOUT._replace(sources=[[3, 4, 5], [3, 4, 5], [7, 7, 1], [7, 7, 1]]),
        {"encoder_no_repeat_ngram_size": 2},
        0,
    ),
    # what is not ours, and everything behind it
    "one of a user's own": ([PENALTY, Plus(), BIGRAMS], ABOUT, {"repetition_penalty": 1.2}, 2),
    "penalties and padding": ([PENALTY, LEAST], ABOUT._replace(padded=True), {}, 2),
    "n-grams and padding": ([BIGRAMS], ABOUT._replace(padded=True), {}, 1),
    "padded sources": (
        [source_ngrams([[3, 4, 5], [7, 0, 0]])],
        ABOUT._replace(sources=[[3, 4, 5], [7]]),
        {},
        1,
    ),
    "no sources": ([source_ngrams([[3, 4, 5]])], ABOUT, {}, 1),
    "another end of the text": ([hf.MinLengthLogitsProcessor(9, [4])], ABOUT, {}, 1),
    "another end of the row": ([hf.ForcedEOSTokenLogitsProcessor(END + 1, 2)], ABOUT, {}, 1),
    "several last tokens": ([hf.ForcedEOSTokenLogitsProcessor(END, [2, 3])], ABOUT, {}, 1),
    "a forced token banned behind": (
        [LAST, hf.SuppressTokensLogitsProcessor([2])],
        ABOUT,
        {"forced_eos_token_id": 2},
        1,
    ),
    "a ban behind the timestamps": ([timestamps(), SUPPRESS], ABOUT, {"timestamps": WHISPER}, 1),
    "timestamps behind a forced token": (
        [LAST, timestamps()],
        ABOUT,
        {"forced_eos_token_id": 2},
        1,
    ),
    "timestamps of the prompt": ([timestamps(WIDTH - 1)], ABOUT, {}, 1),
    "timestamps without their sum": (
        [timestamps(_detect_timestamp_from_logprob=False)],
        ABOUT,
        {},
        1,
    ),
    "a later beginning": ([begin([9], WIDTH + 1)], ABOUT, {}, 1),
    "a beginning ahead of a first token": (
        [begin([9], 1), FIRST],
        ONE,
        {"begin_suppress_tokens": (9,)},
        1,
    ),
    "a bias of two tokens": ([hf.NoBadWordsLogitsProcessor([[8, 9]], [2])], ABOUT, {}, 1),
    "a bias behind a penalty": (
        [PENALTY, hf.SequenceBiasLogitsProcessor({(4,): 1.5})],
        ABOUT,
        {"repetition_penalty": 1.2},
        1,
    ),
    "a decay": ([hf.ExponentialDecayLengthPenalty((2, 1.1), [2], WIDTH)], ABOUT, {}, 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_read_from_their_beginning(name):
    processors, about, fields, replayed = LISTS[name]
    found = settings(processors, True, about)
    rest = found.pop("processors", ())
    assert found == {"temperature": 1.0, **fields}
    assert rest == tuple(processors[len(processors) - replayed :])


def test_temperature_and_filters_at_the_end_are_ours():
    warpers = [
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(9),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.1),
    ]
    filters = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1}
    read = settings([PENALTY, *warpers], True, ABOUT)
    assert read == {**filters, "repetition_penalty": 1.2}
    other = Plus()
    assert settings([PENALTY, other, *warpers], True, ABOUT)["processors"] == (other,)
    turned = settings([warpers[1], warpers[0]], True, ABOUT)
    assert turned["temperature"] == 0.7
    assert turned["processors"] == (warpers[1],)


@pytest.mark.parametrize("width", [1, WIDTH])
def test_whatever_the_order_the_law_is_that_of_the_list(width):
    """Random lists: our settings, then the rest replayed, at every node of a tree."""
    random = torch.Generator().manual_seed(0)
    sources = [[3, 4, 5, 3, 6], [7, 7, 1, 2, 2]]
    pool = [
        BAD,
        PENALTY,
        BIGRAMS,
        SUPPRESS,
        hf.MinNewTokensLengthLogitsProcessor(width, 3, [2]),
        begin([9, 3], width),
        begin([4], width + 1),
        FIRST,
        LAST,
        hf.SuppressTokensLogitsProcessor([2]),
        hf.SequenceBiasLogitsProcessor({(4,): 1.5, (6,): -2.0}),
        timestamps(width),
        Plus(),
    ]
    native = whole = 0
    for seed in range(60):
        case = random_case(VOCAB, seed, rows=2, levels=(0, 1, 4, 7), least_prompt=width, spread=1)
        order = torch.randperm(len(pool), generator=random)[: 2 + seed % 4].tolist()
        processors = [pool[at] for at in order] + [source_ngrams(sources)] * (seed % 3 == 0)
        about = Prompts(width, False, [2], VOCAB, END, sources)
        fields = settings(processors, True, about)
        rest = fields.pop("processors", ())
        native, whole = native + len(processors) - len(rest), whole + len(processors)
        ours = case.shaped([SamplingParams(**fields)] * 2, (2,), [END] * 2, sources)
        for row, (start, stop) in itertools.product(range(2), itertools.pairwise(case.tree.levels)):
            texts = torch.tensor([case.text(row, node) for node in range(start, stop)])
            want = _of_row(processors, sources[row])(texts, case.logits[row, start:stop].clone())
            got = _of_row(rest, sources[row])(texts, ours[row, start:stop].clone())
            torch.testing.assert_close(got, want)
    assert 0.4 < native / whole < 0.8


def _of_row(processors, source):
    kind = hf.EncoderNoRepeatNGramLogitsProcessor
    return LogitsProcessorList(
        [source_ngrams([source]) if isinstance(p, kind) else p for p in processors]
    )
