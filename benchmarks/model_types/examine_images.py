"""What one tiny random model of a type does with pictures in its prompts, by arms:

    plain    greedy texts behind three unequal pictures equal transformers' own `generate`
    chain    drafted in chains of four, every third token of which is wrong: the same texts
    tree     the same with two wrong siblings beside each right token
    batch    three pictures and a text without any in one drafted batch: the texts of each alone
    seeded   in that batch at temperature 0.9: the texts that each has alone, undrafted

Encoder-decoders read a picture as their source: `plain` behind three sources, and no text without.

An arm is True, or says what is wrong; "prompt" alone where no prompt with a picture is known that
transformers' own class reads.
"""

import media_models
import picture_forms
import torch
from examine import Recited, attempted, first_line, same
from source_models import IMAGE_FAMILIES, read_as_sources
from tiny_media import given_to, of_text

from outrider import verifiers
from outrider.drafters import Root
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request, StopConditions
from outrider.models import adapt
from outrider.models.config import closers, placeholders
from outrider.models.decoder import media_of
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import MultiModalInputs

NEW = 12
TRIES = 4  #: sets of pictures, until no two tokens of a text tie
TIE = 1e-4  #: logits nearer than that may swap by rounding alone
TEXT = [7, 9, 11, 13]


@torch.inference_mode()
def generated(model, ids, kwargs, **options):
    """What transformers writes, and the least distance of two best logits on the way."""
    asked = model if kwargs else of_text(model)
    ids, kwargs = given_to(model, ids, kwargs)
    ids_1L = torch.tensor([ids])
    found = asked.generate(
        input_ids=ids_1L,
        attention_mask=torch.ones_like(ids_1L),
        **kwargs,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(found.logits).topk(2).values
    return found.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def texts(target, drafter, requests):
    """The texts of these requests in one batch. Raises the first error of a request."""
    run = EngineRun(Engine(target, drafter, verifiers.get("match")), len(requests), 512)
    run.submit_all(requests)
    run.close()
    found = [[] for _ in requests]
    for block in run:
        found[block.request_id] += block.token_ids
    for number, reason in enumerate(run.reasons):
        if reason == "error":
            raise run.errors[number]
    return found


def material(kind):
    """A tiny model, its prompts [(ids, arguments)], and what transformers writes behind each."""
    if kind in media_models.TYPES:
        model = media_models.made(kind)
    else:
        model = picture_forms.built(kind)
    for first in range(0, 3 * TRIES, 3):
        if kind in media_models.TYPES:
            rows = [
                media_models.prompt(kind, model, first + at, ahead=2 + 3 * at, size=at % 2)
                for at in range(3)
            ]
        else:
            rows = picture_forms.prompts(model, lambda *row: generated(model, *row), first)
        rows.append((TEXT, {}))
        right = [generated(model, *row) for row in rows]
        if min(apart for _, apart in right) > TIE:
            break
    return model, rows, [text for text, _ in right]


def source_text(model, **given):
    """What transformers writes of a source."""
    found = model.generate(
        **given,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, -NEW:].tolist()


def examine(kind):
    """The findings on a type, by arm; "prompt" alone where there is no prompt with a picture."""
    try:
        if kind in IMAGE_FAMILIES:
            model, rows, inputs, right = read_as_sources(IMAGE_FAMILIES[kind], source_text)
        else:
            model, made, right = material(kind)
            reader = media_of(adapt(model))
            stands = placeholders(model.config) if reader is None else reader.placeholders
            rows = [ids for ids, _ in made]
            marks = closers(model.config)
            inputs = [
                MultiModalInputs(kwargs, stands, marks) if kwargs else None for _, kwargs in made
            ]
    except Exception as error:
        return {"prompt": first_line(error)}

    def requests(params):
        return [
            Request(ids, how, StopConditions(NEW), inputs=given)
            for ids, how, given in zip(rows, params, inputs, strict=True)
        ]

    def recited(known, width):
        pairs = zip(rows, known, strict=True)
        return Recited([[*ids, *text] for ids, text in pairs], width)

    def alone(drafter, asked):
        return [texts(target, drafter, [one])[0] for one in asked]

    def seeded():
        plain = alone(Root(), drawn)
        return same(texts(target, recited(plain, width), drawn), plain)

    greedy = requests([SamplingParams(0)] * len(rows))
    drawn = requests([SamplingParams(0.9, seed=11 + row) for row in range(len(rows))])
    target = attempted(lambda: adapt(model))
    if isinstance(target, str):
        return {"plain": target}
    width = 3 if target.trees else 1
    found = {"plain": attempted(lambda: same(alone(Root(), greedy), right))}
    if found["plain"] is True:
        found["chain"] = attempted(lambda: same(alone(recited(right, 1), greedy), right))
        found["tree"] = "chains only"
        if target.trees:
            found["tree"] = attempted(lambda: same(alone(recited(right, 3), greedy), right))
        found["batch"] = attempted(
            lambda: same(texts(target, recited(right, width), greedy), right)
        )
        found["seeded"] = attempted(seeded)
    return found
