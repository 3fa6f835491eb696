"""The nouns and protocols of outrider: data and interfaces, no computation.

Dimensions, used as name suffixes everywhere:

    B rows of the batch      N nodes of a draft tree, node 0 is the pending token
    D depth of the tree      K most draws at one node
    R law rows of a draft    V vocabulary       Q queries in one model call
    L token buffer length    W visible width of a cache

A leading dimension of a *topology* tensor (tree, draw tables) is either B or 1: 1 means that all
rows share it and it broadcasts.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from outrider.rows import Greedy, SamplingRows, picked, placed


class Kind(IntEnum):
    """How a child came to be in the draft: what its law is given its earlier siblings."""

    FIXED = 0  #: placed, not drawn: a point mass (argmax, lookup, top-k, hub siblings)
    WITHOUT = 1  #: drawn without replacement from the node's law row, in draw order
    WITH = 2  #: drawn independently from its law row (repeats allowed)
    COUPLED = 3  #: drawn with the target's own noise: only a matching rule may judge it


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

    @property
    def device(self) -> torch.device:
        """Where the laws lie."""
        return self.logits_BRV.device


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

    @property
    def nodes(self) -> int:
        """N, the number of nodes including the pending token."""
        return self.levels[-1]


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
    kinds: frozenset[Kind]  #: host constant: every kind that occurs
    #: where the drafter's own cache holds each node, counted from the root's slot (-1: it does
    #: not), if not at the node's number
    places_BN: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the draft lies."""
        return self.tokens_BN.device


class Scores(NamedTuple):
    """The target's laws at the N nodes of a draft, from one call."""

    laws: Laws
    hidden: tuple[Tensor, ...] = ()  #: the target's states [B, N, E], one per tap of the drafter
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


class BlockLists(NamedTuple):
    """A block as Python lists, one entry per row."""

    tokens: list[list[int]]
    emitted: list[int]
    reason: list[int]
    accepted: list[int]
    drafted: list[int]
    overlap: list[float]
    overlaps: list[int]


class Block(NamedTuple):
    """What a step emits, still on the device: `tokens_BT[b, :emitted_B[b]]`."""

    tokens_BT: Tensor
    emitted_B: Tensor
    reason_B: Tensor
    accepted_B: Tensor
    drafted_B: Tensor
    overlap_B: Tensor  #: sum of sum min(target, draft) over examined positions
    overlaps_B: Tensor
    start_B: Tensor  #: committed length before the step
    lists: BlockLists | None = None  #: the same as lists, if it was settled on the host


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
    def kinds(self) -> frozenset[Kind]:
        """The kinds of children it can judge."""

    @property
    def chain_only(self) -> bool:
        """Whether it refuses trees that branch."""

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Judge a draft."""

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The exact law of the verdict, in the dtype of the scores."""


class Nodes(NamedTuple):
    """One model call: Q tokens of every row. Made by `outrider.models.nodes`."""

    tokens_BQ: Tensor
    positions_BQ: Tensor
    slots_BQ: Tensor  #: cache slot that each node is written to
    visible_BQW: Tensor  #: cache slots that each node sees, its own included


class Output(NamedTuple):
    """What a model says of the nodes that it was asked for."""

    logits_BQV: Tensor
    hidden: tuple[Tensor, ...] = ()  #: states [B, Q, E], one per tap that was asked for


class Encoded(NamedTuple):
    """What an encoder made of rows' inputs, padded to the longest. A `RowStore`."""

    states_BTE: Tensor
    mask_BT: Tensor  #: bool: which states are there

    def take(self, rows: Sequence[int]) -> "Encoded":
        """A copy of these rows, in this order."""
        return Encoded(*(picked(table, rows) for table in self))

    def put(self, seats: Sequence[int], other: "Encoded") -> "Encoded":
        """The rows of `other` in these seats: the shorter ones are padded and masked."""
        return Encoded(*(placed(m, seats, t) for m, t in zip(self, other, strict=True)))

    def narrow(self, rows: int) -> "Encoded":
        """The first rows."""
        return Encoded(*(table[:rows] for table in self))


class Inputs(NamedTuple):
    """What rows read besides their own text. Models of text alone have none. A `RowStore`.

    `features` are what the model's encoder takes: log-mel frames [B, S, F], samples [B, S], pixels
    [B, C, H, W]. With `encoded` no encoder runs: the states are there already.
    """

    ids_BS: Tensor | None  #: source text, right-padded
    features: Tensor | None
    mask_BS: Tensor  #: bool: what of the source is there
    encoded: Encoded | None = None  #: by the target's encoder
    draft: "Inputs | None" = None  #: for a draft model whose encoder reads something else

    def take(self, rows: Sequence[int]) -> "Inputs":
        """A copy of these rows, in this order."""
        ids, features, mask, encoded, draft = self
        return Inputs(
            None if ids is None else picked(ids, rows),
            None if features is None else picked(features, rows),
            picked(mask, rows),
            None if encoded is None else encoded.take(rows),
            None if draft is None else draft.take(rows),
        )

    def put(self, seats: Sequence[int], other: "Inputs") -> "Inputs":
        """The rows of `other` in these seats: the shorter sources are padded and masked.

        What only one side has is in the result no more; both must be encoded, or neither.
        """
        mine, theirs = self.encoded, other.encoded
        assert (mine is None) == (theirs is None), "rows that are encoded beside rows that are not"

        def merged(ours: Tensor | None, their: Tensor | None) -> Tensor | None:
            return None if ours is None or their is None else placed(ours, seats, their)

        return Inputs(
            merged(self.ids_BS, other.ids_BS),
            merged(self.features, other.features),
            placed(self.mask_BS, seats, other.mask_BS),
            None if mine is None or theirs is None else mine.put(seats, theirs),
            None
            if self.draft is None or other.draft is None
            else self.draft.put(seats, other.draft),
        )

    def narrow(self, rows: int) -> "Inputs":
        """The first rows."""
        ids, features, mask, encoded, draft = self
        return Inputs(
            None if ids is None else ids[:rows],
            None if features is None else features[:rows],
            mask[:rows],
            None if encoded is None else encoded.narrow(rows),
            None if draft is None else draft.narrow(rows),
        )


#: What a model reads besides its text: nothing; inputs, by an encoder of its own; or the states
#: that the target's encoder made.
Reads = Literal["text", "source", "states"]


class RowStore(Protocol):
    """Anything that is kept per row: caches, drafters' memories, sampling rows, batches.

    Rows stand in the first seats, without holes. Which rows are meant is known on the host, so that
    nothing waits for a device: plain integers, never tensors. The row of seat 2 leaves:

        store = store.put([2], store.take([last])).narrow(last)
    """

    def take(self, rows: Sequence[int]) -> Self:
        """A copy of these rows, in this order."""

    def put(self, seats: Sequence[int], other: Self) -> Self:
        """Write the rows of `other` into these seats; seats behind the last row add rows.

        Large buffers are written in place, each row's used slots alone: use the result, not `self`.
        """

    def narrow(self, rows: int) -> Self:
        """The first `rows` rows, without a copy: use the result, not `self`."""


class Cache(RowStore, Protocol):
    """What a model keeps of the rows that it has read."""

    @property
    def capacity(self) -> int:
        """Slots of a row."""


class LanguageModel(Protocol):
    """One decoder driven over trees: target and draft model alike."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits it returns, cut to the tokenizer."""

    @property
    def context(self) -> int:
        """Most positions it can address."""

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""

    @property
    def trees(self) -> bool:
        """Whether drafts may branch."""

    @property
    def trees_alike(self) -> bool:
        """Whether a tree's node is rounded as the same text is in a row, or finely enough."""

    @property
    def reads(self) -> Reads:
        """What it reads besides its text."""

    def width(self, slots: int) -> int:
        """The least visible width of so many slots: calls of these widths round alike."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The states of another model that it reads, as a head does its target's; (): none."""

    @property
    def follows(self) -> bool:
        """Whether it keeps entries of the text that it reads: heads on states alone do not."""

    def examine(self, inputs: Inputs) -> None:
        """Refuse inputs that the model cannot read: ConfigurationError."""

    def encode(self, inputs: Inputs) -> Inputs:
        """The inputs with `encoded`: the encoder runs, unless its states are there already."""

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> Any:
        """An empty cache, which owns what the model has read of the inputs."""

    def forward(
        self, cache: Any, nodes: Nodes, *, last: int | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """Write Q entries and return the logits [B, Q, V] of (the last `last` of) them.

        Their states [B, Q, E] at each of the taps come along: k is the state after k layers (0: the
        embeddings), -1 the state that the logits are computed from, behind the last norm.
        """

    def keep(self, cache: Any, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the entries of accepted paths (node numbers, -1 padded) next to slot `first_B`."""

    def learn(
        self,
        cache: Any,
        slots_BQ: Tensor,
        positions_BQ: Tensor,
        wide: int,
        hidden: tuple[Tensor, ...],
        known_B: Tensor,
    ) -> None:
        """Be told the other model's states [B, Q, E] at its taps of the tokens in these slots.

        `positions` are theirs in the text. The slots lie below `wide`. Those below `known_B` hold
        committed tokens from now on, all of which have been told.
        """

    def probe(self, rows: int) -> Inputs | None:
        """Some inputs, for checks, calibration and certification; None for models of text alone."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of a tokenizer; chats and special tokens are those of transformers' own."""

    def __call__(self, text: str) -> Mapping[str, list[int]]:
        """`input_ids` of a text."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """The text of token ids."""

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""


class Known(Protocol):
    """The prompts of rows that are being read, and what is kept of others that begin alike."""

    def begin(self, model: LanguageModel, cache: Any) -> int:
        """Copy what is kept of the prompts; so many tokens of every row are in the cache then."""

    def keep(self, model: LanguageModel, cache: Any) -> None:
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
    #: at `open`: the target's states [B, L - 1, E] of the prompts, one per tap of the drafter
    hidden: tuple[Tensor, ...] = ()
    #: host constant: plain steps since the last proposal, at most one token of any row each, which
    #: a draft model has not read
    unread: int = 0
    #: at `propose`: the target's own cache, for a drafter that is made of the target's layers. What
    #: it writes there lies at and behind the pending token's slot, which the target writes anew
    cache: Any = None
    #: at `open`: what is kept of prompts that begin as these do; None: nothing is kept
    known: Known | None = None

    @property
    def seed_B(self) -> Tensor:
        """Each row's seed."""
        return self.sampling.seed_B


class Shape(NamedTuple):
    """What to draft in one step: one of the drafter's declared shapes. Host constants."""

    key: Hashable  #: the drafter's own name for it
    max_nodes: int  #: pending token included
    max_depth: int
    is_chain: bool
    most_B: Tensor | None = None  #: rows that want less: no draw below this depth


#: Nothing is drafted. Legal for every drafter, declared or not: `propose` is not called then,
#: `commit` is, with a draft of node 0 alone.
PLAIN = Shape(0, 1, 0, is_chain=True)


class Drafter(Protocol):
    """Proposes trees. Its memory is its own; the engine never looks inside."""

    @property
    def name(self) -> str:
        """Registry key."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """Every kind of child it may propose: rules are checked against it at set-up."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape it can be asked for; the first is the largest and the usual one.

        `PLAIN` goes without saying: the engine then proposes nothing by itself.
        """

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's states that it reads, at `open` and at every `commit`; none: ().

        k is the state after k layers, -1 the one that the logits are computed from
        (`LanguageModel.forward`).
        """

    def open(self, context: Context, capacity: int) -> Any:
        """Memory for these rows, a `RowStore`, with all but the pending token ingested.

        It does not depend on a shape: another one may be asked for in every step.
        """

    def propose(self, memory: Any, context: Context, shape: Shape) -> Draft:
        """A tree of this shape below each row's pending token."""

    def commit(
        self, memory: Any, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Learn what was kept. `context` is the one the draft was proposed in.

        After a plain step the draft is node 0 alone, and has no laws.
        """


@runtime_checkable
class Foreseeing(Drafter, Protocol):
    """A drafter on the host that can tell ahead of a step what its drafts are worth.

    What it knows of a row it has learnt from that row alone: rows may share a seed, and then one
    row's verdict would tell another's noise (docs/rules.md).
    """

    def foresee(self, memory: Any, context: Context) -> Sequence[Sequence[float]]:
        """For each row and number of drafted nodes, from none on: tokens gained, as expected.

        Called ahead of `propose` in the same step; the best n nodes are a draft of n nodes.
        """
