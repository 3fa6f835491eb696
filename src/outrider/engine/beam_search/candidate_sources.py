"""What is scored ahead: a guess of the beams to come. It decides how many calls are made, and
never what the search sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.drafters import ReferenceLookup
from outrider.engine.beam_search.scorer import Prefix, PrefixScorer
from outrider.engine.beam_search.step import DEAD, Rules, State, step
from outrider.errors import ConfigurationError
from outrider.models.prefill import inference
from outrider.row_params import SamplingRows, copy_rows
from outrider.sampling import sampling_params
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Context, Drafter


class CandidateSource(Protocol):
    """Proposes texts below the running beams of rows that wait for a call."""

    @property
    def depth(self) -> int:
        """How many tokens below a beam it goes at most."""

    def ready(self) -> None:
        """What has to be done once, before the first proposal."""

    def propose(self, states: Mapping[int, State], depth: int) -> dict[int, list[Prefix]]:
        """Texts to score ahead, parents first, by row; at most `depth` tokens below a beam."""


@dataclass(frozen=True)
class NoCandidates:
    """The beams alone: as many calls as steps, each with all beams of a row as one tree."""

    depth: int = 0

    def ready(self) -> None:
        """Nothing."""

    def propose(self, states: Mapping[int, State], depth: int) -> dict[int, list[Prefix]]:
        """Nothing."""
        return {}


class _Offer(NamedTuple):
    """What a drafter offered below some beams, and its memory of them."""

    memory: Any
    nodes: list[dict[Prefix, int]]  #: of each beam: the texts offered below it, by their node


class _Since(NamedTuple):
    """What a beam wrote behind a beam above it."""

    offer: _Offer
    place: int  #: that beam's, in the offer
    kept: list[int]  #: nodes of the offer among what was written
    passed: int  #: tokens written


class OfferedCandidates:
    """What a drafter without a model offers below each running beam: copies, n-grams.

    Every beam is a row of its own to the drafter. Where a reference has been copied to is kept
    along the search: a beam goes on from where the beam had come to that it goes on from. Other
    drafters keep nothing from one call to the next.

    references_BS  tokens to copy from [rows, S], -1 padded, if there are any
    """

    def __init__(
        self, drafter: Drafter, device: torch.device | str, references_BS: Tensor | None = None
    ) -> None:
        self.drafter, self.device, self._references_BS = drafter, device, references_BS
        self.depth = drafter.shapes[0].max_depth
        self._copies = drafter if isinstance(drafter, ReferenceLookup) else None
        self._offers: dict[int, tuple[_Offer, dict[Prefix, int]]] = {}  #: by row: who is where
        self._greedy = lru_cache(partial(_greedy, device))

    def ready(self) -> None:
        """Nothing: every proposal opens the drafter anew."""

    @inference
    def propose(self, states: Mapping[int, State], depth: int) -> dict[int, list[Prefix]]:
        """The drafter's trees below all beams, of one `propose` of its own."""
        proposed: dict[int, list[Prefix]] = {row: [] for row in states}
        beams = [(row, text) for row in states for text in dict.fromkeys(states[row].running)]
        fit = (shape for shape in self.drafter.shapes if shape.max_depth <= depth)
        shape = next(fit, self.drafter.shapes[-1])
        context = self._context(beams, shape.max_nodes)
        memory = self.drafter.open(context, context.tokens_BL.shape[1])
        if self._copies is not None:
            memory = self._recalled(self._copies, memory, beams)
        draft = self.drafter.propose(memory, context, shape)
        parents = draft.tree.parent_BN.tolist()
        drawn, tokens = draft.draws_BNK.flatten(1).tolist(), draft.tokens_BN.tolist()
        offer = _Offer(memory, [])
        for at, (row, text) in enumerate(beams):
            above = parents[at if len(parents) > 1 else 0]
            there = set(drawn[at if len(drawn) > 1 else 0]) - {-1}
            texts = {0: text}
            for node in sorted(there):  # parents stand before their children
                if above[node] in texts and texts[above[node]].length - text.length < depth:
                    texts[node] = texts[above[node]].child(tokens[at][node])
            proposed[row] += list(texts.values())[1:]
            offer.nodes.append({below: node for node, below in texts.items() if node})
        for row in states:
            self._offers[row] = offer, {t: at for at, (own, t) in enumerate(beams) if own == row}
        return proposed

    def _recalled(
        self, drafter: ReferenceLookup, memory: Any, beams: Sequence[tuple[int, Prefix]]
    ) -> Any:
        """The memory with that of the last beam above each that was offered something."""
        since = [self._since(*beam) for beam in beams]
        for offer in {id(one.offer): one.offer for one in since if one is not None}.values():
            into = [at for at, one in enumerate(since) if one is not None and one.offer is offer]
            those = [one for one in since if one is not None and one.offer is offer]
            longest = max(len(one.kept) for one in those)
            path_BD = torch.tensor([[*o.kept, *[-1] * (longest - len(o.kept))] for o in those])
            own = offer.memory.take([one.place for one in those])
            drafter.pass_by(
                own,
                path_BD.to(self.device, torch.int64),
                torch.tensor([len(one.kept) for one in those], device=self.device),
                torch.tensor([one.passed for one in those], device=self.device),
            )
            memory = memory.put(into, own)
        return memory

    def _since(self, row: int, text: Prefix) -> "_Since | None":
        """What a beam wrote since the last offer made to a beam above it, if there was any."""
        offer, places = self._offers.get(row, (_Offer(None, []), {}))
        tail: list[Prefix] = []
        for node in text.upwards():
            if node in places:
                nodes = offer.nodes[places[node]]
                # the last token is what drafts hang below: it was never one of their nodes
                kept = [nodes[text] for text in reversed(tail[1:]) if text in nodes]
                return _Since(offer, places[node], kept, len(tail))
            tail.append(node)
        return None

    def _context(self, beams: list[tuple[int, Prefix]], nodes: int) -> Context:
        texts = [text.tokens() for _, text in beams]
        longest = max(map(len, texts))
        padded = [[*tokens, *[0] * (longest + nodes - len(tokens))] for tokens in texts]
        references = self._references_BS
        return Context(
            torch.tensor(padded, device=self.device),
            torch.tensor(list(map(len, texts)), device=self.device),
            longest,
            self._greedy(len(beams)),
            None,
            None if references is None else copy_rows(references, [row for row, _ in beams]),
        )


def _greedy(device: torch.device | str, count: int) -> SamplingRows:
    """The settings of so many rows: nothing is drawn."""
    return sampling_params.rows([SamplingParams(0, seed=0)] * count, device)


class DraftedCandidates:
    """The same search run ahead on a draft model, from the target's own state.

    `length` steps with `width` beams: None, or at least as many as the target's (Leviathan's u).
    """

    def __init__(
        self, oracle: PrefixScorer, rules: Sequence[Rules], length: int, width: int | None = None
    ) -> None:
        self.oracle, self.depth = oracle, length
        least = max(rule.beams.num_beams for rule in rules)
        if width is not None and width < least:
            raise ConfigurationError(
                f"the draft model needs as many beams as the target; got {width} for {least}; "
                "leave its width out"
            )
        self.rules = [
            replace(  # the draws are the target's
                rule, drawn=None, beams=replace(rule.beams, num_beams=width or rule.beams.num_beams)
            )
            for rule in rules
        ]

    def ready(self) -> None:
        """The draft model reads the prompts."""
        self.oracle.ready()

    @inference
    def propose(self, states: Mapping[int, State], depth: int) -> dict[int, list[Prefix]]:
        """The draft's beams of each of the next steps."""
        live = {row: _widened(state, self.rules[row]) for row, state in states.items()}
        proposed: dict[int, list[Prefix]] = {row: [] for row in states}
        for row, state in live.items():
            self.oracle.prune(row, state.running)
        for _ in range(depth):
            wanted: list[list[Prefix]] = [[] for _ in self.oracle.rows]
            for row, state in live.items():
                wanted[row] = self._unknown(row, state)
            self.oracle.ask(wanted)
            for row, state in list(live.items()):
                logs = self.oracle.stacked(row, state.running)
                ahead = live[row] = step(state, logs, self.rules[row])
                if ahead.over:
                    del live[row]
                    continue
                pairs = zip(ahead.running, ahead.scores_W.tolist(), strict=True)
                proposed[row] += [text for text, score in pairs if score > DEAD / 2]
        return proposed

    def _unknown(self, row: int, state: State) -> list[Prefix]:
        """What the draft has not read of the running texts, parents first."""
        missing: list[Prefix] = []
        for text in dict.fromkeys(state.running):
            new = []
            for node in text.upwards():
                if self.oracle.placed(row, node):
                    break
                new.append(node)
                if node is self.oracle.rows[row].root:
                    break
            missing += new[::-1]
        return missing


def _widened(state: State, rules: Rules) -> State:
    """The state with more beams that are none."""
    more = rules.beams.num_beams - len(state.running)
    if not more:
        return state
    scores_W = torch.cat([state.scores_W, state.scores_W.new_full((more,), 2 * DEAD)])
    return state._replace(
        running=state.running + state.running[-1:] * more,
        scores_W=scores_W,
        trails=state.trails + state.trails[-1:] * more,
    )
