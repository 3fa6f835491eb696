"""A draft of a draft (Leviathan et al. 2023, section A.3): a draft model's chain in fewer calls.

The chain is the one that the draft model would draw token by token, from its full law at every
place and with the same noise; that law is declared. But a call of it reads some guesses of the
tokens to come, too. Where a guess is the token that is drawn, the law behind it is there already.
Guesses are copies of the text, as `suffix` makes them, or come from a second, smaller draft model,
which draws with the draft's own noise. They decide how many calls are made, and nothing else.

On a host calls are made until every row's chain is whole. On a device, where nobody looks, there
are half as many as a chain has tokens, and a chain ends where it has come to: behind tokens that
stay in the draft, so that every rule stays exact (docs/rules.md).
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

from outrider import arguments, ops
from outrider.drafters import deterministic_tree, prompt_lookup, recipes, tree_drafting
from outrider.drafters.automaton import Automaton
from outrider.drafters.memory import NoMemory, RowMemories, Several
from outrider.drafters.suffix import LONGEST, automata
from outrider.drafters.tree_drafting import (
    Children,
    DrawKeys,
    TreeBuilder,
    TreeLevel,
    shapes,
)
from outrider.errors import ConfigurationError
from outrider.models.model_wrapper import capturable
from outrider.models.prefill import width
from outrider.tree import numbers, parents_of
from outrider.types import (
    Cache,
    Context,
    Draft,
    DraftShape,
    DrawKind,
    LanguageModel,
    Laws,
    RowStore,
    Scores,
    Verdict,
)

G = TypeVar("G", default=Any)  #: what a guesser keeps of rows


def on_host(tensor: Tensor) -> bool:
    """Whether there is no device to wait for."""
    return tensor.device.type == "cpu"


class Guesser(Protocol[G]):
    """Guesses what a chain goes on with. Its memory is its own, a `RowStore`."""

    def open(self, context: Context, capacity: int) -> G:
        """Memory for these rows."""

    def guess(
        self, memory: G, context: Context, drawn_B: Tensor, keys: Tensor, count: int
    ) -> Tensor:
        """At most `count` tokens [B, m] behind each row's text, which ends with drawn tokens.

        `drawn_B` is their number, `keys` [B, count] the noise that the next ones are drawn with.
        """

    def commit(self, memory: G, draft: Draft, verdict: Verdict) -> None:
        """Read what was kept."""


@dataclass(frozen=True)
class CopyGuesser:
    """What followed the longest suffix of the text that stands in it before."""

    def open(self, context: Context, capacity: int) -> RowMemories[Automaton] | NoMemory:
        """An automaton of each row's text; nothing on a device."""
        if not on_host(context.length_B):
            return NoMemory()
        return RowMemories(tuple(automata(context, None)))

    def guess(
        self,
        memory: RowMemories[Automaton] | NoMemory,
        context: Context,
        drawn_B: Tensor,
        keys: Tensor,
        count: int,
    ) -> Tensor:
        """A copy for every row; rows without one, or with a shorter one, guess token 0."""
        if isinstance(memory, NoMemory):
            corpus = prompt_lookup.text(context)
            start_B1 = prompt_lookup.latest(corpus, context, LONGEST, 1)
            return prompt_lookup.copied(corpus, start_B1, context, count).tokens_BN[:, 1:]
        copies = []
        lengths = zip(context.length_B.tolist(), drawn_B.tolist(), strict=True)
        for row, text, (length, drawn) in zip(context.tokens_BL, memory.rows, lengths, strict=True):
            copies.append(text.behind(row[length - drawn : length].tolist(), count))
        most = max(map(len, copies))
        padded = [copy + [0] * (most - len(copy)) for copy in copies]
        return torch.tensor(padded, dtype=torch.int64, device="cpu").view(len(copies), most)

    def commit(
        self, memory: RowMemories[Automaton] | NoMemory, draft: Draft, verdict: Verdict
    ) -> None:
        """Read what was kept."""
        if isinstance(memory, NoMemory):
            return
        for text, tokens in zip(
            memory.rows, deterministic_tree.committed(draft, verdict), strict=True
        ):
            for token in tokens:
                text.push(token)


@dataclass(frozen=True)
class Smaller:
    """A smaller draft model, which draws with the noise that the draft will draw with."""

    model: LanguageModel

    def open(self, context: Context, capacity: int) -> Cache:
        """Its cache."""
        return tree_drafting.OneModel(self.model).open(context, capacity)

    @property
    def capturable(self) -> bool:
        """Whether the smaller model is."""
        return capturable(self.model)

    def guess(
        self, memory: Cache, context: Context, drawn_B: Tensor, keys: Tensor, count: int
    ) -> Tensor:
        """A chain, one call of the smaller model for each token."""
        layout = shapes.fixed(parents_of((1,) * count), context.length_B.device)
        source = tree_drafting.TreeModel(self.model, memory)
        return tree_drafting.grow([source], context, layout, _Under(keys), trim=True).tokens_BM[
            :, 1:
        ]

    def commit(self, memory: Cache, draft: Draft, verdict: Verdict) -> None:
        """Entries of a chain lie where they belong."""


@dataclass(frozen=True)
class _Under:
    """A chain drawn with given noise [B, depth]."""

    keys: Tensor
    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT,)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """One draw."""
        token_B1, there_B1, law = _one(law, self.keys[:, level.depth : level.depth + 1])
        return Children(token_B1, there_B1, law)


@dataclass(frozen=True)
class Cascade(shapes.Chains):
    """A chain of `num_speculative_tokens` tokens; a call looks at up to `guesses` of them.

    >>> Cascade(model, Smaller(smaller))                                     # doctest: +SKIP
    """

    model: LanguageModel
    guesser: Guesser = field(default_factory=CopyGuesser)
    num_speculative_tokens: int = 8
    guesses: int = 4
    name: ClassVar[str] = "cascade"
    aux_layers: ClassVar[tuple[int, ...]] = ()
    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT,)
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})

    def __post_init__(self) -> None:
        arguments.wholes(self, recipes.PLAIN, num_speculative_tokens=1)
        arguments.wholes(self, "leave it out for 4", guesses=1)

    @property
    def capturable(self) -> bool:
        """Whether the draft model is, and what guesses."""
        return capturable(self.model, self.guesser)

    def open(self, context: Context, capacity: int) -> Several:
        """The draft model's cache and the guesser's memory."""
        ahead = self.num_speculative_tokens + self.guesses  # guesses may go beyond the chain
        capacity = self.model.width(capacity + ahead)
        cache = tree_drafting.OneModel(self.model).open(context, capacity)
        return Several((cache, self.guesser.open(context, capacity)))

    def propose(self, memory: Several, context: Context, shape: DraftShape) -> Draft:
        """Draw the chain, in as many calls of the draft model as the guesses leave."""
        depth = shape.max_depth
        cache, guesser = memory.stores
        host = on_host(context.length_B)
        chain = _Chain(context, depth)
        wide = width(self.model, context.bound, depth + self.guesses + 1, cache.capacity)
        for call in range(depth if host else -(-depth // 2)):
            drawn = chain.least() if host else call
            if drawn == depth:
                break
            guess_Bm = self._guess(guesser, chain, min(self.guesses, depth - 1 - drawn))
            count = 1 if call else 2 + context.unread
            said = tree_drafting.read_on(self.model, cache, chain.text, count, wide, guess_Bm)
            chain.follow(said.logits_BQV, guess_Bm)
        return chain.draft()

    def _guess(self, memory: RowStore, chain: "_Chain", count: int) -> Tensor:
        if not count:
            return chain.drawn_B.new_empty(len(chain.drawn_B), 0)
        return self.guesser.guess(memory, chain.text, chain.drawn_B, chain.keys(count), count)

    def commit(
        self, memory: Several, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """The chain's entries lie where they belong."""
        self.guesser.commit(memory.stores[1], draft, verdict)


class _Chain:
    """Chains under way: the tokens stand behind the text, where nothing is committed yet."""

    def __init__(self, context: Context, depth: int) -> None:
        self.context, self.depth = context, depth
        self.drawn_B = torch.zeros_like(context.length_B)
        self._open_B = torch.ones_like(self.drawn_B, dtype=torch.bool)  # more can be drawn
        self._laws: list[Laws] = []
        self._row_BD = torch.full_like(self.drawn_B, -1)[:, None].repeat(1, depth + 1)
        self._keys = DrawKeys(context, depth)

    @property
    def text(self) -> Context:
        """The rows' texts with what is drawn."""
        context = self.context
        bound = min(context.bound + self.depth, context.tokens_BL.shape[1])
        # a smaller model may lack the end of the last chain, and what came after it
        unread = 0 if self._laws else context.unread + 2
        length_B = context.length_B + self.drawn_B
        return context._replace(length_B=length_B, bound=bound, unread=unread)

    def least(self) -> int:
        """How many tokens the shortest chain has that can go on; of whole ones their length."""
        return int(torch.where(self._open_B, self.drawn_B, self.depth).min())

    def keys(self, count: int) -> Tensor:
        """[B, count]: the noise of the next tokens, as a chain drawn at once has it."""
        place = self.drawn_B[:, None] + numbers(count, self.drawn_B.device)
        return self._keys.own(0, self.depth).gather(1, place.clamp(max=self.depth - 1))

    def follow(self, logits_BQV: Tensor, guess_Bm: Tensor) -> None:
        """Draw behind the text, and behind each guess that was drawn."""
        going_B = self._open_B & (self.drawn_B < self.depth)
        for place in range(guess_Bm.shape[1]):
            token_B = self._draw(logits_BQV[:, place : place + 1], going_B)
            going_B = going_B & self._open_B & (guess_Bm[:, place] == token_B)
            going_B = going_B & (self.drawn_B < self.depth)
            if on_host(going_B) and not going_B.any():
                return
        self._draw(logits_BQV[:, -1:], going_B)

    def _draw(self, logits_B1V: Tensor, going_B: Tensor) -> Tensor:
        """The next token of each row; it is added to rows that are going, where there is one."""
        text = self.text
        root = TreeBuilder(shapes.fixed((-1,), going_B.device), text)
        law = tree_drafting.law_at(logits_B1V, root, TreeLevel(0, 0, 1, 1, 1), text.sampling)
        token_B1, there_B1, law = _one(law, self.keys(1))
        if there_B1 is not None:
            self._open_B = self._open_B & (there_B1[:, 0] | ~going_B)
            going_B = going_B & there_B1[:, 0]
        text.tokens_BL.scatter_(1, text.length_B[:, None], token_B1)
        cell_B1 = torch.where(going_B, self.drawn_B, self.depth)[:, None]
        self._row_BD.scatter_(1, cell_B1, len(self._laws))
        self._laws.append(law)
        self.drawn_B = self.drawn_B + going_B
        return token_B1[:, 0]

    def draft(self) -> Draft:
        """The chains with the laws that their tokens were drawn from."""
        context = self.context
        layout = shapes.fixed(parents_of((1,) * self.depth), self.drawn_B.device)
        assert layout.tree is not None
        assert layout.draws_1NK is not None
        number = numbers(self.depth + 1, self.drawn_B.device)
        there_BN = number < self.drawn_B[:, None]  # whether a node has a child
        at = (context.length_B - 1)[:, None] + number
        tokens = context.tokens_BL.gather(1, at)
        tokens = torch.where(number <= self.drawn_B[:, None], tokens, 0)
        return tree_drafting.declare(
            tokens,
            layout.tree,
            torch.where(there_BN[..., None], layout.draws_1NK, -1),
            Cascade.draw_kinds,
            context.sampling,
            laws=self._laws[0] if len(self._laws) == 1 else ops.stack(self._laws),
            row_BNK=torch.where(there_BN, self._row_BD, -1)[..., None],
        )


def _one(law: Laws, keys_BR: Tensor) -> tuple[Tensor, Tensor | None, Laws]:
    """A draw of each law, whether there is one (None: all), and the law to declare."""
    tokens, there, law = ops.several(law, keys_BR, 1)
    return tokens[..., 0], None if there is None else there[..., 0], law


def _made(
    models: tuple[LanguageModel, ...],
    num_speculative_tokens: int = Cascade.num_speculative_tokens,
    guesses: int = Cascade.guesses,
) -> Cascade:
    if len(models) > 2:
        raise ConfigurationError(
            "a cascade has a draft model and at most one smaller one; got "
            f"{len(models)} models; leave the others out"
        )
    guesser = Smaller(models[1]) if len(models) > 1 else CopyGuesser()
    return Cascade(models[0], guesser, num_speculative_tokens, guesses)


RECIPE = recipes.Recipe(
    _made,
    ("models",),
    ("num_speculative_tokens", "guesses"),
    depth=Cascade.num_speculative_tokens,
)
