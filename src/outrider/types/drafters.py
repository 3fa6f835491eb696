"""A drafter: what it may see, what it is asked for."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import TypeVar

from outrider.row_params import SamplingRows
from outrider.types.drafts import Draft, DrawKind, Scores, Verdict
from outrider.types.models import Cache, Inputs, LanguageModel

M = TypeVar("M", default=Any)  #: what a drafter keeps of rows: a `RowStore`


class RowHints(Protocol):
    """The prompts of rows that are being read, and what is kept of others that begin alike."""

    def begin(self, model: LanguageModel, cache: Cache) -> int:
        """Copy what is kept of the prompts; so many tokens of every row are in the cache then."""

    def stops(self, model: LanguageModel, cache: Cache, start: int) -> dict[int, list[int]]:
        """Behind how many tokens, more than `start`, it is shown the states of which rows."""

    def mark(self, model: LanguageModel, cache: Cache, rows: Sequence[int], line: int) -> None:
        """Be shown the states of these rows, which have read so many tokens."""

    def keep(self, model: LanguageModel, cache: Cache) -> None:
        """Keep the entries of the prompts, all but each last token's, for others."""


class Context(NamedTuple):
    """What a drafter may see of a batch: committed tokens and how they are sampled."""

    tokens_BL: Tensor  #: committed tokens, pending one included; beyond the length: undefined
    length_B: Tensor  #: committed tokens, pending one included
    bound: int  #: host constant: no row is longer than this
    sampling: SamplingRows
    inputs: Inputs | None = None  #: what the rows read besides their text
    #: tokens to copy from, -1 padded: what the request gives, or else the source's own
    reference_BS: Tensor | None = None
    #: at `open`: the target's states [B, L - 1, E] of the prompts, one per aux layer of the drafter
    hidden: tuple[Tensor, ...] = ()
    #: host constant: a draft model has not read at most so many tokens of any row, ahead of the
    #: pending one: what plain steps have emitted since the last proposal, one each, and prompts
    #: that nobody has drafted behind yet. At `open`: so many of the prompts may wait
    unread: int = 0
    #: at `propose`: the target's own cache, for a drafter that is made of the target's layers. What
    #: it writes there lies at and behind the pending token's slot, which the target writes anew
    cache: Cache | None = None
    #: at `open`: what is kept of prompts that begin as these do; None: nothing is kept
    known: RowHints | None = None
    least: int = 0  #: host constant: no row is shorter than this


class DraftShape(NamedTuple):
    """What to draft in one step: one of the drafter's declared shapes. Host constants."""

    key: Hashable  #: the drafter's own name for it
    max_nodes: int  #: pending token included
    max_depth: int
    is_chain: bool
    most_B: Tensor | None = None  #: rows that want less: no draw below this depth
    #: rows that want less, where shapes are numbers of nodes: drafted ones of each
    sizes: tuple[int, ...] | None = None


#: Nothing is drafted. Legal for every drafter, declared or not: `propose` is not called then,
#: `commit` is, with a draft of node 0 alone.
PLAIN = DraftShape(0, 1, 0, is_chain=True)


class Drafter(Protocol[M]):
    """Proposes trees. Its memory is its own; the engine never looks inside.

    One whose steps read values on the host, whatever the device, says so: `capturable = False`.
    Steps of the others may be recorded as CUDA graphs, and no Python of theirs runs in a replay.
    """

    @property
    def name(self) -> str:
        """Registry key."""

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Every kind of child it may propose: rules are checked against it at set-up."""

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every shape it can be asked for; the first is the largest and the usual one.

        `PLAIN` goes without saying: the engine then proposes nothing by itself.
        """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's states that it reads, at `open` and at every `commit`; none: ().

        k is the state after k layers, -1 the one that the logits are computed from
        (`LanguageModel.forward`).
        """

    def open(self, context: Context, capacity: int) -> M:
        """Memory for these rows, a `RowStore`, with all but the pending token ingested.

        A draft model may leave the last `context.unread` tokens for later, too: `propose` is told
        of them until it has been asked.
        It does not depend on a shape: another one may be asked for in every step.
        """

    def propose(self, memory: M, context: Context, shape: DraftShape) -> Draft:
        """A tree of this shape below each row's pending token."""

    def commit(
        self, memory: M, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Learn what was kept. `context` is the one the draft was proposed in.

        After a plain step the draft is node 0 alone, and has no laws.
        """


@runtime_checkable
class Foreseeing(Drafter[M], Protocol[M]):
    """A drafter on the host that can tell ahead of a step what its drafts are worth.

    What it knows of a row it has learnt from that row alone: rows may share a seed, and then one
    row's verdict would tell another's noise (docs/rules.md).
    """

    def foresee(self, memory: M, context: Context) -> Sequence[Sequence[float]]:
        """For each row and number of drafted nodes, from none on: tokens gained, as expected.

        Called ahead of `propose` in the same step; the best n nodes are a draft of n nodes.
        """


@runtime_checkable
class Mixed(Foreseeing[M], Protocol[M]):
    """A drafter on the host that asks a draft model in some rows and steps, and copies in others.

    A step's counts do not say which of the two a row's draft was; it does.
    """

    @property
    def asked(self) -> LanguageModel:
        """The draft model, or head."""

    def by_model(self, memory: M) -> Sequence[bool]:
        """In which rows the draft that was committed last was the model's."""

    def reads(self, memory: M) -> int:
        """Tokens that the model reads ahead of the next draft; 0 where no row asks it."""

    def drop(self, memory: M, rows: Sequence[int]) -> None:
        """These rows ask the model no more."""
