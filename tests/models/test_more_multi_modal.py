"""Prompts with images on types of the sweep, layers that keep states among them, and in chunks."""

from functools import lru_cache

import examine_images
import installed
import picture_forms
import pytest
import supported_models
import torch
from examine import Recited
from hypothesis import given, settings
from media_models import TYPES
from test_multi_modal import (
    ACTIONS,
    FAST as MECHANISMS,
    expected as expected_of,
    prompts_of,
    recited as recited_of,
    requests_of,
    target_of as made_of,
)

from outrider import Engine, SamplingParams, StopConditions, verifiers
from outrider.drafters import Root
from outrider.engine import scheduler
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.models import adapt, prefill
from outrider.models.config import placeholders
from outrider.models.prefix_cache import PrefixCache
from outrider.types import MultiModalInputs
from outrider_lab.images.guidance import GuidedModel

RIGHT = [
    kind
    for kind, found in supported_models.sweep.read_record()[0].items()
    if kind in supported_models.sweep.image_text()
    and supported_models.sweep.right_with_images(found)
    and kind not in TYPES  # those are `test_multi_modal`'s
]
FAST = ("qwen3_5",)
EACH = [
    pytest.param(k, marks=installed.marks(k) + [pytest.mark.exhaustive] * (k not in FAST))
    for k in RIGHT
]
GREEDY = SamplingParams(0)


@pytest.mark.parametrize("kind", EACH)
def test_texts_are_those_of_generate(kind):
    found = examine_images.examine(kind)
    assert supported_models.sweep.right_with_images({"images": found}), found


def test_a_type_that_cannot_be_tried_says_so(monkeypatch):
    def none(model, reads, first=0):
        raise ValueError("no form")

    monkeypatch.setattr(picture_forms, "prompts", none)
    assert examine_images.examine("qwen3_5") == {"prompt": "ValueError: no form"}


def texts(target, drafter, requests, max_num_seqs, prefixes=None):
    run = EngineRun(
        Engine(target, drafter, verifiers.get("match")), max_num_seqs, 512, prefixes=prefixes
    )
    run.submit_all(requests)
    run.close()
    found = [[] for _ in requests]
    for block in run:
        found[block.request_id] += block.token_ids
    return found


@pytest.mark.parametrize("kind", installed.params(MECHANISMS))
def test_prompts_read_in_chunks_while_others_decode(kind, monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 3)
    monkeypatch.setattr(prefill, "CHUNK", 2)
    requests, right = requests_of(kind), expected_of(kind)
    left = len(prompts_of(kind)[0][0]) - requests[0].inputs.end(requests[0].prompt)
    assert left == 0 if requests[0].inputs.block else left > 3
    assert texts(made_of(kind), recited_of(requests, right, 3), requests, 2) == right


class States:
    """Qwen3.5: three pictures, and a text, whose behind is longer than a piece of states."""

    kind = "qwen3_5"

    def __init__(self):
        self.model, rows, self.right = examine_images.material(self.kind)
        self.target = adapt(self.model)
        self.requests = [self.request(ids, kwargs) for ids, kwargs in rows]

    def request(self, ids, kwargs, new=examine_images.NEW):
        stands = placeholders(self.model.config)
        inputs = MultiModalInputs(kwargs, stands) if kwargs else None
        return Request(ids, GREEDY, StopConditions(new), inputs=inputs)

    def longer(self, number, tail):
        """A prompt that goes on behind the picture with so many words."""
        first = self.requests[number]
        ids = [*first.prompt, *tail]
        kwargs = dict(first.inputs.kwargs)
        typed = kwargs["mm_token_type_ids"]
        more = torch.zeros(1, len(tail), dtype=typed.dtype)
        return self.request(ids, kwargs | {"mm_token_type_ids": torch.cat([typed, more], 1)})


@lru_cache(maxsize=1)
def states():
    return States()


def test_states_in_chunks(monkeypatch):
    made = states()
    long = [made.longer(at, [10 + (7 * n + at) % 70 for n in range(90)]) for at in range(3)]
    right = [
        examine_images.generated(made.model, one.prompt, dict(one.inputs.kwargs))[0] for one in long
    ]
    monkeypatch.setattr(scheduler, "CHUNK", 20)
    monkeypatch.setattr(prefill, "CHUNK", 30)
    pairs = zip([*long, made.requests[3]], [*right, made.right[3]], strict=True)
    drafter = Recited([[*one.prompt, *text] for one, text in pairs], 3)
    assert texts(made.target, drafter, [*long, made.requests[3]], 2) == [*right, made.right[3]]


def test_states_behind_a_picture_are_kept_for_a_second_question():
    made, prefixes = states(), PrefixCache(1 << 22)
    tail = [10 + 7 * n % 70 for n in range(150)]
    asked = [made.longer(0, [*tail, 5 + more]) for more in range(3)]
    right = [texts(made.target, Root(), [one], 1)[0] for one in asked]
    looks = []
    visual = made.model.model.visual
    handle = visual.register_forward_hook(lambda *_: looks.append(1))
    seen = []
    for one, text in zip(asked, right, strict=True):
        before = len(looks)
        assert texts(made.target, Root(), [one], 1, prefixes)[0] == text
        seen.append(len(looks) > before)
    handle.remove()
    assert seen == [True, False, False]


@settings(max_examples=6, deadline=None)
@given(ACTIONS)
def test_rows_with_states_and_pictures_come_and_go(script):
    made = states()
    pairs = zip(made.requests, made.right, strict=True)
    drafter = Recited([[*one.prompt, *text] for one, text in pairs], 3)
    run = EngineRun(Engine(made.target, drafter, verifiers.get("match")), 2, 256)
    who, found = [], []

    def step():
        for block in run.step():
            found[block.request_id] += block.token_ids

    for action, pick in script:
        left = [number for number, reason in enumerate(run.reasons) if reason is None]
        if action == "s":
            who.append(pick % len(made.requests))
            found.append([])
            run.submit(made.requests[who[-1]])
        elif action == "t":
            step()
        elif left:
            run.end(left[pick % len(left)], "cancelled" if action == "c" else "stop")
    run.close()
    while not run.done:
        step()
    for number, text in enumerate(found):
        whole = made.right[who[number]]
        assert text == (whole if run.reason(number) == "length" else whole[: len(text)])


def test_a_model_that_writes_pictures_is_guided_as_by_generate():
    """Emu3, whose vocabulary has its pictures: two rows, the second without the condition."""
    model = picture_forms.built("emu3")
    prompt, null, count = [7, 9, 11, 13], {9: 5, 11: 5}, 16
    visual = range(60, 76)  # what its vocabulary calls visual tokens

    def only_visual(batch, ids):
        return [*visual]

    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            negative_prompt_ids=torch.tensor([[null.get(token, token) for token in prompt]]),
            negative_prompt_attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            guidance_scale=3.0,
            prefix_allowed_tokens_fn=only_visual,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    right = found[0, len(prompt) :].tolist()
    assert len(set(right)) > 4
    target = GuidedModel(adapt(model), 3.0, null)
    others = {token: float("-inf") for token in range(128) if token not in visual}
    how = SamplingParams(0, logit_bias=others)
    request = Request(prompt, how, StopConditions(count))
    for width in (1, 3):
        drafter = Recited([[*prompt, *right]], width)
        assert texts(target, drafter, [request], 1) == [right]
    assert texts(adapt(model), Root(), [request], 1) != [right]
