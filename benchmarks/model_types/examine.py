"""What one tiny random model of a type does, in float32, by arms:

    loads    it is accepted as an object
    folder   and from a folder that it was saved to, with the same texts
    plain    greedy text equals transformers' own `generate`; of encoder-decoders and of the types
             in `OWN`, the argmax of the model's own forward without a cache
    chain    drafted in chains of four, every third token of which is wrong: the text undrafted
    tree     the same with two wrong siblings beside each right token
    batch    prompts of 61, 1 and 5 tokens in one batch: the texts that each has alone
    seeded   in that batch at temperature 0.9: the texts that each has alone, undrafted

An arm is True, or says what is wrong.
"""

import tempfile

import source_models
import torch
from tiny_configurations import config_for, randomise
from tiny_media import given_to, of_text
from transformers import AutoModelForCausalLM

import outrider
from outrider import verifiers
from outrider.costs import Costs
from outrider.drafters import Root
from outrider.drafters.deterministic_tree import HostTree, trees
from outrider.drafters.memory import Forgetful
from outrider.drafters.tree_drafting import shapes
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.models import pretrained
from outrider.models.auto_classes import auto_class
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import DrawKind

LENGTHS = (61, 1, 5)
NEW = 20
LOW, HIGH = 6, 100  #: a prompt's tokens, none of which is special
#: Types whose `generate` gives positions that the model's own forward counts otherwise.
OWN = frozenset(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
)
_COSTS = Costs.of({1: 1.0, 2: 1.1, 8: 1.5})
_GREEDY = SamplingParams(0.0)


def built(kind):
    """A tiny random model of this type, causal where there is one."""
    if kind in source_models.IMAGE_FAMILIES:  # whose defaults are no whole model
        return source_models.tiny(source_models.IMAGE_FAMILIES[kind])
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
    out = of_text(model).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **given_to(model, prompt, {})[1],
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
def own_forward(target, model, prompt, inputs):
    """Greedy text by the model's own forward of the whole text, token by token."""
    text = list(prompt)
    for _ in range(NEW):
        logits = target.runner.plain(torch.tensor([text]), inputs)
        if logits is None:  # a lean runner has the weights alone
            source = {"input_ids": inputs.ids_BS, "attention_mask": inputs.mask_BS.long()}
            logits = model(**source, decoder_input_ids=torch.tensor([text])).logits
        text.append(int(logits[0, -1, : target.vocab_size].argmax()))
    return text[-NEW:]


def loaded(given):
    """A speculator of this target with nothing to draft; nothing is measured."""
    return outrider.load(
        given,
        drafter="none",
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


class Recited(Forgetful):
    """Drafts what is known to come, with planted errors: what a good draft model does, for free.

    Every third token is wrong; with `width` above 1 each has so many wrong siblings, the first of
    which has a child of its own.
    """

    name = "recited"
    kinds = frozenset({DrawKind.FIXED})
    depth = 4

    def __init__(self, known, width=1):
        self.known, self.width = known, width
        self.shapes = shapes.of_levels(width if width == 1 else width + 1, self.depth)

    def propose(self, memory, context, shape):
        """The rest of the text that begins as each row's does."""
        count, grown = shape.max_depth, []
        lengths = context.length_B.tolist()
        for text, length in zip(context.tokens_BL.tolist(), lengths, strict=True):
            text = text[:length]
            rest = next(known[length:] for known in self.known if known[:length] == text)
            grown.append(self._grown(text[-1], rest[:count], length))
        return trees(grown, DrawKind.FIXED)

    def _grown(self, pending, rest, length):
        tokens, parents, above = [pending], [-1], 0
        for at, token in enumerate(rest, start=length):
            wrong = [LOW + (token + step) % (HIGH - LOW) for step in range(1, self.width + 1)]
            wrong = [other for other in wrong if other != token]
            level = [wrong[0]] if at % 3 == 0 and self.width == 1 else [token]
            if self.width > 1:
                level = [wrong[0], token, *wrong[1 : self.width - 1]]
            first = len(tokens)
            tokens += level
            parents += [above] * len(level)
            if self.width > 1:
                tokens.append(token)
                parents.append(first)  # below a wrong one
            above = first + level.index(token) if token in level else first
        return HostTree(tokens, parents)


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
    plain = attempted(lambda: alone(target, Root, rows, greedy, inputs))
    if isinstance(plain, str):
        return found | {"plain": plain}
    found["plain"] = attempted(lambda: same(plain, expected(kind, model, target, rows, inputs)))
    known = [[*row, *text] for row, text in zip(rows, plain, strict=True)]
    found["chain"] = drafted(target, Recited(known), rows, greedy, inputs, plain)
    found["tree"] = "chains only"
    width = 3 if target.trees else 1
    if target.trees:
        found["tree"] = drafted(target, Recited(known, width), rows, greedy, inputs, plain)
    found["batch"] = attempted(
        lambda: same(texts(target, Recited(known, width), rows, greedy, inputs), plain)
    )
    found["seeded"] = attempted(lambda: seeded(target, width, rows, inputs))
    found["folder"] = folder(model, rows, plain, inputs)
    return found


def drafted(target, drafter, rows, params, inputs, plain):
    """Whether drafted texts, each alone, are the plain ones."""
    return attempted(lambda: same(alone(target, lambda: drafter, rows, params, inputs), plain))


def seeded(target, width, rows, inputs):
    """Whether sampled texts in a drafted batch are those that each has alone, undrafted."""
    params = [SamplingParams(0.9, seed=11 + row) for row in range(len(rows))]
    right = alone(target, Root, rows, params, inputs)
    known = [[*row, *text] for row, text in zip(rows, right, strict=True)]
    return same(texts(target, Recited(known, width), rows, params, inputs), right)


def expected(kind, model, target, rows, inputs):
    """Greedy texts by transformers alone."""
    if inputs is None and kind not in OWN:
        return [generated(model, row) for row in rows]
    given = inputs or [None] * len(rows)
    return [
        own_forward(target, model, row, source) for row, source in zip(rows, given, strict=True)
    ]


def folder(model, rows, plain, inputs):
    """Whether the model says the same from a folder that it was saved to."""
    with tempfile.TemporaryDirectory() as place:

        def again():
            model.save_pretrained(place)
            target, last = loaded(place).engine.target, slice(-1, None)
            given = None if inputs is None else inputs[last]
            return same(alone(target, Root, rows[last], [_GREEDY], given), plain[last])

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
