"""Planted mistakes: each has been shipped somewhere, each must fail the certification.

A mistake wraps a part of an engine (drafter, rule or target model) and breaks one thing. It names
the configuration that exposes it: some are invisible on chains, others on trees.

    filtered_draft       drawn under top-k, declared without the filter      (transformers #47932)
    argmax_as_softmax    the argmax, declared as a draw from the softmax     (recurrent-drafter #6)
    residual_from_target after a refusal draw from p, not from (p - q)+      (common in ports)
    shared_noise         the draft's Gumbel noise again in the residual      (vLLM #47386)
    dropped_token        a token is dropped because its own q is low         (early-exit drafters)
    reordered_siblings   children sorted by q after drawing                  (tree drafters)
    pooled_odds          a row drafts where another row of its seed was accepted (planners)
    wrong_slot           accepted tree entries are not moved to their slots  (cache roll-back)
    stale_position       siblings get positions by slot instead of by depth  (tree attention)
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from outrider import noise, ops, verifiers
from outrider.drafters import DraftModel
from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError, UnknownName
from outrider.sampling.sampling_params import SamplingParams
from outrider.tree import shallower
from outrider.types import (
    Context,
    Draft,
    Drafter,
    DraftShape,
    DrawKind,
    Draws,
    LanguageModel,
    Nodes,
    Output,
    Scores,
    Verdict,
    Verifier,
)
from outrider_lab.certify.laws import model_of

Part = TypeVar("Part")  #: a drafter, a rule or a target


@dataclass(frozen=True)
class Bug:
    """One mistake and the configuration in which it shows."""

    name: str
    says: str
    counts: tuple[int, ...]  #: branching of the draft
    plant: Callable[[Engine], Engine]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mended: Callable[[Engine], Engine] = lambda same: same  #: what stays when the mistake goes

    def engine(self, sound: Engine) -> Engine:
        """An engine with this mistake, on the models of a sound one with a draft model."""
        model = model_of(sound.drafter)
        if model is None:
            raise ConfigurationError(
                f"planting {self.name!r} needs a draft model; got drafter {sound.drafter.name!r}; "
                "load one with draft=..."
            )
        drafter = DraftModel(model, self.counts)
        return self.plant(Engine(sound.target, drafter, verifiers.get("rejection")))


class _Wrapped(Generic[Part]):
    """Everything as the inner part has it, but for what a subclass breaks."""

    def __init__(self, inner: Part) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _drawn_law(draft: Draft) -> Tensor:
    """[B, N, V]: the declared law at each node that has drawn children."""
    assert draft.laws is not None
    law = ops.probs(draft.laws)
    return torch.nn.functional.pad(law, (0, 0, 0, draft.tree.nodes - law.shape[1]))


class _Filtered(_Wrapped[Drafter]):
    def propose(self, memory: object, context: Context, shape: DraftShape) -> Draft:
        given = context.sampling
        if given.greedy != "none":
            return self.inner.propose(memory, context, shape)
        few = given._replace(
            top_k_B=torch.full_like(given.top_k_B, 8), most_top_k=8, all_top_k=True
        )
        draft = self.inner.propose(memory, context._replace(sampling=few), shape)
        assert draft.laws is not None
        return draft._replace(laws=draft.laws._replace(floor_BR=None, lse_BR=None))


class _Argmax(_Wrapped[Drafter]):
    def propose(self, memory: object, context: Context, shape: DraftShape) -> Draft:
        given = context.sampling
        if given.greedy != "none":
            return self.inner.propose(memory, context, shape)
        hot = torch.full_like(given.inverse_temperature_B, torch.inf)
        greedy = given._replace(inverse_temperature_B=hot, greedy="some")
        draft = self.inner.propose(memory, context._replace(sampling=greedy), shape)
        assert draft.laws is not None
        node = torch.arange(draft.tree.nodes, device=draft.draws_BNK.device)[None, :, None]
        laws = draft.laws._replace(
            inverse_temperature_B=given.inverse_temperature_B, greedy=given.greedy, lse_BR=None
        )
        return draft._replace(
            laws=laws,
            kind_BNK=torch.full_like(draft.draws_BNK, int(DrawKind.WITHOUT)),
            row_BNK=torch.where(draft.draws_BNK >= 0, node, -1),
            kinds=frozenset({DrawKind.WITHOUT}),
        )


class _TargetResidual(_Wrapped[Verifier]):
    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        verdict = self.inner(draft, scores, draws)
        if draft.laws is None:
            return verdict
        law = ops.probs(scores.laws)
        row = torch.arange(law.shape[0], device=law.device)
        here = law[row, verdict.count_B]  # chains: node number and depth agree
        race = noise.residual_race(draws, law.shape[-1])
        return verdict._replace(next_B=ops.draw(here, race))


class _PositionRace(_Wrapped[Drafter]):
    """Draws every drafted token by the race of its position, as a coupled draft does, and says so.

    That is no mistake: the tokens follow the law that is declared. A rule that reads the same race
    again makes it one.
    """

    kinds = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})

    def propose(self, memory: object, context: Context, shape: DraftShape) -> Draft:
        draft = self.inner.propose(memory, context, shape)
        drawn = draft.kind_BNK.masked_fill(
            draft.kind_BNK == DrawKind.COUPLED, int(DrawKind.WITHOUT)
        )
        kinds = frozenset(DrawKind.WITHOUT if k is DrawKind.COUPLED else k for k in draft.kinds)
        return draft._replace(kind_BNK=drawn, kinds=kinds)


class _SameRace(_Wrapped[Verifier]):
    """A rule whose residual is drawn by the race that drew the refused token."""

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        first = self.inner(draft, scores, draws)
        depth, vocab = draft.tree.max_depth + 1, scores.laws.logits_BRV.shape[-1]
        races = noise.target_race_at(draws.seed_B, draws.start_B, depth, vocab)
        race = races[torch.arange(races.shape[0], device=races.device), first.count_B]
        return self.inner(draft, scores, draws._replace(race_BV=race))


class _Pooled(_Wrapped[Verifier]):
    """Rows that draft where a twin, with the same prompt and seed and one step ahead, had a token
    accepted, and are plain where it had none: a planner whose odds are pooled over rows."""

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        twin = self.inner(draft, scores, draws)
        most_B = torch.where(twin.count_B > 0, draft.tree.max_depth, 0)
        verdict: Verdict = self.inner(shallower(draft, most_B), scores, draws)
        return verdict


class _Dropped(_Wrapped[Drafter]):
    def propose(self, memory: object, context: Context, shape: DraftShape) -> Draft:
        draft = self.inner.propose(memory, context, shape)
        if draft.laws is None:  # greedy rows place their children
            return draft
        chance = _drawn_law(draft)[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
        going = torch.nn.functional.pad((chance >= 0.3).long().cumprod(1).bool(), (0, 1))
        return draft._replace(draws_BNK=torch.where(going[..., None], draft.draws_BNK, -1))


class _Reordered(_Wrapped[Drafter]):
    def propose(self, memory: object, context: Context, shape: DraftShape) -> Draft:
        draft = self.inner.propose(memory, context, shape)
        if draft.laws is None:  # greedy rows place their children
            return draft
        batch = draft.tokens_BN.shape[0]
        draws = draft.draws_BNK.expand(batch, -1, -1)
        flat = draws.clamp(min=0).flatten(1)
        token = draft.tokens_BN.gather(1, flat).view(draws.shape)
        merit = _drawn_law(draft).gather(2, token).masked_fill(draws < 0, -1.0)
        order = merit.argsort(dim=-1, descending=True, stable=True)
        return draft._replace(draws_BNK=draws.gather(-1, order))


class _Forgetful(_Wrapped[LanguageModel]):
    """A target whose cache leaves accepted entries where the tree had put them."""

    def keep(self, cache: object, first_B: Tensor, path_BD: Tensor) -> None:
        """Nothing is moved."""


class _BySlot(_Wrapped[LanguageModel]):
    """A target that takes the slot of a tree node for its position."""

    def forward(
        self,
        cache: object,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        by_slot = nodes._replace(positions_BQ=nodes.slots_BQ)
        return self.inner.forward(cache, by_slot, last=last, aux_layers=aux_layers)


# A wrapper has its part's whole protocol by delegation, which a type checker cannot see.


def _drafter(wrap: type[_Wrapped[Drafter]]) -> Callable[[Engine], Engine]:
    return lambda sound: Engine(sound.target, cast(Drafter, wrap(sound.drafter)), sound.rule)


def _rule(wrap: type[_Wrapped[Verifier]]) -> Callable[[Engine], Engine]:
    def plant(sound: Engine) -> Engine:
        assert sound.rule is not None, "a planted mistake names its rule"
        return Engine(sound.target, sound.drafter, cast(Verifier, wrap(sound.rule)))

    return plant


def _by_position(sound: Engine) -> Engine:
    """The same chain, drawn by the races of its positions."""
    assert isinstance(sound.drafter, DraftModel)
    drafter = cast(Drafter, _PositionRace(replace(sound.drafter, shared_noise=True)))
    return Engine(sound.target, drafter, sound.rule)


def _target(wrap: type[_Wrapped[LanguageModel]]) -> Callable[[Engine], Engine]:
    return lambda sound: Engine(cast(LanguageModel, wrap(sound.target)), sound.drafter, sound.rule)


CHAIN, TREE = (1, 1, 1, 1), (3, 2, 1)

BUGS: dict[str, Bug] = {
    bug.name: bug
    for bug in (
        Bug(
            "filtered_draft", "drawn under top-k 8, declared without it", CHAIN, _drafter(_Filtered)
        ),
        Bug("argmax_as_softmax", "the argmax, declared as a draw", CHAIN, _drafter(_Argmax)),
        Bug("residual_from_target", "after a refusal a draw from p", CHAIN, _rule(_TargetResidual)),
        Bug(
            "shared_noise",
            "draft and residual race with one noise",
            CHAIN,
            lambda sound: _rule(_SameRace)(_by_position(sound)),
            mended=_by_position,
        ),
        Bug(
            "dropped_token",
            "a token of q < 0.3 is dropped after it was drawn",
            CHAIN,
            _drafter(_Dropped),
        ),
        Bug("pooled_odds", "drafts where a twin's were kept", CHAIN, _rule(_Pooled)),
        Bug("reordered_siblings", "children sorted by q after drawing", TREE, _drafter(_Reordered)),
        Bug(
            "wrong_slot",
            "accepted entries of a tree stay where they were",
            TREE,
            _target(_Forgetful),
        ),
        Bug(
            "stale_position",
            "positions of a tree's nodes by slot, not by depth",
            TREE,
            _target(_BySlot),
        ),
    )
}


def get(name: str) -> Bug:
    """The planted mistake of that name."""
    if name not in BUGS:
        raise UnknownName("planted mistake", name, BUGS)
    return BUGS[name]


def sound(bug: Bug, engine: Engine) -> Engine:
    """The same configuration without the mistake: it must pass."""
    return replace(bug, plant=bug.mended).engine(engine)
