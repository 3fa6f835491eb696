"""A draft, what the target says of it, the verdict, and the rule that verifies."""

from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import TypeVar

from outrider.row_params import Greedy, SamplingRows
from outrider.types.models import Cache, Inputs, LanguageModel


class DrawKind(IntEnum):
    """How a child came to be in the draft: what its law is given its earlier siblings."""

    FIXED = 0  #: placed, not drawn: a point mass (argmax, lookup, top-k, hub siblings)
    WITHOUT = 1  #: drawn without replacement from the node's law row, in draw order
    WITH = 2  #: drawn independently from its law row (repeats allowed)
    COUPLED = 3  #: drawn with the target's own noise: only a matching rule may verify it


#: What rules verify that throw coins of their own.
UNCOUPLED = frozenset(DrawKind) - {DrawKind.COUPLED}

RUNNING, STOP, LENGTH, CONTEXT, FAULT = range(5)  #: why a row ends
REASONS = ("running", "stop", "length", "context", "fault")


class Host(Protocol):
    """What a backend on the host keeps beside tensors; nobody else looks inside."""

    def stack(self, others: "Sequence[Host]") -> "Host":
        """The same for laws of several levels, one after another."""


T = TypeVar("T", bound=type[tuple[object, ...]])


def _forgetful(table: T) -> T:
    """`_replace` of this tuple drops `host`, which stands for the tensors as they were."""
    plain = table._replace  # type: ignore[attr-defined]

    def replace(self: tuple[object, ...], **fields: object) -> tuple[object, ...]:
        changed: tuple[object, ...] = plain(self, **{"host": None} | fields)
        return changed

    table._replace = replace  # type: ignore[attr-defined]
    return table


@_forgetful
class Laws(NamedTuple):
    """Next-token laws at R prefixes, not yet normalised, so that a kernel may read them in place.

    The law of row r is softmax(logits * inverse_temperature) over the tokens whose logit is at
    least the floor. An inverse temperature of +inf is the one-hot law at the argmax (lowest id on
    a tie). Penalties, biases and processors are already in the logits.
    """

    logits_BRV: Tensor
    inverse_temperature_B: Tensor
    floor_BR: Tensor | None = None
    lse_BR: Tensor | None = None  #: log-sum-exp of the scaled, filtered logits, if it was kept
    greedy: Greedy = "some"  #: host constant: which rows have inverse temperature +inf
    host: Host | None = None  #: what a draw on the host has computed of them; `_replace` drops it


class Tree(NamedTuple):
    """Topology of a draft. Parents precede children; levels are contiguous (BFS order)."""

    parent_BN: Tensor  #: int64, -1 for node 0
    depth_BN: Tensor  #: int64
    ancestors_BNN: Tensor  #: bool, node n sees itself and its ancestors
    max_depth: int
    max_draws: int
    #: levels[d]:levels[d+1] are the nodes of depth d (upper bound over rows)
    levels: tuple[int, ...]
    is_chain: bool
    nodes: int  #: N, the pending token included


class Draft(NamedTuple):
    """What is proposed below the pending token, with the laws it was drawn from.

    `draws_BNK[b, n, k]` is the child node of the k-th draw at node n (repeats allowed: merged
    i.i.d. paths keep their multiplicity), -1 pads. `row_BNK` is the law row of each draw (-1: a
    point mass). Draws of kind WITHOUT at one node share one law row and stand in draw order.
    """

    tokens_BN: Tensor
    tree: Tree
    draws_BNK: Tensor
    kind_BNK: Tensor
    row_BNK: Tensor
    laws: Laws | None
    kinds: frozenset[DrawKind]  #: host constant: every kind that occurs
    #: where the drafter's own cache holds each node, counted from the root's slot (-1: it does
    #: not), if not at the node's number
    places_BN: Tensor | None = None
    #: most draws of a node in any draft of its drafter, where rows' trees differ: rules that test
    #: draws by their numbers count as in such a tree; 0: as in this one
    fan: int = 0


class Scores(NamedTuple):
    """The target's laws at the N nodes of a draft, from one call."""

    laws: Laws
    hidden: tuple[
        Tensor, ...
    ] = ()  #: the target's states [B, N, E], one per aux layer of the drafter
    raw_BNV: Tensor | None = None  #: the model's own logits, where shaping changed them
    dead_BN: Tensor | None = None  #: nodes at which shaping forbids every token; `laws` is uniform


class Draws(NamedTuple):
    """All randomness of one verification: keys, or injected values for tests.

    Streams are keyed by (seed, start, purpose): `start_B` is the position of the pending token when
    the step began. It grows with every step, so ACCEPT and RESIDUAL noise is fresh in each step.
    TARGET noise is keyed by (seed, absolute position) alone.
    """

    seed_B: Tensor
    start_B: Tensor
    uniform_BNK: Tensor | None = None  #: accept test of draw k at node n, in [0, 1)
    race_BV: Tensor | None = None  #: Exp(1) noise of the residual or bonus draw
    target_race_BDV: Tensor | None = None  #: Exp(1) noise of the target at depths 0..D


class Verdict(NamedTuple):
    """The accepted path, its length and one more token."""

    path_BD: Tensor  #: int64 accepted nodes, root left out, -1 padded
    count_B: Tensor  #: int64, 0..D
    next_B: Tensor  #: int64, residual token after a rejection, bonus token after a leaf
    overlap_BD: Tensor | None = None  #: sum min(p, q) at each examined depth, NaN elsewhere


class Ends(NamedTuple):
    """When each row of a batch ends, and whether it has."""

    length_B: Tensor  #: committed tokens
    limit_B: Tensor  #: committed length at which a row ends
    limit_reason_B: Tensor  #: the reason to tell then
    stop_BS: Tensor  #: stop token ids, -1 padded
    reason_B: Tensor  #: RUNNING, or why the row has ended


class StepLists(NamedTuple):
    """A block as Python lists, one entry per row."""

    tokens: list[list[int]]
    emitted: list[int]
    reason: list[int]
    accepted: list[int]
    drafted: list[int]
    overlap: list[float]
    overlaps: list[int]


class StepTensors(NamedTuple):
    """What a step emits, still on the device: `tokens_BT[b, :emitted_B[b]]`."""

    tokens_BT: Tensor
    emitted_B: Tensor
    reason_B: Tensor
    accepted_B: Tensor
    drafted_B: Tensor
    overlap_B: Tensor  #: sum of sum min(target, draft) over examined positions
    overlaps_B: Tensor
    start_B: Tensor  #: committed length before the step
    lists: StepLists | None = None  #: the same as lists, if it was settled on the host


class Outcome(NamedTuple):
    """Exact law of a verdict given the draft: where the walk stops and what it emits there."""

    stop_BN: Tensor  #: probability of stopping at node n (accepting exactly its path)
    next_BNV: Tensor  #: law of the next token given that


class Verifier(Protocol):
    """A verification rule: a pure function of draft, scores and draws."""

    @property
    def name(self) -> str:
        """Registry key."""

    @property
    def exact(self) -> bool:
        """Whether it keeps the target's law."""

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """The kinds of children it can verify."""

    @property
    def chain_only(self) -> bool:
        """Whether it refuses trees that branch."""

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Verify a draft."""

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The exact law of the verdict, in the dtype of the scores."""


# A drafter: what it may see, what it is asked for.

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
    #: at `open`: what is kept of prompts that begin as these do; None: nothing is kept. Later: what
    #: is to keep these as soon as the target has read them
    known: RowHints | None = None
    least: int = 0  #: host constant: no row is shorter than this
    #: host constant: so many tokens of every row, ahead of the pending one, have no entries in the
    #: target's cache yet: its next step reads them, if nothing is drafted in it
    prompt_rest: int = 0


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
