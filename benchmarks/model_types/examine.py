"""What one tiny model of a type does: loads, plain = generate, drafts = plain, rows = alone."""

import copy
import tempfile

import torch
from tiny_configurations import config_for, randomise

import outrider
from outrider import verifiers
from outrider.costs import Costs
from outrider.drafters import DraftModel, Root
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.models import TreeDecoder, adapt
from outrider.models.sources import auto_class
from outrider.sampling.sampling_params import SamplingParams

LENGTHS = (61, 1, 5)
NEW = 24
#: A prompt's and a text's tokens: 3 to 99, so that none is special.
LOW, HIGH = 3, 100
ARMS = ("folder", "plain", "chain", "tree", "batch", "seeded")
_COSTS = Costs.of({1: 1.0, 2: 1.1, 8: 1.5})


def built(kind, auto=None):
    """A tiny random model of this type."""
    config = config_for(kind)
    torch.manual_seed(0)
    model = (auto or auto_class(config)).from_config(config)
    return randomise(model)


def prompts():
    """One longer than any window of the tiny models, one of a single token, one in between."""
    random = torch.Generator().manual_seed(7)
    return [torch.randint(LOW, HIGH, (n,), generator=random).tolist() for n in LENGTHS]


@torch.inference_mode()
def generated(model, prompt):
    """Greedy text by transformers' own `generate`."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        disable_compile=True,
    )
    return out[0, -NEW:].tolist()


def loaded(given):
    """A speculator of this target with nothing to draft; nothing is measured."""
    how = {"dtype": "float32", "threads": 1, "pack_weights": False, "device": "cpu"}
    return outrider.load(
        given, drafter="root", step_costs=_COSTS, generation_config="none", tokenizer=None, **how
    )


def texts(target, drafter, rows, params):
    """The texts of these prompts in one batch, and how many tokens a call of the target gave."""
    run = Engine(target, drafter, verifiers.get("match")).run(rows, params, StopConditions(NEW))
    out = [[] for _ in rows]
    for block in run:
        out[block.row] += block.token_ids
    return out


def perturbed(model):
    """A draft that is right now and then: the target with a little noise on its weights."""
    other = copy.deepcopy(model)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += 0.02 * torch.randn(weight.shape, generator=random)
    return other


def first_line(error):
    """The kind of an error and what it says, without places of this machine."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"


def examine(kind, auto=None):
    """Findings by arm: True, or what is wrong in a few words; "loads" alone where it is refused."""
    found = {}
    try:
        model = built(kind, auto)
    except Exception as error:
        return {"built": first_line(error)}
    found["class"] = type(model).__name__
    rows = prompts()
    try:
        expected = [generated(model, row) for row in rows]
    except Exception as error:
        expected = None
        found["generate"] = first_line(error)
    try:
        speculator = loaded(model)
    except Exception as error:
        found["loads"] = first_line(error)
        found["folder"] = folder(model, None)
        return found
    found["loads"] = True
    target = speculator.engine.target
    greedy = [SamplingParams(0.0)] * len(rows)
    sampled = [SamplingParams(0.9, seed=11 + row) for row in range(len(rows))]
    try:
        plain = [texts(target, Root(), [row], [SamplingParams(0.0)])[0] for row in rows]
    except Exception as error:
        found["plain"] = first_line(error)
        return found
    if expected is not None:
        found["plain"] = same(plain, expected)
    draft = adapt(perturbed(model), vocab_size=target.vocab_size) if target.trees else None
    arms = {
        "chain": (lambda: DraftModel(beside, (1,) * 4, coupled=True), greedy, plain),
        "tree": (lambda: DraftModel(beside, (3, 2, 1), coupled=True), greedy, plain),
    }
    beside = draft or TreeDecoder(target.runner, target.vocab_size)
    for arm, (drafter, params, right) in arms.items():
        if arm == "tree" and not target.trees:
            found[arm] = "chains only"
            continue
        try:
            each = [
                texts(target, drafter(), [row], [param])[0]
                for row, param in zip(rows, params, strict=True)
            ]
            found[arm] = same(each, right)
        except Exception as error:
            found[arm] = first_line(error)
    counts = (3, 2, 1) if target.trees else (1,) * 4
    try:
        found["batch"] = same(
            texts(target, DraftModel(beside, counts, coupled=True), rows, greedy), plain
        )
    except Exception as error:
        found["batch"] = first_line(error)
    try:
        alone = [
            texts(target, Root(), [row], [param])[0]
            for row, param in zip(rows, sampled, strict=True)
        ]
        drafted = texts(target, DraftModel(beside, counts, coupled=True), rows, sampled)
        found["seeded"] = same(drafted, alone)
    except Exception as error:
        found["seeded"] = first_line(error)
    found["folder"] = folder(model, plain)
    return found


def folder(model, plain):
    """Whether the model says the same from a folder that it was saved to."""
    with tempfile.TemporaryDirectory() as place:
        try:
            model.save_pretrained(place)
            speculator = loaded(place)
            if plain is None:
                return True
            target = speculator.engine.target
            again = [texts(target, Root(), [row], [SamplingParams(0.0)])[0] for row in prompts()]
        except Exception as error:
            return first_line(error).replace(place, "FOLDER")
    return same(again, plain)


def same(texts, right):
    """True, or where texts part."""
    for row, (mine, other) in enumerate(zip(texts, right, strict=True)):
        if mine != other:
            pairs = enumerate(zip(mine, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(other)))
            return f"row {row} differs from token {at}"
    return True
