"""What is scored ahead, and how far: a guess of the beams to come. It decides how many calls are
made, and never what the search sees."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple, TypeAlias

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


@dataclass(frozen=True)
class NoCandidates:
    """The beams alone: as many calls as steps, each with all beams of a row as one tree."""

    depth: int = 0  #: how many tokens below a beam it goes at most

    def ready(self) -> None:
        """What has to be done once, before the first proposal: nothing."""

    def propose(self, states: Mapping[int, State], depth: int) -> dict[int, list[Prefix]]:
        """Texts to score ahead, parents first, by row, at most `depth` tokens below a beam of one
        that waits for a call: none."""
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
            paths = [[*o.kept, *[-1] * (longest - len(o.kept))] for o in those]
            path_BD = torch.tensor(paths, device="cpu")
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


#: Proposes texts below the running beams of rows that wait for a call.
CandidateSource: TypeAlias = NoCandidates | OfferedCandidates | DraftedCandidates


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


# How far ahead a beam search should score: as far as it pays, by what its own calls have shown.
#
# A call that scores d steps ahead answers between one and d + 1 steps, and then a step comes that
# was not foreseen. With less ahead the same steps would have taken several calls: so a few deep
# calls tell what every smaller depth is worth, and the clock tells what it costs. Where nothing
# ahead pays, it is tried now and then, as long as that has cost no more than a share of the time.

FIRST = 1  #: steps ahead in a trial: what is beyond is taken to be as likely
AGAIN = 8  #: calls between two trials
LATEST = 256  #: the most calls between two of nothing ahead: each that changes nothing doubles them
SHARE = 0.01  #: of all time, that may be lost before something ahead is tried again, and one call's
KEPT = 16  #: calls ahead that a choice rests on: texts differ, and so do parts of one
TIMED = 9  #: calls of each depth whose times are
GAIN = 0.97  #: scoring ahead has to take less than this share of a step's time without it
DRIFT = 1.02  #: the least time of a further step counts for so much more with every later one


@dataclass
class LookaheadDepth:
    """Chooses a depth for every call. It may go on from one search to the next.

    most    the deepest that a proposer goes
    adapts  whether it chooses; if not, every call goes the deepest

    >>> pace = LookaheadDepth(2)
    >>> for _ in range(40):
    ...     depth = pace.depth()
    ...     pace.learn(depth, 1, 2.0 if depth else 1.0)   # never right, and twice as dear
    >>> pace.chosen
    0
    """

    most: int
    adapts: bool = True
    answered: list[tuple[int, int]] = field(default_factory=list)  #: depth and steps of calls
    cost: dict[int, list[float]] = field(default_factory=dict)  #: seconds of calls, by depth
    further: float = 0.0  #: seconds of every step that a call answers beyond its first
    ready: float = 0.0  #: seconds that a search takes before its first call ahead
    chosen: int = 0  #: the depth whose steps take the least time; 0 as long as nothing is known
    calls: int = 0
    steps: int = 0  #: of a row, in all searches
    searches: int = 0
    length: float = 1.0  #: steps that a search is thought to take
    spent: float = 0.0  #: seconds of all calls
    lost: float = 0.0  #: those that calls ahead took beyond what their steps take without
    trial: float = 0.0  #: what the last trial of something ahead lost, once it was ready
    pause: int = AGAIN  #: calls between the last trial and the next
    due: int = 1  #: calls up to the next

    def begin(self, budget: int) -> None:
        """Another search begins, of at most so many steps: as many as the others, if any were."""
        self.length = max(self.steps / self.searches if self.searches else budget, 1.0)
        self.searches += 1

    def depth(self, ready: bool = True) -> int:
        """How many steps ahead the next call scores, if the search is `ready` for that or not."""
        if self.most == 0 or not self.adapts:
            return self.most
        if self.chosen:
            return self.chosen if self.due > 0 else 0
        return min(self.most, FIRST) if self.due <= 0 and self._affordable(ready) else 0

    def _affordable(self, ready: bool) -> bool:
        """Whether one more trial of something ahead may be lost."""
        more = self.trial if ready else self.trial + self.ready
        return self.lost + more <= SHARE * self.spent + median(self.cost[0])

    def expected(self, depth: int) -> float:
        """Steps that a call answers with this depth, by the calls remembered.

        Of calls that went as deep: a run of n steps takes ceil(n / (depth + 1)) calls, and
        n / (depth + 1) if no step was wrong in it: it goes on in the next call. What is deeper
        than any of them is taken to be as likely, step by step, as what was seen.
        """
        seen = Counter(self.answered)
        deepest = min(max((most for most, _ in seen), default=0), depth)
        runs = {key: count for key, count in seen.items() if key[0] >= deepest}
        if not runs:
            return 1.0 + depth
        total = sum(steps * count for (_, steps), count in runs.items())
        wide = deepest + 1
        calls = sum(
            (n / wide if n > most else -(-n // wide)) * count for (most, n), count in runs.items()
        )
        expected = total / calls
        alive = sum(count for (_, n), count in runs.items() if n > deepest) / sum(runs.values())
        share = alive ** (1 / max(deepest, 1))
        return float(expected + sum(alive * share**more for more in range(1, depth - deepest + 1)))

    def learn(
        self, depth: int, steps: int, seconds: float, further: float = 0.0, ready: float = 0.0
    ) -> None:
        """A call that scored `depth` steps ahead answered so many, and took this long.

        With all of its steps, that is; each of them but the first took `further` seconds. Before it
        the search took `ready` seconds for all of its calls ahead.
        """
        self.calls += 1
        self.steps += steps
        self.spent += seconds + ready
        if depth:
            kept = self.answered[1 - KEPT :] if self.adapts else self.answered
            self.answered = [*kept, (depth, steps)]
        if further:
            self.further = min(DRIFT * (self.further or further), further)
        if ready:
            self.ready = ready
        alone = seconds - (steps - 1) * further
        self.cost[depth] = [*self.cost.get(depth, [])[1 - TIMED :], alone]
        before, tried = self.chosen, bool(depth) is not bool(self.chosen)
        loss = seconds - steps * median(self.cost.get(0, [0.0]))
        if tried and depth:
            self.trial = loss
        if depth:
            self.lost = max(self.lost + loss + ready, 0.0)
        if depth or tried:
            self.chosen = self._choice()
        if self.chosen != before:
            self.pause = AGAIN
        elif tried and before:
            self.pause = min(2 * self.pause, LATEST)
        self.due = self.pause if tried or self.chosen != before else self.due - 1

    def _choice(self) -> int:
        """The depth whose steps take the least time, if ahead is worth more than a doubt.

        No more than one step beyond the deepest that was tried: its cost is a guess.
        """
        prices = [self.price(depth) for depth in range(min(self.most, max(self.cost) + 1) + 1)]
        best = min(range(len(prices)), key=prices.__getitem__)
        return best if prices[best] < GAIN * prices[0] else 0

    def price(self, depth: int) -> float:
        """Seconds of a step, by the median time of the last such calls, or of calls like them.

        What another process delays is left out by it, as long as that is less than half of them.
        """
        known = sorted(self.cost)
        low = max((d for d in known if d <= depth), default=None)
        high = min((d for d in known if d >= depth), default=None)
        if low is None or high is None:  # on the line through the outermost two
            low, high = (known * 2)[:2] if low is None else (known * 2)[-2:]
        took = median(self.cost[low])
        if high != low:
            took += (median(self.cost[high]) - took) * (depth - low) / (high - low)
        steps = self.expected(depth)
        took = (took + (steps - 1) * self.further) / steps
        if depth:  # what a search takes once, by its usual steps
            took += self.ready / self.length
        return took


class LookaheadDepths:
    """What the searches of an engine have learned, for its next ones.

    >>> paces = LookaheadDepths()
    >>> with paces.lent(4, beams=5, rows=1) as pace:
    ...     pace.learn(0, 1, 0.01)
    >>> with paces.lent(4, beams=5, rows=1) as pace:
    ...     pace.calls
    1
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], LookaheadDepth] = {}

    @contextmanager
    def lent(self, most: int, beams: int, rows: int) -> Iterator[LookaheadDepth]:
        """That of searches of as many beams and rows, which nobody else has meanwhile."""
        key = most, beams, rows
        pace = self._kept.pop(key, None) or LookaheadDepth(most)
        yield pace
        self._kept[key] = pace
