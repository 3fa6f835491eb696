"""Blocks of text as they are decoded."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from outrider.engine.blocks import HostBlock
from outrider.engine.engine import Run
from outrider.text.results import Completion, Generation, TextBlock
from outrider.text.stop import Stop
from outrider.text.tokens import Detokenizer


class Stream(Iterator[TextBlock]):
    """Blocks of text as they are decoded. Stopping to iterate early loses nothing."""

    def __init__(
        self,
        run: Run,
        tokenizer: Any,
        stops: Sequence[Stop],
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[Sequence[int]],
    ) -> None:
        self.run, self._stop_ids = run, stop_ids
        self._tokens: list[list[int]] = [[] for _ in stops]
        self._logprobs: list[list[float] | None] = [None for _ in stops]
        self._worded = [0 for _ in stops]  # how many of the tokens have become text
        self._text = [
            Detokenizer(tokenizer, stop.strings, prompt) if tokenizer else None
            for stop, prompt in zip(stops, prompts, strict=True)
        ]

    def __iter__(self) -> "Stream":
        return self

    def drain(self) -> None:
        """Decode to the end. Rows without stop strings become text once, not block by block."""
        try:
            for block in self.run:
                words = self._text[block.row]
                if words is not None and words.stop_strings:
                    self._absorb(block)
                else:
                    self._keep(block.row, block.token_ids, block.logprobs)
        finally:  # an interrupted call has the text of its tokens, too
            for row, words in enumerate(self._text):
                if words is not None and not words.stop_strings:
                    reason = self.run.reasons[row]
                    fresh = self._tokens[row][self._worded[row] :]
                    words.push(self._before_stop(row, fresh, reason))
                    self._worded[row] = len(self._tokens[row])
                    if reason is not None:
                        words.finish()

    def _before_stop(self, row: int, ids: list[int], reason: str | None) -> list[int]:
        """What becomes text: all but the stop token that ended the row, special or not."""
        return ids[:-1] if reason == "stop" and ids[-1:] and ids[-1] in self._stop_ids[row] else ids

    def _keep(self, row: int, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self._tokens[row].extend(ids)
        if logprobs is not None:
            known = self._logprobs[row]
            if known is None:
                known = self._logprobs[row] = []
            known.extend(logprobs[: len(ids)])

    def __next__(self) -> TextBlock:
        return self._absorb(next(self.run))

    def _absorb(self, block: HostBlock) -> TextBlock:
        ids, reason, row = block.token_ids, block.finish_reason, block.row
        text, words = "", self._text[row]
        if words is not None:
            had = len(words.ids)
            text = words.push(self._before_stop(row, ids, reason))
            if words.stopped_at is not None:
                ids, reason = ids[: words.stopped_at - had], "stop"
                self.run.end(row, reason, keep=len(self._tokens[row]) + len(ids))
            elif reason is not None:
                text += words.finish()
        self._keep(row, ids, block.logprobs)
        self._worded[row] = len(self._tokens[row])
        accepted = min(block.accepted, len(ids))
        logs = None if block.logprobs is None else block.logprobs[: len(ids)]
        return TextBlock(
            text,
            replace(block, token_ids=ids, accepted=accepted, finish_reason=reason, logprobs=logs),
        )

    def result(self) -> Generation:
        """Completions so far; a request that is still running has finish_reason "running"."""
        run = self.run
        done = [
            Completion(
                words.text if words is not None else "",
                list(self._tokens[row]),  # the stream may go on
                run.reasons[row] or "running",
                run.requests[row],
                None if logs is None else list(logs),
            )
            for row, (words, logs) in enumerate(zip(self._text, self._logprobs, strict=True))
        ]
        return Generation(done, run.stats)
