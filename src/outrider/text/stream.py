"""Blocks of text as they are decoded."""

from collections.abc import Iterator, Sequence

from outrider.engine.engine_run import EngineRun
from outrider.text.output_text import IncrementalText
from outrider.text.results import Completion, Generation, TextBlock


class Stream(Iterator[TextBlock]):
    """Blocks of text as they are decoded. Stopping to iterate early loses nothing."""

    def __init__(self, run: EngineRun, answers: Sequence[IncrementalText]) -> None:
        self.run, self._answers = run, answers

    def __iter__(self) -> "Stream":
        return self

    def drain(self) -> None:
        """Decode to the end. Rows without stop strings become text once, not block by block."""
        try:
            for block in self.run:
                answer = self._answers[block.row]
                if answer.watched:
                    self._cut(answer, answer.absorb(block))
                else:
                    answer.keep(block.token_ids, block.logprobs)
        finally:  # an interrupted call has the text of its tokens, too
            for answer, reason in zip(self._answers, self.run.reasons, strict=True):
                if not answer.watched:
                    answer.catch_up(reason)

    def __next__(self) -> TextBlock:
        block = next(self.run)
        answer = self._answers[block.row]
        return self._cut(answer, answer.absorb(block))

    def _cut(self, answer: IncrementalText, block: TextBlock) -> TextBlock:
        """End the row of an answer that a stop string has ended."""
        if answer.stopped:
            self.run.end(block.row, "stop", keep=len(answer.tokens))
        return block

    def result(self) -> Generation:
        """Completions so far; a request that is still running has finish_reason "running"."""
        run = self.run
        done = [
            Completion(
                answer.text,
                list(answer.tokens),  # the stream may go on
                reason or "running",
                stats,
                None if answer.logprobs is None else list(answer.logprobs),
            )
            for answer, reason, stats in zip(self._answers, run.reasons, run.requests, strict=True)
        ]
        return Generation(done, run.stats)
