"""Log-probabilities of texts, each scored once: all beams of a row as one tree in one cache row.

A text's slot is any free one; what it sees are the slots of the texts it begins with. Nothing is
reordered or copied when beams change: slots of texts that no beam goes on from are free again.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import CapacityError
from outrider.models.decoder import media_of, orders_slots
from outrider.models.prefill import behind, inference, ingest, width
from outrider.types import Cache, Inputs, LanguageModel, MultiModalInputs, Nodes

# Texts that share their beginnings: each is a parent and one more token.


class Prefix:
    """A text that is its parent's text and one more token; the same text is the same object.

    >>> root = Prefix(None, 7)
    >>> root.child(5).child(6) is root.child(5).child(6), root.child(5).tokens()
    (True, [7, 5])
    """

    __slots__ = ("children", "length", "parent", "token")

    def __init__(self, parent: "Prefix | None", token: int, length: int = 1) -> None:
        self.parent, self.token, self.length = parent, token, length
        self.children: dict[int, Prefix] = {}

    def child(self, token: int) -> "Prefix":
        """This text and one more token."""
        known = self.children.get(token)
        if known is None:
            known = self.children[token] = Prefix(self, token, self.length + 1)
        return known

    def upwards(self) -> Iterator["Prefix"]:
        """This text, its parent, and so on to the root."""
        node: Prefix | None = self
        while node is not None:
            yield node
            node = node.parent

    def tokens(self) -> list[int]:
        """All tokens, the root's first."""
        return [node.token for node in self.upwards()][::-1]


def chain(prompt: Sequence[int]) -> Prefix:
    """A prompt as one text; its tokens have no other children."""
    node = Prefix(None, prompt[0])
    for token in prompt[1:]:
        node = node.child(token)
    return node


#: What penalties and bans make of the log-probabilities [W, V] that follow W texts of one length.
Shaper = Callable[[Sequence[Prefix], Tensor], Tensor]
UNKNOWN = -4.0e9  #: log-probabilities of what was not scored: below those of any beam
NARROW = 4  #: models may widen narrower calls by nodes of their own, in slots behind the last


class _Scored(NamedTuple):
    """Where a text's last token lies, and what it sees."""

    slot: int
    seen: NDArray[np.bool_]  #: [capacity]: its own slot and those of the texts it begins with


class _ScoredRow:
    """One row's texts; `ordered`: each lies behind those that it begins with."""

    def __init__(self, root: Prefix, capacity: int, ordered: bool) -> None:
        self.root, self._ordered = root, ordered
        pending = root.length - 1
        self.below = np.zeros(capacity, dtype=np.bool_)  #: what the prompt's last token sees
        self.below[:pending] = True
        self.free_slots = list(range(pending, capacity))  #: sorted
        self.scored: dict[Prefix, _Scored] = {}
        self.logits: dict[Prefix, Tensor] = {}
        self.logs: dict[Prefix, Tensor] = {}

    def place(self, text: Prefix) -> _Scored:
        """A slot for a text whose parent has one."""
        parent = None if text is self.root else self.scored[_parent(text)]
        slot = self.spare(parent.slot if parent is not None and self._ordered else -1)
        self.free_slots.remove(slot)
        seen = (self.below if parent is None else parent.seen).copy()
        seen[slot] = True
        placed = self.scored[text] = _Scored(slot, seen)
        return placed

    def spare(self, behind: int = -1) -> int:
        """The first slot behind that one that is free."""
        at = bisect_right(self.free_slots, behind)
        if at == len(self.free_slots):
            raise CapacityError(
                f"a beam search needs more than its {len(self.below)} slots; raise capacity, or "
                "use fewer beams or less speculation"
            )
        return self.free_slots[at]


def _parent(text: Prefix) -> Prefix:
    assert text.parent is not None
    return text.parent


class PrefixScorer:
    """Scores texts of several rows on one model, each once, in as few calls as its user asks for.

    prompts   of the rows, as token ids
    capacity  slots of a row: prompt, beams, and what is scored ahead
    inputs    what the rows read besides their text, all rows as one
    roots     the prompts as another oracle knows them, if both answer one search
    media     images or sound of each prompt, if any has some
    shapers   what each row's penalties and bans make of log-probabilities; None: nothing
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        capacity: int,
        inputs: Inputs | None = None,
        shapers: Sequence[Shaper | None] | None = None,
        roots: Sequence[Prefix] | None = None,
        media: Sequence[MultiModalInputs | None] = (),
    ) -> None:
        self.model, self.capacity = model, capacity
        self._shapers = shapers or [None] * len(prompts)
        ordered = orders_slots(model)
        self.rows = [_ScoredRow(root, capacity, ordered) for root in roots or map(chain, prompts)]
        self.calls = self.nodes = 0
        self.slots = 0  #: of a row, that were in use at once
        self._device = torch.device(model.device)
        self.cache: Cache = model.open(len(prompts), capacity, inputs)
        self._unread: Sequence[Sequence[int]] = prompts
        self._media = media if any(media) else ()
        sizes = [len(prompt) - 1 for prompt in prompts]
        self._settled_B = torch.tensor(sizes, device=self._device)

    @inference
    def ready(self) -> None:
        """Read all of the prompts but their last tokens, which are the first texts to be scored.

        That is done when something is asked for, if not before: a draft may never be asked.
        """
        if self._unread:
            if self._media:
                self._read_one_by_one(self._unread)
            else:
                tokens_BL = self._tokens(self._unread)
                count = tokens_BL.shape[1] - 1
                ingest(self.model, self.cache, tokens_BL, count, settled_B=self._settled_B)
        self._unread = self._media = ()

    def _read_one_by_one(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts of which some have images, each in a cache of its own that is copied."""
        for row, (prompt, inputs) in enumerate(zip(prompts, self._media, strict=True)):
            own = self.model.open(1, self.capacity)
            start, count = 0, len(prompt) - 1
            if inputs is not None:
                reader = media_of(self.model)
                assert reader is not None
                start, _ = reader.read_media(own, prompt, inputs)
            tokens, settled = self._tokens([prompt]), self._settled_B[row : row + 1]
            ingest(self.model, own, tokens, count, settled_B=settled, start=min(start, count))
            self.cache = self.cache.put([row], own)

    def _tokens(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, prompts))
        padded = [[*p, *[0] * (longest - len(p))] for p in prompts]
        return torch.tensor(padded, device=self._device)

    def behind(self, places: Sequence[int | None]) -> Tensor:
        """The model's logits [B, V] behind one place of each prompt, before any text is scored."""
        self.ready()
        prompts = [row.root.tokens() for row in self.rows]
        sizes = list(map(len, prompts))
        return behind(self.model, self.cache, self._tokens(prompts), sizes, places)

    def roots(self) -> list[Prefix]:
        """The prompts as texts."""
        return [row.root for row in self.rows]

    def knows(self, row: int, text: Prefix) -> bool:
        """Whether this text has been scored."""
        return text in self.rows[row].logits

    def room(self, row: int) -> int:
        """How many more texts of a row could be scored now."""
        return len(self.rows[row].free_slots) - NARROW

    def shaped(self, row: int) -> bool:
        """Whether a row's log-probabilities are changed: they may exceed 0 then."""
        return self._shapers[row] is not None

    def placed(self, row: int, text: Prefix) -> bool:
        """Whether this text has a slot: it has been scored, and what it begins with too."""
        return text in self.rows[row].scored

    def stacked(self, row: int, texts: Sequence[Prefix]) -> Tensor:
        """Log-probabilities [W, V] of these texts; of one that is unknown, of no use to anybody."""
        shaper = self._shapers[row]
        if shaper is not None:
            return shaper(texts, torch.stack([self.logs(row, text) for text in texts]))
        here = self.rows[row]
        new = [t for t in dict.fromkeys(texts) if t in here.logits and t not in here.logs]
        if new:  # all of them at once: each is a line of its own
            made = torch.log_softmax(torch.stack([here.logits[text] for text in new]).float(), -1)
            here.logs.update(zip(new, made, strict=True))
            if len(new) == len(texts):
                return made
        lines = [here.logs.get(text) for text in texts]
        none = torch.full_like(next(line for line in lines if line is not None), UNKNOWN)
        return torch.stack([none if line is None else line for line in lines])

    def logs(self, row: int, text: Prefix) -> Tensor:
        """Log-probabilities float32 [V] of what follows a text that has been scored."""
        here = self.rows[row]
        known = here.logs.get(text)
        if known is None:
            known = here.logs[text] = torch.log_softmax(here.logits[text].float(), -1)
        return known

    @inference
    def ask(self, wanted: Sequence[Sequence[Prefix]]) -> None:
        """Score texts of every row in one call; parents are known or stand before them."""
        fresh = [
            [text for text in dict.fromkeys(texts) if text not in row.scored]
            for row, texts in zip(self.rows, wanted, strict=True)
        ]
        if not any(fresh):
            return
        self.ready()
        nodes = self._nodes(fresh, max(NARROW, *map(len, fresh)))
        logits_BQV = self.model.forward(self.cache, nodes).logits_BQV
        for number, (row, texts) in enumerate(zip(self.rows, fresh, strict=True)):
            for at, text in enumerate(texts):
                row.logits[text] = logits_BQV[number, at]
        self.calls += 1
        self.nodes += sum(map(len, fresh))

    def _nodes(self, fresh: list[list[Prefix]], most: int) -> Nodes:
        """One call's nodes; short rows are filled up with nodes that see a spare slot alone."""
        rows = len(self.rows)
        tokens = np.zeros((rows, most), dtype=np.int64)
        at, slots = np.zeros_like(tokens), np.zeros_like(tokens)
        seen = np.zeros((rows, most, self.capacity), dtype=np.bool_)
        for number, (row, texts) in enumerate(zip(self.rows, fresh, strict=True)):
            for node, text in enumerate(texts):
                placed = row.place(text)
                tokens[number, node], at[number, node] = text.token, text.length - 1
                slots[number, node], seen[number, node] = placed.slot, placed.seen
            self.slots = max(self.slots, self.capacity - len(row.free_slots))
            spare = row.spare()  # one slot for them all: nobody looks at what they write
            slots[number, len(texts) :] = spare
            seen[number, len(texts) :, spare] = True
        last = int(
            np.flatnonzero(seen.any((0, 1)))[-1]
        )  # what is read may lie behind what is written
        wide = width(self.model, last + 1, 0, self.capacity)
        made = (torch.from_numpy(table) for table in (tokens, at, slots, seen[..., :wide]))
        ids, places, lines, sees = (table.to(self._device) for table in made)
        return Nodes(ids, places, lines, sees, self._settled_B)

    def prune(self, row: int, running: Sequence[Prefix]) -> None:
        """Keep what running texts begin with, and what was scored below them; free the rest."""
        here = self.rows[row]
        alive = set(running)
        stack = [child for text in alive for child in text.children.values()]
        while stack:  # what was scored ahead
            text = stack.pop()
            if text in here.scored:
                alive.add(text)
                stack += text.children.values()
        for text in running:  # a draft may not have read all that a beam begins with
            node = text
            while node is not here.root and _parent(node) not in here.scored:
                node = _parent(node)
                alive.add(node)
        gone = [text for text in here.logits if text not in alive]
        for text in gone:
            del here.logits[text]
            here.logs.pop(text, None)
        for end in gone:  # and what only they began with
            node = end
            while node in here.scored and node not in alive:
                if any(below in here.scored or below in alive for below in node.children.values()):
                    break
                insort(here.free_slots, here.scored.pop(node).slot)
                if node is here.root:
                    break
                node = _parent(node)
