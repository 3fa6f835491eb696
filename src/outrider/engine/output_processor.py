"""What steps emitted, from the device to those who asked: read, counted, made ready to be told.

On CUDA the host reads a step's tokens while the next step runs; on a CPU there is nothing to wait
for, and they are counted at once. Tokens are not turned into text here, and stop strings are not
looked for: that is `outrider.text.output_text`.
"""

from collections import deque
from collections.abc import Sequence

from outrider.engine.outputs import InFlightOutput, Logprobs, StepLogprobs, gather_logprobs
from outrider.engine.scheduler import RequestTable
from outrider.engine.speculation_policy import StepReport
from outrider.engine.step import GraphedStep


class OutputProcessor:
    """Reads what steps emitted, `lag` steps late, and tells the table of requests.

    size   nodes of the largest draft: the most tokens that a step adds to a row
    trace  of every request, not of those alone that ask
    """

    def __init__(
        self,
        requests: RequestTable,
        size: int,
        lag: int,
        trace: bool = False,
    ) -> None:
        self.lag = lag
        self._requests, self._size, self._trace = requests, size, trace
        self._in_flight: deque[InFlightOutput] = deque()

    @property
    def named(self) -> list[int]:
        """The requests that outputs on their way still name."""
        return [number for output in self._in_flight for number in output.requests]

    @property
    def ahead(self) -> int:
        """Tokens by which a row may be longer than the host knows."""
        return len(self._in_flight) * self._size

    def collect(self, made: GraphedStep, numbers: Sequence[int]) -> InFlightOutput:
        """What a step emitted for these requests, its rows, on its way to the host."""
        wanted, traced = [], []
        logprobs: dict[Logprobs, StepLogprobs] = {}
        for number in numbers:
            request = self._requests.entries[number].request
            asked = request.logprobs
            if asked is not None and asked not in logprobs:
                logprobs[asked] = gather_logprobs(made.scores, made.verdict, made.block, asked)
            wanted.append(asked)
            traced.append(self._trace or request.trace)
        return InFlightOutput(
            made.block, made.draft, made.verdict, list(numbers), traced, logprobs, wanted
        )

    def process(self, output: InFlightOutput, seconds: float) -> list[StepReport]:
        """A step is done, in so many seconds: read it, or the one before it while it is running."""
        output.seconds = seconds
        self._in_flight.append(output)
        if self.lag and all(self._requests.entries[number].over for number in output.requests):
            return self.read()
        return self.read(self.lag)

    def read(self, left: int = 0) -> list[StepReport]:
        """Read what is on its way, all but the last few steps: each is reported once."""
        reports = []
        while len(self._in_flight) > left:
            output = self._in_flight.popleft()
            blocks = self._requests.record(output)
            tree = output.draft.tree
            took = None if self.lag else 1e3 * output.seconds
            reports.append(StepReport(blocks, tree.nodes, tree.max_depth, took))
        return reports
