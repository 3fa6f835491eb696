"""What users get: texts with their statistics, whole or block by block."""

from dataclasses import dataclass

from outrider.engine.outputs import StepOutput
from outrider.stats import RequestStats, Stats


@dataclass(frozen=True)
class NearTie:
    """Two beams that were level but for rounding, of which a search kept one and dropped the other.

    Another order of sums (another drafter or batch, in half precision) may keep the other, and end
    with other texts. Token ids are without the prompt.
    """

    margin: float  #: the gap between their log-probabilities
    kept: str
    dropped: str
    kept_ids: list[int]
    dropped_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """One finished request. `token_ids` include the stop token, `text` does not.

    `logprobs` are of the law each token was emitted from: penalties, temperature and filters are
    in. Greedy requests report the law at temperature 1. `score` is a beam's: its log-probability by
    its length. `near_tie` says of a search where it could have gone another way by rounding alone;
    None: nowhere.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    logprobs: list[float] | None = None
    score: float | None = None
    near_tie: NearTie | None = None


@dataclass(frozen=True)
class Generation:
    """All completions of a call, in the order of the prompts, and the totals."""

    completions: list[Completion]
    stats: Stats

    @property
    def texts(self) -> list[str]:
        """The completions' texts."""
        return [c.text for c in self.completions]


@dataclass(frozen=True)
class TextBlock:
    """What one step emitted for one request."""

    text: str
    block: StepOutput  #: the tokens up to a stop string, with the trace if one was asked for

    @property
    def row(self) -> int:
        """The request's number."""
        return self.block.row

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the text."""
        return self.block.token_ids

    @property
    def accepted(self) -> int:
        """How many of them were drafted."""
        return self.block.accepted

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended here, if it did."""
        return self.block.finish_reason
