"""What one tiny random model of a type does, in float32, by arms:

    loads    it is accepted as an object
    folder   and from a folder that it was saved to, with the same texts
    plain    greedy text equals transformers' own `generate`; of encoder-decoders and of the types
             in `OWN`, the argmax of the model's own forward without a cache
    chain    with a perturbed copy of it as draft, chains of four: the text of plain decoding
    tree     the same with trees of 3 x 2 x 1
    batch    prompts of 61, 1 and 5 tokens in one batch: the texts that each has alone
    seeded   in that batch at temperature 0.9: the texts that each has alone, undrafted

An arm is True, or says what is wrong.
"""

import copy
import tempfile
from functools import partial

import torch
from tiny_configurations import config_for, randomise
from transformers import AutoModelForCausalLM

import outrider
from outrider import verifiers
from outrider.costs import Costs
from outrider.drafters import DraftModel, Root
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.models import adapt, pretrained
from outrider.models.auto_classes import auto_class
from outrider.sampling.sampling_params import SamplingParams

LENGTHS = (61, 1, 5)
NEW = 24
LOW, HIGH = 6, 100  #: a prompt's tokens, none of which is special
#: Types whose `generate` gives positions that the model's own forward counts otherwise.
OWN = frozenset(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
)
_COSTS = Costs.of({1: 1.0, 2: 1.1, 8: 1.5})
_GREEDY = SamplingParams(0.0)


def built(kind):
    """A tiny random model of this type, causal where there is one."""
    config = config_for(kind)
    torch.manual_seed(0)
    causal = type(config) in AutoModelForCausalLM._model_mapping
    cls = AutoModelForCausalLM if causal else auto_class(config)
    return randomise(pretrained.empty_model(cls, config, trust=False))


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


@torch.inference_mode()
def own_forward(target, prompt, inputs):
    """Greedy text by the model's own forward of the whole text, token by token."""
    text = list(prompt)
    for _ in range(NEW):
        logits = target.runner.plain(torch.tensor([text]), inputs)
        text.append(int(logits[0, -1, : target.vocab_size].argmax()))
    return text[-NEW:]


def loaded(given):
    """A speculator of this target with nothing to draft; nothing is measured."""
    return outrider.load(
        given,
        drafter="root",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=_COSTS,
        generation_config="none",
    )


def texts(target, drafter, rows, params, inputs=None):
    """The texts of these prompts, drafted and decoded in one batch."""
    engine = Engine(target, drafter, verifiers.get("match"))
    run = engine.run(rows, params, StopConditions(NEW), inputs=inputs)
    out = [[] for _ in rows]
    for block in run:
        out[block.row] += block.token_ids
    return out


def alone(target, drafter, rows, params, inputs=None):
    """The same, each prompt in a batch of its own."""
    each = zip(rows, params, inputs or [None] * len(rows), strict=True)
    return [
        texts(target, drafter(), [row], [param], None if given is None else [given])[0]
        for row, param, given in each
    ]


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
    """The kind of an error and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def attempted(call):
    """What a call answers, or what its error says."""
    try:
        return call()
    except Exception as error:  # whatever a family raises is a finding
        return first_line(error)


def examine(kind):
    """The findings on a type, by arm; "built" alone where there is no tiny model of it."""
    try:
        model = built(kind)
    except Exception as error:
        return {"built": first_line(error)}
    found = {"class": type(model).__name__}
    speculator = attempted(lambda: loaded(model))
    if isinstance(speculator, str):
        found["loads"] = speculator
        return found
    found["loads"] = True
    target, rows = speculator.engine.target, prompts()
    inputs = None
    if target.reads == "source":
        source = target.probe(len(rows))._replace(encoded=None)
        inputs = [source.take([row]) for row in range(len(rows))]
    greedy = [_GREEDY] * len(rows)
    sampled = [SamplingParams(0.9, seed=11 + row) for row in range(len(rows))]
    plain = attempted(lambda: alone(target, Root, rows, greedy, inputs))
    if isinstance(plain, str):
        return found | {"plain": plain}
    found["plain"] = attempted(lambda: same(plain, expected(kind, model, target, rows, inputs)))
    beside = adapt(perturbed(model), vocab_size=target.vocab_size, chain_only=not target.trees)
    chain, tree = (partial(DraftModel, beside, n, coupled=True) for n in ((1,) * 4, (3, 2, 1)))
    widest = tree if target.trees else chain
    found["chain"] = attempted(lambda: same(alone(target, chain, rows, greedy, inputs), plain))
    found["tree"] = "chains only"
    if target.trees:
        found["tree"] = attempted(lambda: same(alone(target, tree, rows, greedy, inputs), plain))
    found["batch"] = attempted(lambda: same(texts(target, widest(), rows, greedy, inputs), plain))
    found["seeded"] = attempted(
        lambda: same(
            texts(target, widest(), rows, sampled, inputs),
            alone(target, Root, rows, sampled, inputs),
        )
    )
    found["folder"] = folder(model, rows, plain, inputs)
    return found


def expected(kind, model, target, rows, inputs):
    """Greedy texts by transformers alone."""
    if inputs is None and kind not in OWN:
        return [generated(model, row) for row in rows]
    given = inputs or [None] * len(rows)
    return [own_forward(target, row, source) for row, source in zip(rows, given, strict=True)]


def folder(model, rows, plain, inputs):
    """Whether the model says the same from a folder that it was saved to."""
    with tempfile.TemporaryDirectory() as place:

        def again():
            model.save_pretrained(place)
            return same(
                alone(loaded(place).engine.target, Root, rows, [_GREEDY] * len(rows), inputs),
                plain,
            )

        said = attempted(again)
    return said.replace(place, "FOLDER") if isinstance(said, str) else said


def same(mine, right):
    """True, or where texts part."""
    for row, (text, other) in enumerate(zip(mine, right, strict=True)):
        if text != other:
            pairs = enumerate(zip(text, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
            return f"row {row} differs from token {at}"
    return True
