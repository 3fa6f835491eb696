"""What is scored ahead: a guess of the beams to come. It decides how many calls are made, and
never what the search sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.engine.search.oracle import Oracle
from outrider.engine.search.prefix import Prefix
from outrider.engine.search.step import Rules, State, step
from outrider.models.prefill import inference


class Proposer(Protocol):
    """Proposes texts below the running beams of rows that wait for a call."""

    @property
    def most(self) -> int:
        """Most texts it proposes for a row at once."""

    def propose(self, states: Mapping[int, State]) -> dict[int, list[Prefix]]:
        """Texts to score ahead, parents first, by row."""


@dataclass(frozen=True)
class Nothing:
    """The beams alone: as many calls as steps, each with all beams of a row as one tree."""

    most: int = 0

    def propose(self, states: Mapping[int, State]) -> dict[int, list[Prefix]]:
        """Nothing."""
        return {}


class Reference:
    """Copies: below each beam, what follows the longest match of its end in a reference.

    references  tokens to copy from, one list for each row; (): the beams' own texts alone
    length      tokens copied at once
    """

    def __init__(
        self, references: Sequence[Sequence[int]], length: int, beams: int, ngram: int = 4
    ) -> None:
        self.length, self.most, self.ngram = length, length * beams, ngram
        self._references = [list(tokens) for tokens in references]

    def propose(self, states: Mapping[int, State]) -> dict[int, list[Prefix]]:
        """A chain below each running beam that ends as a part of its row's reference does."""
        proposed: dict[int, list[Prefix]] = {}
        for row, state in states.items():
            chains: list[Prefix] = []
            for text in dict.fromkeys(state.running):
                node = text
                for token in self._follows(row, text):
                    node = node.child(token)
                    chains.append(node)
            proposed[row] = chains
        return proposed

    def _follows(self, row: int, text: Prefix) -> list[int]:
        reference = self._references[row]
        tail: list[int] = []
        for node in text.upwards():
            tail.insert(0, node.token)
            if len(tail) == self.ngram:
                break
        for size in range(len(tail), 0, -1):
            want = tail[-size:]
            for at in range(len(reference) - size - 1, -1, -1):
                if reference[at : at + size] == want:
                    return reference[at + size : at + size + self.length]
        return reference[: self.length] if text.parent is None else []


class Drafted:
    """The same search run ahead on a draft model, from the target's own state.

    `width` beams (at least the target's), `length` steps.
    """

    def __init__(self, oracle: Oracle, rules: Sequence[Rules], length: int) -> None:
        self.oracle, self.length = oracle, length
        self.rules = [replace(rule, drawn=None) for rule in rules]  # the draws are the target's
        self.most = length * max(rule.beams.num_beams for rule in rules)

    @inference
    def propose(self, states: Mapping[int, State]) -> dict[int, list[Prefix]]:
        """The draft's beams of each of the next steps."""
        live = dict(states)
        proposed: dict[int, list[Prefix]] = {row: [] for row in states}
        for row, state in live.items():
            self.oracle.prune(row, state.running)
        for _ in range(self.length):
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
                proposed[row] += [text for text, score in pairs if score > _ALIVE]
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


_ALIVE = -1.0e8  #: scores below it are those of beams that are none
