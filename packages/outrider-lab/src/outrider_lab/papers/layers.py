"""Which of a target's layers can be left out of a draft, and what that can gain at most.

Draft & Verify (Zhang et al. 2024) and LayerSkip (Elhoushi et al. 2024): the layers that are left
read the entries that the whole target has written for the text (`drafter="layer_skip"`). On texts
that the target has written, every position is a draft of one token:

    alpha     at T = 0 the share of positions where both take the same token, else E[sum min(p, q)]
    c         weights that a draft's call reads over those of the target's: layers and output layer
    speed-up  the best of E / (gamma c + 1) over gamma, as if verification cost one call whatever
              gamma is, and the host nothing

Candidates are early exits, and layers left out in two orders: those that change their input least
(cosine of a layer's input and output), and those whose absence alone costs least (ablation).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import SamplingParams, Speculator, Stop
from outrider.cli.console import Show
from outrider.models import layer_subset
from outrider.models.prefill import causal
from outrider.models.sources import ModelSource
from outrider.text.prompts import encode
from outrider.types import LanguageModel, Nodes
from outrider_lab.bench import intervals
from outrider_lab.drafters.layer_skip import part
from outrider_lab.flops import empty
from outrider_lab.papers import record
from outrider_lab.theory import length

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  #: of the layers that are left out
EXITS = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 14 / 15)  #: layers that are run, of all
DEEPEST = 12  #: longest chain that a speed-up is looked for at


@dataclass(frozen=True)
class LayersAmount:
    """How much is measured."""

    prompts: int = 24
    new_tokens: int = 96
    temperature: float = 0.7


class Written(NamedTuple):
    """A text of the target: what it said at each place of its answer, and what it has read."""

    cache: object
    tokens_1m: Tensor  #: the answer's tokens, shifted: what each law stands behind
    at_1m: Tensor  #: their positions
    best_m: Tensor
    law_mV: Tensor
    cosines: Tensor  #: of each layer's input and output, but for the last one's


_SPARE = 128  #: slots behind a text, for nodes that narrow calls are padded with


@torch.inference_mode()
def written(
    target: LanguageModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    layers: int,
    temperature: float,
) -> Written:
    """The target's own laws along an answer; its cache stays for drafts to read."""
    text = torch.tensor([[*prompt, *answer]], device=target.device)
    size, many = text.shape[1] - 1, len(answer)
    capacity = target.width(size + many + _SPARE)
    cache, at = target.open(1, capacity), torch.arange(size, device=target.device)[None]
    nodes = causal(text[:, :-1], at, capacity)
    output = target.forward(cache, nodes, last=many, aux_layers=tuple(range(layers)))
    logits, states = output.logits_BQV, output.hidden
    pairs = pairwise(states)
    cosines = [torch.cosine_similarity(a.float(), b.float(), -1).mean() for a, b in pairs]
    return Written(
        cache,
        text[:, -many - 1 : -1],
        at[:, -many:],
        logits[0].argmax(-1),
        (logits[0].float() / temperature).softmax(-1),
        torch.stack(cosines) if cosines else torch.zeros(0, device="cpu"),
    )


@torch.inference_mode()
def agreement(model: LanguageModel, texts: Sequence[Written], temperature: float) -> record.Row:
    """What is accepted of drafts of one token by some of the layers, at temperature 0 and another.

    Sums over the places of each text.

    Every place sees what the target has written for the text ahead of it, and its own entries,
    which go to slots behind the text: no draft sees another's.
    """
    found: dict[str, list[float]] = {name: [] for name in ("greedy", "drawn", "places")}
    for text in texts:
        many = text.at_1m.shape[1]
        wide = model.width(int(text.at_1m[0, -1]) + 1 + many)
        slots = text.at_1m[:, -1:] + 1 + torch.arange(many, device=text.at_1m.device)
        number = torch.arange(wide, device=slots.device)
        seen = (number < text.at_1m[..., None]) | (number == slots[..., None])
        nodes = Nodes(text.tokens_1m, text.at_1m, slots, seen, slots[:, 0])
        logits = model.forward(text.cache, nodes).logits_BQV[0]
        law_mV = (logits.float() / temperature).softmax(-1)
        found["greedy"].append(float((logits.argmax(-1) == text.best_m).sum()))
        found["drawn"].append(float(torch.minimum(law_mV, text.law_mV).sum()))
        found["places"].append(many)
    return found


def alpha_of(found: record.Row, how: str) -> intervals.Interval:
    """alpha at temperature 0 ("greedy") or at the other one ("drawn"), over texts."""
    return intervals.quotient(found[how], found["places"], intervals.SHARE)


class LayerWeights(NamedTuple):
    """How many weights a token needs: of each layer, and of the output layer."""

    layers: tuple[int, ...]
    head: int

    @classmethod
    def of(cls, source: str) -> "LayerWeights":
        """Counted in an empty model of that configuration."""
        model = empty(ModelSource(source, "target"))
        stack = layer_subset.layers_of(model)
        each = (sum(weight.numel() for weight in layer.parameters()) for layer in stack)
        head = model.get_output_embeddings()
        return cls(tuple(each), 0 if head is None else head.weight.numel())

    def share(self, kept: Sequence[int]) -> float:
        """c: what a draft of these layers reads of what the target reads."""
        return (sum(self.layers[n] for n in kept) + self.head) / (sum(self.layers) + self.head)


class _Trial:
    """Measurements of parts of a target on its texts; finished ones are read again."""

    def __init__(
        self,
        target: Speculator,
        prompts: Sequence[record.Row],
        out: Path,
        progress: Show,
        amount: LayersAmount,
    ) -> None:
        self.model, self.amount, self.progress = target.engine.target, amount, progress
        self.weights = LayerWeights.of(target.notes.target)
        self.layers = len(self.weights.layers)
        part(self.model, range(self.layers))  # what cannot run so is refused here
        of = {"of": record.of_prompts(prompts)}
        settings = vars(amount) | record.of_pair(target.notes) | of
        self.store = record.Store(out, "layers", settings)
        self.texts = []
        for number, row in enumerate(prompts):
            progress("texts of the target", number, len(prompts))
            prompt = encode(target.tokenizer, row["prompt"].rstrip())
            stop = Stop(amount.new_tokens, token_ids=())
            answer = target.generate([prompt], SamplingParams(0), stop).completions[0].token_ids
            self.texts.append(written(self.model, prompt, answer, self.layers, amount.temperature))

    def alpha(self, kept: Sequence[int]) -> record.Row:
        """Of a draft by these layers."""
        key = ",".join(map(str, kept))
        self.progress(f"{len(kept)} of {self.layers} layers", len(self.store.rows), self.steps)
        return self.store.get(
            key, lambda: agreement(part(self.model, kept), self.texts, self.amount.temperature)
        )

    @property
    def steps(self) -> int:
        """About how many measurements there are."""
        return self.layers + len(EXITS) + 2 * len(SHARES)

    def row(self, how: str, kept: Sequence[int]) -> record.Row:
        """A line of the table."""
        out = [number for number in range(self.layers) if number not in kept]
        found, cost = self.alpha(kept), self.weights.share(kept)
        left_out = f"{out[0]} to {out[-1]}" if how == "early exit" else str(out)[1:-1]
        row: record.Row = {"order": how, "left out": left_out, "c": cost}
        heats = {"greedy": "T = 0", "drawn": f"T = {self.amount.temperature:g}"}
        for name, heat in heats.items():
            alpha = alpha_of(found, name)
            gamma, gain = best(alpha.value, cost)
            row |= {f"alpha, {heat}": alpha.value, f"95 %, {heat}": alpha.text()}
            row |= {f"speed-up, {heat}": gain, f"gamma, {heat}": gamma}
        return row


def best(alpha: float, cost: float) -> tuple[int, float]:
    """The best length of a draft up to DEEPEST and its ideal speed-up; none at all is 1.

    >>> best(0.5, 0.9)
    (0, 1.0)
    """
    gamma = length.best_length(min(alpha, 1.0), cost, DEEPEST)
    return gamma, length.speedup(min(alpha, 1.0), gamma, cost)


def run(
    target: Speculator,
    prompts: Sequence[record.Row],
    out: Path,
    progress: Show,
    amount: LayersAmount,
) -> record.Tables:
    """The table of candidates, and of each layer alone.

    Raises UnsupportedModel for targets whose layers do not run on their cache.
    """
    trial = _Trial(target, prompts[: amount.prompts], out, progress, amount)
    have = trial.layers
    cosines = torch.stack([text.cosines for text in trial.texts]).mean(0).tolist()
    every = range(have)
    singles = [
        alpha_of(trial.alpha([n for n in every if n != left]), "drawn").value for left in every
    ]
    orders = {
        "cosine": sorted(range(have - 1), key=lambda n: -cosines[n]),
        "ablation": sorted(every, key=lambda n: -singles[n]),
    }
    exits = sorted({min(max(round(share * have), 1), have - 1) for share in EXITS})
    counts = sorted({min(max(round(share * have), 1), have - 1) for share in SHARES})
    table = [trial.row("early exit", range(leave)) for leave in exits]
    for name, order in orders.items():
        left_out = (set(order[:count]) for count in counts)
        table += [trial.row(name, [n for n in every if n not in left]) for left in left_out]
    each = [
        {"layer": n, "cosine": (*cosines, None)[n], "alpha without it": singles[n]} for n in every
    ]
    tables = {"layers": table, "each": each}
    trial.store.write(tables)
    return tables


def verdict(table: Sequence[record.Row], prompts: int) -> str:
    """What to do about it, in a sentence or two; nothing from few prompts.

    The best of two dozen candidates on the same texts flatters itself a little.
    """
    if prompts < intervals.LEAST:
        return f"fewer than {intervals.LEAST} prompts: no verdict; leave --quick out"
    columns = [name for name in table[0] if name.startswith("speed-up")]
    top = max(table, key=lambda row: sum(row[name] for name in columns))
    if max(top[name] for name in columns) <= 1.02:
        return (
            "No layers can be left out of a draft with a gain, even if verification and host were "
            "free: use another drafter."
        )
    each = ", ".join(f"{top[name]:.2f}x at {name.split(', ')[1]}" for name in columns)
    if top["order"] == "early exit":
        option = f"exit={top['left out'].split(' ')[0]}"
    else:
        option = f"skip={top['left out'].replace(' ', '')}"
    return (
        f"At most {each} with free verification and host: --drafter layer_skip --drafter-option "
        f"{option}"
    )
