"""`model.generate(custom_generate=...)` against plain generate: sequences, scores, finish, law."""

import copy
import itertools
from functools import lru_cache

import pytest
import torch
from families import FAMILIES, based, build
from test_parameters import Grammar
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.drafters.ngram_table import count
from outrider.errors import ConfigurationError, UnknownName
from outrider.integrations.generate import SpeculativeGenerate, generate, speculative
from outrider.integrations.generate_setup import load_arguments
from outrider.shipped import shipped

EOS = 2


@pytest.fixture(scope="module")
def pair():
    """A target and a draft that agrees often: the same weights, perturbed."""
    target = build(FAMILIES["Llama"](), "sdpa")
    draft = copy.deepcopy(target)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter += 0.02 * torch.randn(parameter.shape, generator=random)
    for model in (target, draft):
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = EOS
    return target, draft


def prompts(count=20):
    random = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 24, (count,), generator=random).tolist()
    return [torch.randint(3, 97, (1, n), generator=random) for n in lengths]


class LastToken(StoppingCriteria):
    """Stops on the last token alone: wrong unless it is asked at every token."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 11 == 3


class Always(LogitsProcessor):
    """A processor that transformers does not know: favours a token that the prefix's sum names."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, text in enumerate(input_ids):
            scores[row, int(text.sum()) % 97] += 1.5
        return scores


def ways():
    shared = {"do_sample": False, "max_new_tokens": 16}
    return {
        "nothing": shared,
        "native": {
            **shared,
            "repetition_penalty": 1.4,
            "no_repeat_ngram_size": 2,
            "min_new_tokens": 8,
        },
        "criterion": {**shared, "stopping_criteria": StoppingCriteriaList([LastToken()])},
        "everything": {
            **shared,
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 5,
            "logits_processor": LogitsProcessorList([Always()]),
            "stopping_criteria": StoppingCriteriaList([LastToken()]),
        },
    }


def same(fast, plain):
    assert torch.equal(fast.sequences, plain.sequences)
    assert len(fast.scores) == len(plain.scores) == len(fast.logits)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(fast, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)


OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def plainly(pair):
    """What `generate` of transformers gives for every prompt, by the name of the way."""
    target, _ = pair
    return lru_cache(
        lambda way: [target.generate(ids, **ways()[way], **OUTPUTS) for ids in prompts()]
    )


def every_way():
    """By default each drafting with everything, and a chain in every way."""
    for drafting in ("chain", "tree", "lookup", "table"):
        for way in ways():
            alone = drafting != "chain" and way != "everything"
            yield pytest.param(drafting, way, marks=[pytest.mark.slow] if alone else [])


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("drafting", "way"), list(every_way()))
def test_twenty_prompts_equal_plain_generate(pair, plainly, way, drafting):
    target, draft = pair
    how, size = ways()[way], target.config.vocab_size
    more = {
        "chain": {"draft_model": draft, "num_speculative_tokens": 3},
        "tree": {"draft_model": draft, "branching": (2, 2)},
        "lookup": {"prompt_lookup_num_tokens": 4},
        "table": {"drafter": "ngram_table", "table": count(list(range(size)) * 3, size)},
    }[drafting]
    call = SpeculativeGenerate()
    accepted = 0
    for ids, plain in zip(prompts(), plainly(way), strict=True):
        fast = target.generate(ids, custom_generate=call, **how, **OUTPUTS, **more)
        same(fast, plain)
        accepted += call.stats.accepted
        assert call.stats.drafted > 0 or drafting == "lookup"
    assert accepted > 20 or drafting in ("lookup", "table")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafting", ["chain", "lookup"])
def test_twenty_prompts_with_a_grammar(pair, drafting):
    target, draft = pair
    more = {"chain": {"draft_model": draft}, "lookup": {"prompt_lookup_num_tokens": 4}}[drafting]
    for ids in prompts():
        rules = LogitsProcessorList([Grammar(ids.shape[1])])
        how = {"do_sample": False, "max_new_tokens": 20, "logits_processor": rules}
        plain = target.generate(ids, **how, **OUTPUTS)
        fast = target.generate(ids, custom_generate=speculative, **how, **OUTPUTS, **more)
        same(fast, plain)


@pytest.mark.parametrize("way", ["nothing", "native", "everything"])
def test_a_left_padded_batch_equals_plain_generate(pair, way):
    target, draft = pair
    each = prompts(5)
    width = max(p.shape[1] for p in each)
    ids = torch.zeros(5, width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(each):
        ids[row, width - prompt.shape[1] :] = prompt[0]
        mask[row, width - prompt.shape[1] :] = 1
    how = ways()[way]
    plain = target.generate(ids, attention_mask=mask, **how, **OUTPUTS)
    fast = target.generate(
        ids, attention_mask=mask, custom_generate=speculative, draft_model=draft, **how, **OUTPUTS
    )
    assert torch.equal(fast.sequences, plain.sequences)
    for row in range(5):
        made = plain.sequences[row, width:].tolist()
        end = made.index(EOS) + 1 if EOS in made else len(made)
        stops = [i + 1 for i, t in enumerate(made) if t % 11 == 3] if way == "everything" else []
        for at in range(min([end, *stops])):
            for name in ("scores", "logits"):
                mine, theirs = getattr(fast, name)[at][row], getattr(plain, name)[at][row]
                torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)


def test_without_an_end_token_rows_go_on_until_all_have_finished(pair):
    target, draft = pair
    target = copy.deepcopy(target)
    target.generation_config.eos_token_id = None
    ids = torch.cat([p[:, :3] for p in prompts(4)])
    how = ways()["criterion"]
    plain = target.generate(ids, **how)
    assert torch.equal(
        target.generate(ids, custom_generate=speculative, draft_model=draft, **how), plain
    )


def test_several_sequences_per_prompt_and_seeds(pair):
    target, draft = pair
    how = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 10, "top_k": 20}
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        ids = prompts(1)[0]
        results.append(target.generate(ids, custom_generate=speculative, draft_model=draft, **how))
    assert torch.equal(results[0], results[1])
    assert results[0].shape[0] == 3
    assert not torch.equal(results[0][0], results[0][1])


def test_the_streamer_gets_every_token_in_order(pair):
    target, draft = pair

    class Streamer:
        tokens, ended = (), False

        def put(self, value):
            self.tokens = [*self.tokens, *value.reshape(-1).tolist()]

        def end(self):
            self.ended = True

    ids = prompts(1)[0]
    plain = target.generate(ids, do_sample=False, max_new_tokens=12)
    for name in ("direct", "wrapped"):
        streamer = Streamer()
        if name == "direct":
            target.generate(
                ids,
                custom_generate=speculative,
                draft_model=draft,
                out_streamer=streamer,
                do_sample=False,
                max_new_tokens=12,
            )
        else:
            generate(
                target,
                ids,
                assistant_model=draft,
                streamer=streamer,
                do_sample=False,
                max_new_tokens=12,
            )
        assert streamer.tokens == plain[0].tolist()
        assert streamer.ended


def test_stop_strings_stop_where_plain_generate_stops():
    target, draft = (AutoModelForCausalLM.from_pretrained(shipped(p)) for p in ("target", "draft"))
    words = AutoTokenizer.from_pretrained(shipped("target"))
    ids = words("def add(a, b):\n    return", return_tensors="pt")["input_ids"]
    how = {"do_sample": False, "max_new_tokens": 24, "tokenizer": words}
    how["attention_mask"] = torch.ones_like(ids)
    made = words.decode(target.generate(ids, **how)[0, ids.shape[1] :])
    how["stop_strings"] = [made[8:11]]
    plain = target.generate(ids, **how)
    assert plain.shape[1] < ids.shape[1] + 24
    assert torch.equal(generate(target, ids, assistant_model=draft, **how), plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processed", [False, True], ids=["filters", "with a processor"])
def test_the_law_at_temperature_1(processed):
    """Three tokens of V = 8: sample frequencies against exact enumeration, chi-square."""
    from scipy.stats import chi2

    config = based("llama", vocab_size=8, eos_token_id=None, pad_token_id=None, bos_token_id=1)
    target, draft = build(config, seed=1), build(config, seed=2)
    count, tokens = 5000, 3
    prompt = torch.tensor([[3, 4, 5, 3]])
    how = {"top_k": 6, "top_p": 0.95, "repetition_penalty": 1.3, "temperature": 1.0}

    class Tilt(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + 0.1 * (input_ids[:, -1:] - torch.arange(8)).abs()

    own = LogitsProcessorList([Tilt()] if processed else [])
    chain = [RepetitionPenaltyLogitsProcessor(1.3), *own, TopKLogitsWarper(6)]
    chain.append(TopPLogitsWarper(0.95))
    expected = {}
    for text in itertools.product(range(8), repeat=tokens):
        chance = 1.0
        for step in range(tokens):
            ids = torch.cat([prompt, torch.tensor([text[:step]], dtype=torch.int64)], 1)
            with torch.no_grad():
                row = target(ids).logits[:, -1]
            for rule in chain:
                row = rule(ids, row)
            chance *= float(row.softmax(-1)[0, text[step]])
            if chance == 0:
                break
        if chance:
            expected[text] = chance
    seen = dict.fromkeys(expected, 0)
    torch.manual_seed(0)
    for _ in range(4):
        made = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            custom_generate=speculative,
            draft_model=draft,
            branching=(2, 1),
            do_sample=True,
            max_new_tokens=tokens,
            num_return_sequences=count // 4,
            logits_processor=copy.copy(own),
            **how,
        )
        for text in made[:, 4:].tolist():
            seen[tuple(text)] += 1
    common = [t for t in expected if expected[t] * count >= 5]
    rest = 1 - sum(expected[t] for t in common)
    pairs = [(seen[t], count * expected[t]) for t in common]
    if rest * count > 1:
        pairs.append((count - sum(n for n, _ in pairs), count * rest))
    statistic = sum((n - e) ** 2 / e for n, e in pairs)
    assert chi2.sf(statistic, len(pairs) - 1) > 1e-3


def test_differently_padded_outputs_work_and_other_vocabularies_do_not(pair):
    target, _ = pair
    ids = prompts(1)[0]
    plain = target.generate(ids, do_sample=False, max_new_tokens=12)
    for size in (93, 128):
        draft = build(based("llama", vocab_size=size))
        fast = target.generate(
            ids, custom_generate=speculative, draft_model=draft, do_sample=False, max_new_tokens=12
        )
        assert torch.equal(fast, plain)
    with pytest.raises(ConfigurationError, match="output sizes differ"):
        target.generate(
            ids,
            custom_generate=speculative,
            draft_model=build(based("llama", vocab_size=2000)),
            max_new_tokens=4,
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"num_beams": 2, "return_dict_in_generate": True, "output_logits": True},
            "output_logits or output_attentions of beams",
        ),
        ({"num_beams": 2, "max_time": 60.0}, "MaxTimeCriteria of beams"),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "output_hidden_states is not supported",
        ),
        ({"assistant_confidence_threshold": 0.3}, "assistant_confidence_threshold"),
        ({"drafter": "draft_model"}, "needs a draft model"),
        ({"speculative_config": {"gamma": 3}}, "unknown speculative setting 'gamma'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(pair, given, words):
    with pytest.raises(ConfigurationError, match=words):
        pair[0].generate(
            prompts(1)[0], custom_generate=speculative, max_new_tokens=4, do_sample=False, **given
        )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"model": "small", "num_speculative_tokens": 5},
            {"draft": "small", "num_speculative_tokens": 5},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
            {"drafter": "prompt_lookup", "num_speculative_tokens": 4, "ngram": (1, 3)},
        ),
        (
            {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
            {"drafter": "prompt_lookup", "num_speculative_tokens": 10, "ngram": (1, 2)},
        ),
        (
            {"assistant_model": "small", "num_assistant_tokens": 7},
            {"draft": "small", "num_speculative_tokens": 7},
        ),
        (
            {"model": "small", "rejection_sample_method": "block"},
            {"draft": "small", "rule": "block"},
        ),
    ],
)
def test_other_libraries_names(given, found):
    assert load_arguments(given) == found


def test_unknown_and_contradictory_names_are_errors():
    with pytest.raises(UnknownName, match="Did you mean 'num_speculative_tokens'"):
        load_arguments({"num_speculativ_tokens": 3})
    with pytest.raises(UnknownName, match=r"draft_model, .*ngram, ngram_table"):
        load_arguments({"method": "eagle3"})
    with pytest.raises(ConfigurationError, match="contradicts"):
        load_arguments({"num_speculative_tokens": 3, "num_assistant_tokens": 4})
    with pytest.raises(ConfigurationError, match="must be 'constant'"):
        load_arguments({"num_assistant_tokens_schedule": "heuristic"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generate_on_a_cuda_device(pair):
    target, draft = (copy.deepcopy(model).cuda() for model in pair)
    for ids in prompts():
        how = ways()["everything"]
        plain = target.generate(ids.cuda(), **how, **OUTPUTS)
        fast = target.generate(
            ids.cuda(), custom_generate=speculative, draft_model=draft, **how, **OUTPUTS
        )
        same(fast, plain)
