"""OTM: optimal transport with membership cost (SpecTr, Sun, Suresh et al. 2023), small alphabets.

Of all rules for these drafts the one that most often emits a drafted token: the plan that moves the
law of the drafted tuple, Q(S), to the target's p with the most mass at tokens of S. A plan is a
choice c(y | S) among the tokens of S, here by one weight for each token,

    c(y | S) = w_y / sum of w over the tokens of S,      a(y) = sum over S of Q(S) c(y | S)

and proportional fitting, w <- w (p / a)^1.7 again and again, comes to the optimal plan (the limit
is that of the entropic problem; where no plan serves all tokens, weights of those that stay short
grow without end). Whatever the weights are, the rule is exact: y of S is kept with probability
c(y | S) min(1, p / a), a share min(p, a) over all S, and the rest is drawn from
norm(p - min(p, a)).

All tuples are enumerated, so the alphabet must be small: the tokens that the draws most probably
are, and one letter for all others, on which draws outside are tested one after another against what
is left of p there (as `multi_round`). With fewer tokens than letters it is OTM; with more, OTM of
the coarser problem, and exact in any case. Letters depend on laws alone, never on what was drawn.

Draws are independent, each of its own law; a placed child is a draw that is sure. Where all are,
there is one tuple, and the best plan emits each of its tokens with its own p: `rejection`. A
baseline of the literature for studies of acceptance: a node takes milliseconds.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import chain, tree_walk
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.sibling_draws import SiblingLevel, pick

_STEP, _FARTHEST = 1.7, 3.0  # over-relaxed, and never by more than e^3 at once
_LOWEST = -600.0  # of the logarithms of weights: float64 has exponentials down to here


class Letters(NamedTuple):
    """The coarse problem of n nodes: A letters, the last of them for every other token.

    A draw that is not there is letter A, which no plan serves.
    """

    token_BnA: Tensor  #: of the letters but the last: [B, n, A - 1]
    target_BnA: Tensor
    guess_BnKA: Tensor  #: of each draw, over A + 1 letters
    outside_BnV: Tensor  #: p outside the letters, not normalised
    apart_BnKV: Tensor  #: the laws of the draws there, not normalised

    @classmethod
    def of(cls, law_BnV: Tensor, level: SiblingLevel, cells: int) -> "Letters":
        """As many letters as leave no more than `cells` tuples.

        ConfigurationError where a token, all others and a draw that is not there are too many.
        """
        if 3**level.most > cells:
            raise ConfigurationError(
                f"otm enumerates tuples of draws; got {level.most} draws at a node, at least "
                f"{3**level.most} tuples, and cells={cells}; draft fewer children, or raise cells"
            )
        guess_BnKV = torch.stack([level.guess(k, law_BnV) for k in range(level.most)], 2)
        kept = min(law_BnV.shape[-1], max(int(cells ** (1 / level.most)) - 2, 1))
        token = guess_BnKV.sum(2).topk(kept, -1).indices
        each = token[:, :, None].expand(-1, -1, level.most, -1)
        outside = law_BnV.scatter(-1, token, 0.0)
        apart = guess_BnKV.scatter(-1, each, 0.0)
        target = [law_BnV.gather(-1, token), outside.sum(-1, keepdim=True)]
        absent = (~level.there_BnK).to(law_BnV.dtype)[..., None]
        guess = [guess_BnKV.gather(-1, each), apart.sum(-1, keepdim=True), absent]
        return cls(token, torch.cat(target, -1), torch.cat(guess, -1), outside, apart)

    def letter(self, token_BnK: Tensor, there_BnK: Tensor) -> Tensor:
        """The letter of each draw: [B, n, K]."""
        last = self.token_BnA.shape[-1]
        same = token_BnK[..., None] == self.token_BnA[:, :, None]
        inside = torch.where(same.any(-1), same.to(torch.int8).argmax(-1), last)
        return torch.where(there_BnK, inside, last + 1)


class TransportPlan(NamedTuple):
    """c(y | S) min(1, p / a) by weights, and what is left of p."""

    score_BnA: Tensor  #: logarithms of the weights; -inf for a draw that is not there
    share_BnA: Tensor  #: min(1, p / a)
    left_BnA: Tensor  #: norm(p - min(p, a))

    def kept(self, letter_BnK: Tensor) -> Tensor:
        """The probability that each draw's letter is emitted; of equal ones the first has it."""
        chosen = _choice(self.score_BnA.gather(-1, letter_BnK), _again(letter_BnK))
        share = torch.nn.functional.pad(self.share_BnA, (0, 1))
        return chosen * share.gather(-1, letter_BnK)


def fitted(letters: Letters, iterations: int) -> TransportPlan:
    """The plan after so many steps of proportional fitting, in float64."""
    target, guess = letters.target_BnA.double(), letters.guess_BnKA.double()
    size, most, vocab = target.shape[-1], guess.shape[2], letters.outside_BnV.shape[-1]
    every = [letter for letter in range(size + 1) if letter != size - 1 or size <= vocab]
    tuple_TK = torch.cartesian_prod(*[torch.tensor(every, device=target.device)] * most)
    tuple_TK = tuple_TK.view(-1, most)
    mass_BnT = torch.ones_like(target[..., :1])
    for k in range(most):
        mass_BnT = mass_BnT * guess[:, :, k, tuple_TK[:, k]]
    has_TA = torch.nn.functional.one_hot(tuple_TK, size + 1)[..., :size].amax(1).double()
    least = torch.finfo(target.dtype).tiny
    drawn = guess[..., :size].sum(2)
    idle = drawn <= 0  # never drawn: no tuple has it

    def levelled(score_BnA: Tensor) -> Tensor:
        highest = score_BnA.masked_fill(idle, _LOWEST).amax(-1, keepdim=True)
        return (score_BnA - highest).clamp(min=_LOWEST).masked_fill(idle, _LOWEST)

    score = levelled((target.clamp(min=least) / drawn.clamp(min=least)).log())

    def served(score_BnA: Tensor) -> Tensor:
        weight = score_BnA.exp()
        below = weight @ has_TA.T
        each = torch.where(below > 0, mass_BnT / below, 0.0)
        return weight * (each @ has_TA)

    for _ in range(iterations):
        short = (target.clamp(min=least) / served(score).clamp(min=least)).log()
        score = levelled(score + _STEP * short.clamp(-_FARTHEST, _FARTHEST))
    taken = served(score)
    share = torch.where(taken > target, target / taken.clamp(min=least), 1.0)
    left = _norm((target - taken * share).clamp(min=0), target)
    like = letters.target_BnA
    score = torch.nn.functional.pad(score, (0, 1), value=-torch.inf)
    return TransportPlan(score.to(like.dtype), share.to(like.dtype), left.to(like.dtype))


def _norm(part_xV: Tensor, otherwise_xV: Tensor) -> Tensor:
    total = part_xV.sum(-1, keepdim=True)
    return torch.where(total > 0, part_xV / total, otherwise_xV)


def _again(letter_xK: Tensor) -> Tensor:
    """Whether a letter stands earlier in its tuple, too."""
    same = letter_xK[..., :, None] == letter_xK[..., None, :]
    return same.tril(-1).any(-1)


def _choice(score_xK: Tensor, again_xK: Tensor) -> Tensor:
    """Shares of a tuple's different letters by their weights; zeros where there is none."""
    found = score_xK.masked_fill(again_xK, -torch.inf).softmax(-1)
    return found.nan_to_num(0.0)


def verify(
    law_BnV: Tensor, level: SiblingLevel, iterations: int, cells: int
) -> tree_walk.NodeDecision:
    """The plan's choice, then draws outside the letters one after another."""
    letters = Letters.of(law_BnV, level, cells)
    plan = fitted(letters, iterations)
    letter_BnK = letters.letter(level.token_BnK, level.there_BnK)
    kept_BnK = plan.kept(letter_BnK)
    other = letters.target_BnA.shape[-1] - 1
    apart_BnK = letter_BnK == other
    refused = (kept_BnK * apart_BnK).sum(-1)  # so far, of the letter that stands for all others
    outside = _norm(letters.outside_BnV, letters.outside_BnV)
    left_there = outside
    favour, against, before = [], [], torch.zeros_like(refused)
    for k in range(level.most):
        mine, token = apart_BnK[..., k], level.token_BnK[..., k]
        guess = _norm(letters.apart_BnKV[:, :, k], letters.apart_BnKV[:, :, k])
        owed, drawn = pick(left_there, token), pick(guess, token)
        chance = torch.where(mine, chain.chances(owed, drawn), 0.0)
        here = torch.where(mine, refused * chance, kept_BnK[..., k])
        rest = _norm((left_there - guess).clamp(min=0), left_there)
        left_there = torch.where(mine[..., None], rest, left_there)
        refused = refused * (1 - chance)
        favour.append(here)
        against.append((1 - before).clamp(min=0))
        before = before + here
    nobody = (1 - kept_BnK.sum(-1)).clamp(min=0)[..., None]
    aside = nobody * plan.left_BnA[..., other:]
    spread = outside * aside + left_there * refused[..., None]
    left = spread.scatter_add(-1, letters.token_BnA, nobody * plan.left_BnA[..., :other])
    return tree_walk.node_decision(favour, against, _norm(left, law_BnV))


@dataclass(frozen=True)
class Otm:
    """The most that independent draws can give, at a price: exact, and optimal for small alphabets.

    iterations  of the fit; fewer accept less, and stay exact
    cells       tuples of letters that are enumerated at a node
    """

    name: ClassVar[str] = "otm"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITH})
    chain_only: ClassVar[bool] = False
    iterations: int = 30
    cells: int = 4096

    def __post_init__(self) -> None:
        for option, least in (("iterations", 1), ("cells", 9)):
            value = vars(self)[option]
            if not arguments.is_whole(value) or not least <= value <= 1 << 20:
                what = f"a whole number from {least} to 1048576"
                arguments.refuse(option, what, value, "leave it out")

    def _is_rejection(self, draft: Draft) -> bool:
        """Whether there is one draw at a node, or one tuple: nothing to enumerate."""
        return chain.is_plain(draft) or draft.kinds == {DrawKind.FIXED}

    def _rule(self) -> tree_walk.NodeRule:
        return partial(verify, iterations=self.iterations, cells=self.cells)

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and overlap."""
        if self._is_rejection(draft):
            return Rejection()(draft, scores, draws)
        return tree_walk.walk(self._rule(), draft, scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The walk with every accept test replaced by its probability."""
        if self._is_rejection(draft):
            return Rejection().outcome(draft, scores)
        return tree_walk.walked(self._rule(), draft, scores)
