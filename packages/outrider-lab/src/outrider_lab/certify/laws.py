"""The law of every emitted token, from one causal forward over the finished text.

Independent of the engine: no tree, no draft, no rollback; a fresh cache, one block. The same pass
over the draft model gives its law at the same prefixes, which only serves to choose what to test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters.draft_model import model_of
from outrider.drafters.tree_drafting.growth import inputs_for
from outrider.engine.batch import encoded, references
from outrider.engine.request import source_ids
from outrider.models.prefill import causal, ingest
from outrider.row_params import SamplingRows
from outrider.sampling import logits_processors
from outrider.sampling.sampling_params import SamplingParams, rows
from outrider.tree import chain
from outrider.types import Context, Drafter, Inputs, LanguageModel, Laws
from outrider_lab.drafters.layer_skip import LayerSkip
from outrider_lab.drafters.lookahead import Lookahead


@dataclass(frozen=True)
class CertifiedText:
    """A prompt, what was generated after it, the seed it was generated with, and its source."""

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    seed: int = 0
    inputs: Inputs | None = field(default=None, compare=False, repr=False)  #: one row


class Scored(NamedTuple):
    """The emitted tokens of B texts, padded to T, with a law for each."""

    token_BT: Tensor
    valid_BT: Tensor
    position_BT: Tensor  #: absolute position of the token, as noise is keyed
    laws: Laws


class Padded(NamedTuple):
    """Texts side by side."""

    tokens_BL: Tensor
    prompt_B: Tensor
    new_B: Tensor
    sampling: SamplingRows


def pad(
    texts: Sequence[CertifiedText], sampling: SamplingParams, device: torch.device, vocab: int = 0
) -> Padded:
    """Right-padded tokens and lengths. `vocab` is needed where `sampling` shapes logits."""
    whole = [text.prompt + text.new for text in texts]
    most = max(map(len, whole))
    tokens = torch.zeros(len(texts), most, dtype=torch.int64, device="cpu")
    for row, ids in enumerate(whole):
        tokens[row, : len(ids)] = torch.tensor(ids, device="cpu")
    settings = [replace(sampling, seed=text.seed) for text in texts]
    prompts = [text.prompt for text in texts]
    # stop tokens are tokens like any other here, as in the runs that are certified
    stops = [()] * len(texts)
    settings = logits_processors.validate(settings, prompts, stops, vocab, device)
    shaped = logits_processors.build(
        settings,
        prompts,
        stops,
        vocab,
        device,
        ends=[len(ids) for ids in whole],
        sources=[source_ids(text.inputs) for text in texts],
    )
    return Padded(
        tokens.to(device),
        torch.tensor([len(t.prompt) for t in texts], device=device),
        torch.tensor([len(t.new) for t in texts], device=device),
        rows(settings, device)._replace(shaping=shaped),
    )


@torch.inference_mode()
def score(model: LanguageModel, texts: Sequence[CertifiedText], sampling: SamplingParams) -> Scored:
    """Teacher-force the texts: the model's law of each emitted token, given what came before.

    Penalties, biases and processors act on it as they do while decoding: with the text so far.
    """
    device = torch.device(model.device)
    padded = pad(texts, sampling, device, model.vocab_size)
    tokens, prompt, new = padded.tokens_BL, padded.prompt_B, padded.new_B
    batch, length = tokens.shape
    least = min(len(text.prompt) for text in texts)
    at = torch.arange(length - 1, device=device)[None].expand(batch, -1)
    capacity = model.width(length)
    cache = model.open(batch, capacity, read(model, texts))
    nodes = causal(tokens[:, :-1], at, capacity)
    logits = model.forward(cache, nodes, last=length - least).logits_BQV
    step = torch.arange(int(new.max()), device=device)
    where = (prompt[:, None] + step).clamp(max=length - 1)
    row = where - least
    if int(prompt.max()) == least:
        logits = logits[:, : len(step)]
    else:
        logits = logits.gather(1, row[..., None].expand(-1, -1, logits.shape[2]))
    token_BT = tokens.gather(1, where)
    shaped = padded.sampling.shaping
    if shaped is not None:  # the last token of the prompt and what follows: a chain, its root first
        context = Context(tokens, prompt, int(prompt.max()), padded.sampling)
        chained = torch.cat([tokens.gather(1, prompt[:, None] - 1), token_BT[:, :-1]], 1)
        seen = step < new[:, None]  # processors are not asked about what lies behind a text's end
        tree = chain(len(step) - 1, device)
        logits = logits_processors.apply(logits, shaped, context, chained, tree, alive_BR=seen)
    return Scored(token_BT, step < new[:, None], where, ops.warp(logits, padded.sampling))


def read(model: LanguageModel, texts: Sequence[CertifiedText]) -> Inputs | None:
    """What these texts' rows read besides themselves, together."""
    return encoded(model, [text.inputs for text in texts if text.inputs is not None])


def of_draft(model: LanguageModel, texts: Sequence[CertifiedText]) -> list[CertifiedText]:
    """The texts with what a draft model reads of their sources, which the target has encoded."""
    return [replace(text, inputs=inputs_for(model, text.inputs)) for text in texts]


def law(model: LanguageModel, texts: Sequence[CertifiedText], sampling: SamplingParams) -> Tensor:
    """The model's law of each emitted token, [B, T, V]."""
    return ops.probs(score(model, texts, sampling).laws)


def flatter(
    model: LanguageModel, texts: Sequence[CertifiedText], sampling: SamplingParams
) -> Tensor:
    """The target's own law at twice the temperature: a q for generators without one."""
    laws = score(model, texts, sampling).laws
    return ops.probs(laws._replace(inverse_temperature_B=laws.inverse_temperature_B / 2))


class DraftGuesses:
    """The draft's law q at every prefix of a text, to choose what to test. Every choice is fair.

    A drafter with a model: its teacher-forced law.
    Others, and heads on the target's states: what it would propose first, and where that is
    nothing the target's law at twice the temperature. So it is for drafts that are made of what the
    target has computed on the way, too: by itself a text does not tell these.
    """

    def __init__(self, drafter: Drafter, target: LanguageModel) -> None:
        self.drafter, self.target = drafter, target
        self.vocab_size = target.vocab_size
        self.model = model_of(drafter)
        #: layers of the target read what it has written, and guesses are refined while it writes
        self.flat = not drafter.kinds or isinstance(drafter, LayerSkip | Lookahead)

    def __call__(self, texts: Sequence[CertifiedText], sampling: SamplingParams) -> Tensor:
        """q_BTV, rows that sum to one (or to zero where nothing would be proposed)."""
        if self.model is not None and not self.drafter.aux_layers and not self.flat:
            return law(self.model, of_draft(self.model, texts), sampling)
        flat = flatter(self.target, texts, sampling)
        if self.flat:
            return flat
        proposed = self._proposed(texts, sampling).to(flat.device)
        return torch.where(proposed.sum(-1, keepdim=True) > 0, proposed, flat)

    @torch.inference_mode()
    def _proposed(self, texts: Sequence[CertifiedText], sampling: SamplingParams) -> Tensor:
        device = torch.device("cpu")
        padded = pad(texts, sampling, device, self.vocab_size)
        capacity = padded.tokens_BL.shape[1] + self.drafter.shapes[0].max_nodes + 2
        tokens = torch.nn.functional.pad(
            padded.tokens_BL, (0, capacity - padded.tokens_BL.shape[1])
        )
        inputs, found = read(self.target, texts), []
        hidden = self._told(tokens, padded.tokens_BL.shape[1], inputs)
        copied = references([()] * len(texts), inputs, self.vocab_size, device)
        for step in range(int(padded.new_B.max())):
            length = (padded.prompt_B + step).clamp(max=padded.tokens_BL.shape[1])
            bound = int(length.max())
            context = Context(tokens, length, bound, padded.sampling, inputs, copied)
            told = tuple(states[:, : bound - 1] for states in hidden)
            found.append(self._first(context._replace(hidden=told), capacity))
        return torch.stack(found, 1)

    def _told(self, tokens_BL: Tensor, count: int, inputs: Inputs | None) -> list[Tensor]:
        """The target's states of `count` tokens, one for each that the drafter reads."""
        aux_layers, rows = self.drafter.aux_layers, len(tokens_BL)
        if not aux_layers:
            return []
        device = torch.device(self.target.device)
        cache = self.target.open(rows, tokens_BL.shape[1], inputs)
        settled_B = torch.full((rows,), count, device=device)
        chunks = ingest(
            self.target,
            cache,
            tokens_BL.to(device),
            count,
            settled_B=settled_B,
            aux_layers=aux_layers,
        )
        return [torch.cat(states, 1).to(tokens_BL.device) for states in zip(*chunks, strict=True)]

    def _first(self, context: Context, capacity: int) -> Tensor:
        draft = self.drafter.propose(
            self.drafter.open(context, capacity), context, self.drafter.shapes[0]
        )
        batch = draft.tokens_BN.shape[0]
        guess = torch.zeros(batch, self.vocab_size, device="cpu")
        if draft.draws_BNK.shape[2] == 0 or draft.tree.max_depth == 0:
            return guess
        kid = draft.draws_BNK[:, 0].expand(batch, -1)
        row = draft.row_BNK[:, 0].expand(batch, -1)
        placed = torch.zeros_like(guess).scatter_add_(
            1, draft.tokens_BN.gather(1, kid.clamp(min=0)), (kid >= 0).to(guess.dtype)
        )
        guess = placed / placed.sum(-1, keepdim=True).clamp(min=1)
        if draft.laws is not None:
            laws = ops.probs(draft.laws)
            at = row[:, :1, None].clamp(min=0).expand(-1, -1, laws.shape[2])
            first = laws.gather(1, at)[:, 0]
            drawn = (row[:, :1] >= 0) & (kid[:, :1] >= 0)
            guess = torch.where(drawn, first.to(guess.dtype), guess)
        return guess
