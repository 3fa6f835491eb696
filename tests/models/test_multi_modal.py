"""Prompts with images or sound: texts are transformers' `generate`'s, however they are drafted."""

import copy
from functools import lru_cache

import installed
import media_models as tiny_images
import pytest
import supported_models  # noqa: F401  (puts benchmarks/model_types on the path)
import tiny_media
import torch
from examine import Recited
from hypothesis import given, settings, strategies as st

from outrider import (
    Beams,
    ConfigurationError,
    Engine,
    PromptError,
    SamplingParams,
    StopConditions,
    UnsupportedModel,
    verifiers,
)
from outrider.drafters import DraftModel, PromptLookup, Root
from outrider.engine.beam_search.search import search
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.models import adapt, isa, load_checks, weight_only
from outrider.models.config import closers, placeholders
from outrider.models.multi_modal import MultiModalRunner
from outrider.models.prefix_cache import LEAST, PrefixCache
from outrider.types import MultiModalInputs
from tiny import pair

NEW = 12
#: One for each way of reading an image: blocks that see each other, ahead of the text, compressed
#: tokens, places in a mask, tokens as they are, cross attention, the whole prompt as one block,
#: positions of several axes.
FAST = ("gemma3", "git", "idefics3", "kosmos-2", "llava", "mllama", "paligemma", "qwen2_5_vl")
EVERY = [
    pytest.param(
        kind,
        marks=installed.marks(kind)
        + [pytest.mark.exhaustive] * (kind not in (*FAST, "audioflamingo3")),
    )
    for kind in tiny_images.EVERY
]
GREEDY = SamplingParams(0)


@lru_cache(maxsize=12)
def model_of(kind):
    return tiny_images.made(kind)


@lru_cache(maxsize=12)
def target_of(kind):
    return adapt(model_of(kind))


@lru_cache(maxsize=12)
def prompts_of(kind):
    """Three prompts with unequal pictures at unequal places, and one of text alone."""
    model = model_of(kind)
    made = [
        tiny_images.prompt(kind, model, seed, ahead=2 + 3 * seed, size=seed % 2)
        for seed in range(3)
    ]
    return [*made, ([7, 9, 11, 13], {})]


def media(kind):
    stands = target_of(kind).runner.placeholders
    marks = closers(model_of(kind).config)
    made = prompts_of(kind)
    return [MultiModalInputs(kwargs, stands, marks) if kwargs else None for _, kwargs in made]


def requests_of(kind, how=GREEDY, new=NEW):
    each = zip(prompts_of(kind), media(kind), strict=True)
    return [Request(ids, how, StopConditions(new), inputs=inputs) for (ids, _), inputs in each]


@torch.inference_mode()
def generated(model, ids, kwargs, **options):
    """What transformers writes."""
    asked = model if kwargs else tiny_media.of_text(model)
    ids, kwargs = tiny_media.given_to(model, ids, kwargs)
    ids_1L = torch.tensor([ids])
    found = asked.generate(
        input_ids=ids_1L,
        attention_mask=torch.ones_like(ids_1L),
        **kwargs,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        disable_compile=True,
        **options,
    )
    return found[:, len(ids) :].tolist()


@lru_cache(maxsize=12)
def expected(kind):
    return [generated(model_of(kind), ids, kwargs)[0] for ids, kwargs in prompts_of(kind)]


def texts(target, drafter, requests, max_num_seqs=None, prefixes=None):
    engine = Engine(target, drafter, verifiers.get("match"))
    run = EngineRun(engine, max_num_seqs or len(requests), 256, prefixes=prefixes)
    run.submit_all(requests)
    run.close()
    found = [[] for _ in requests]
    for block in run:
        found[block.request_id] += block.token_ids
    return found


def recited(requests, known, width):
    """A drafter that knows what comes, with errors."""
    pairs = zip(requests, known, strict=True)
    return Recited([[*request.prompt, *text] for request, text in pairs], width)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", EVERY)
def test_texts_are_those_of_generate(kind):
    target, requests, right = target_of(kind), requests_of(kind), expected(kind)
    assert isinstance(target.runner, MultiModalRunner)
    assert len({token for text in right for token in text}) > 4
    assert [texts(target, Root(), [one])[0] for one in requests] == right
    for width in (1, 3):
        drafter = recited(requests, right, width)
        assert [texts(target, drafter, [one])[0] for one in requests] == right
    assert texts(target, recited(requests, right, 3), requests) == right
    drawn = requests_of(kind, SamplingParams(0.9, seed=5))
    alone = [texts(target, Root(), [one])[0] for one in drawn]
    assert texts(target, recited(drawn, alone, 3), drawn, max_num_seqs=3) == alone != right


def test_marks_behind_a_picture_are_read_with_it():
    """MiniCPM-V 4.7 counts positions by them; the check of the first prompt finds who does not."""
    kind = "minicpmv4_7"
    installed.needed(kind)
    request, target = requests_of(kind)[0], adapt(model_of(kind))
    told = request.inputs
    untold = MultiModalInputs(told.kwargs, told.placeholders)
    assert told.end(request.prompt) == untold.end(request.prompt) + 1
    with pytest.raises(UnsupportedModel, match="does not score trees behind a prompt"):
        load_checks.media(target, request.prompt, untold)
    assert load_checks.media(target, request.prompt, told) < 1e-4


@pytest.mark.parametrize("kind", installed.params(FAST))
def test_pictures_matter(kind):
    """Another picture, another text: a placeholder's embedding alone would give one text."""
    (ids, kwargs), *_ = prompts_of(kind)
    other = kwargs | {"pixel_values": -3 * kwargs["pixel_values"]}
    assert generated(model_of(kind), ids, other)[0] != expected(kind)[0]


ACTIONS = st.lists(st.tuples(st.sampled_from("sstttec"), st.integers(0, 20)), max_size=30)


@settings(max_examples=25, deadline=None)
@given(ACTIONS, st.sampled_from(installed.those(FAST)))
def test_rows_with_pictures_come_and_go(script, kind):
    requests, right = requests_of(kind), expected(kind)
    drafter = recited(requests, right, 3)
    run = EngineRun(Engine(target_of(kind), drafter, verifiers.get("match")), 2, 256)
    who, found = [], []

    def step():
        for block in run.step():
            found[block.request_id] += block.token_ids

    for action, pick in script:
        left = [number for number, reason in enumerate(run.reasons) if reason is None]
        if action == "s":
            who.append(pick % len(requests))
            found.append([])
            run.submit(requests[who[-1]])
        elif action == "t":
            step()
        elif left:
            number = left[pick % len(left)]
            run.end(number, "cancelled" if action == "c" else "stop")
    run.close()
    while not run.done:
        step()
    for number, text in enumerate(found):
        whole = right[who[number]]
        assert text == (whole if run.reason(number) == "length" else whole[: len(text)])


@pytest.mark.parametrize("kind", installed.params(FAST))
def test_beams_are_those_of_transformers(kind):
    right = [
        generated(model_of(kind), ids, kwargs, num_beams=3, num_return_sequences=3)
        for ids, kwargs in prompts_of(kind)
    ]
    for drafter in (Root(), PromptLookup(3)):
        beams = Beams(3, num_return_sequences=3)
        found = search(target_of(kind), drafter, requests_of(kind), beams)
        assert [[one.token_ids for one in row] for row in found.hypotheses] == right


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_a_video_is_read_as_its_processor_made_it(kind):
    """Two frames of four by four patches, merged by two and two; Qwen3-VL's frames stand apart."""
    random, video = torch.Generator().manual_seed(1), tiny_media.VIDEO
    first, last = tiny_media.FIRST, tiny_media.LAST
    parts = [8] if kind == "qwen2_vl" else [4, 4]
    ids = [7, 8, *(at for n in parts for at in (20, first, *[video] * n, last)), 9, 10]
    kwargs = {
        "pixel_values_videos": torch.randn(32, 96, generator=random),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[2 * int(token == video) for token in ids]]),
    }
    right = generated(model_of(kind), ids, kwargs)
    inputs = MultiModalInputs(kwargs, placeholders(model_of(kind).config))
    requests = [Request(ids, GREEDY, StopConditions(NEW), inputs=inputs), requests_of(kind)[0]]
    known = [*right, *generated(model_of(kind), *prompts_of(kind)[0])]
    assert texts(target_of(kind), recited(requests, known, 3), requests) == known
    dark = kwargs | {"pixel_values_videos": -3 * kwargs["pixel_values_videos"]}
    assert generated(model_of(kind), ids, dark) != right


def test_a_draft_without_eyes():
    kind = "llava"
    draft = adapt(tiny_images.made(kind, seed=1))
    drafter = DraftModel(draft, (2, 1))
    assert texts(target_of(kind), drafter, requests_of(kind)) == expected(kind)


@pytest.fixture
def looks(request):
    """How often the vision part of a model was run."""
    counts, handles = [], []

    def watch(kind):
        part = next(
            module
            for name, module in model_of(kind).named_modules()
            if name.split(".")[-1] in ("vision_tower", "visual", "vision_model", "image_encoder")
        )
        handles.append(part.register_forward_hook(lambda *_: counts.append(kind)))
        return counts

    yield watch
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", installed.params(FAST))
def test_a_second_question_about_a_picture_reads_no_picture(kind, looks):
    target = target_of(kind)
    stands = target.runner.placeholders
    ids, kwargs = tiny_images.prompt(kind, model_of(kind), seed=3, ahead=LEAST)
    inputs = MultiModalInputs(kwargs, stands)
    ahead = tiny_images.EVERY[kind].first
    end = len(ids) if ahead else inputs.end(ids)
    typed, beside = tiny_images.EVERY[kind].typed, tiny_images.EVERY[kind].beside

    def asked(tail, kwargs):
        prompt = [*ids[:end], *tail]
        if beside is not None:
            kwargs = kwargs | beside(prompt, kwargs)
        if typed is not None:
            seen = [int(token == tiny_images.IMAGE) for token in prompt]
            kwargs = kwargs | {typed: torch.tensor([seen])}
        again = {name: value.clone() for name, value in kwargs.items()}
        own = MultiModalInputs(again, inputs.placeholders)
        return Request(prompt, GREEDY, StopConditions(NEW), inputs=own)

    first, second = (asked(tail, dict(inputs.kwargs)) for tail in ([7, 8], [9, 9, 9]))
    changed = {**inputs.kwargs, "pixel_values": inputs.kwargs["pixel_values"] + 1}
    third = asked([7, 8], changed)
    right = [texts(target, Root(), [one])[0] for one in (first, second, third)]
    counts, prefixes = looks(kind), PrefixCache(1 << 20)
    seen = []
    for one, text in zip((first, second, third), right, strict=True):
        before = len(counts)
        assert texts(target, Root(), [one], prefixes=prefixes)[0] == text
        seen.append(len(counts) > before)
    assert seen == [True, False, True]
    if ahead:
        return
    # text ahead of a picture is copied as text: no position behind the picture comes along
    plain = Request([*ids[: end - 1], 5, 5, 5], GREEDY, StopConditions(NEW))
    alone = texts(target, Root(), [plain])
    assert texts(target, Root(), [plain], prefixes=prefixes) == alone


@pytest.mark.parametrize("kind", installed.params(FAST))
def test_a_text_is_resumed(kind):
    request, text = requests_of(kind)[0], expected(kind)[0]
    again = Request(
        [*request.prompt, *text[:5]],
        GREEDY,
        StopConditions(NEW - 5),
        inputs=request.inputs,
        written=5,
    )
    assert texts(target_of(kind), Root(), [again])[0] == text[5:]


def test_only_its_own_request_fails_for_pictures_that_do_not_fit():
    kind = "llava"
    requests = requests_of(kind)
    ids = list(requests[0].prompt)
    ids.remove(tiny_images.IMAGE)  # one place too few
    wrong = Request(ids, GREEDY, StopConditions(NEW), inputs=requests[0].inputs)
    run = EngineRun(Engine(target_of(kind), Root()), 2, 256)
    texts(target_of(kind), Root(), requests[:1])  # pictures of this kind have been checked
    run.submit_all([wrong, requests[1]])
    found = [[], []]
    while not run.done:
        for block in run.step():
            found[block.request_id] += block.token_ids
    assert found == [[], expected(kind)[1]]
    assert run.reasons[0] == "error"
    with pytest.raises(PromptError, match="as many as the prompt has places for"):
        raise run.errors[0]


def test_what_cannot_be_read_is_refused():
    target, (request, *_) = target_of("llava"), requests_of("llava")
    kwargs, stands = dict(request.inputs.kwargs), request.inputs.placeholders

    def refused(error, prompt, given, *parts, of=target):
        inputs = MultiModalInputs(given, stands)
        run = EngineRun(Engine(of, Root()), 1, 256)
        with pytest.raises(error, match=".*".join(parts)):
            run.submit(Request(prompt, GREEDY, StopConditions(4), inputs=inputs))

    ids = list(request.prompt)
    refused(ConfigurationError, ids, kwargs, "no images or sound", "pixel_values", of=pair()[0])
    refused(ConfigurationError, ids, {"input_features": kwargs["pixel_values"]}, "input_features")
    refused(ConfigurationError, ids, {}, "nothing but token ids")
    refused(PromptError, [5, 6], kwargs, "without any of the tokens")
    refused(PromptError, ids[: request.inputs.end(ids)], kwargs, "ends with a placeholder")
    padded = torch.ones(1, len(ids), dtype=torch.int64)
    padded[0, 0] = 0
    refused(ConfigurationError, ids, kwargs | {"attention_mask": padded}, "no padding")
    refused(ConfigurationError, ids, kwargs | {"attention_mask": padded[:, 1:]}, "one place for")
    run = EngineRun(Engine(target, Root()), 1, 256)
    watching = Request(ids, GREEDY, StopConditions(4), inputs=request.inputs, watched=0)
    with pytest.raises(ConfigurationError, match="watched"):
        run.submit(watching)


def test_prompts_that_are_one_block_are_refused_where_they_are_not(monkeypatch):
    target, request = target_of("paligemma"), requests_of("paligemma")[0]
    kwargs, stands = dict(request.inputs.kwargs), request.inputs.placeholders
    types = kwargs.pop("token_type_ids")
    for other in (kwargs, kwargs | {"token_type_ids": torch.ones_like(types)}):
        with pytest.raises(ConfigurationError, match="as one block: token_type_ids"):
            target.runner.examine_media(request.prompt, MultiModalInputs(other, stands))
    monkeypatch.setitem(target.runner._reach, "sliding_window", 8)  # as PaliGemma 2 has one
    with pytest.raises(PromptError, match="at most 8 tokens"):
        target.runner.examine_media(request.prompt, request.inputs)


def test_words_ahead_of_a_picture_that_stands_ahead_of_all():
    installed.needed("git")
    target, request = target_of("git"), requests_of("git")[0]
    with pytest.raises(PromptError, match="reads its image ahead of the text"):
        target.runner.examine_media([7, *request.prompt], request.inputs)


def test_the_check_of_pictures_knows_products_that_round():
    """A deep model's attention differs in last bits, by which bfloat16's products round."""
    if (why := weight_only.unsupported_reason(torch.device("cpu"))) is not None:
        pytest.skip(f"no kernels: {why}")
    config = copy.deepcopy(model_of("llava").config)
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "head_dim": 64}
    for name, size in (wide | {"num_attention_heads": 4, "num_key_value_heads": 4}).items():
        setattr(config.text_config, name, size)
    torch.manual_seed(0)
    model = type(model_of("llava"))(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    weight_only.keep(model, "bfloat16", "it")
    request = requests_of("llava")[0]
    rounding = 0.03 if isa.has_bf16_products() else 1e-3
    assert load_checks.media(adapt(model), request.prompt, request.inputs) < rounding


def test_a_model_that_counts_positions_otherwise_is_refused(monkeypatch):
    """The check of the first request finds it: positions behind a picture that do not go on."""
    kind = "qwen2_5_vl"
    target, (request, *_) = adapt(model_of(kind)), requests_of(kind)
    assert load_checks.media(target, request.prompt, request.inputs) < 1e-4
    assert load_checks.media(target, request.prompt, request.inputs) == 0  # once
    other = adapt(model_of(kind))
    shifted = MultiModalRunner._run

    def ignorant(self, cache, call):
        cache.inputs = None
        return shifted(self, cache, call)

    monkeypatch.setattr(MultiModalRunner, "_run", ignorant)
    with pytest.raises(UnsupportedModel, match="does not score trees behind a prompt"):
        load_checks.media(other, request.prompt, request.inputs)
