"""Stopping criteria judged as plain `generate` judges them, while rows advance at their own pace.

Length and end tokens become limits of the engine. A criterion that is known to look at one row is
asked about a row as soon as it has a new token. Others may look at the whole batch, index its rows
or count their calls, so they are asked once per column, [B, L], when every row has come that far.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import generation as hf

from outrider.errors import ConfigurationError
from outrider.integrations.logits_processor_mapping import ids_of
from outrider.models.config import read

#: Criteria that give the same answer for a row alone.
_ALONE = (hf.StopStringCriteria, hf.MaxTimeCriteria)

#: Scores [V] of a row at a column, or None if nobody collects them.
Scores = Callable[[int, int], Tensor] | None


class Criteria:
    """The criteria of one call, as `generate` has merged them with the configuration's own."""

    def __init__(
        self, given: Sequence[hf.StoppingCriteria], config: hf.GenerationConfig, rows: int
    ) -> None:
        lengths = [c.max_length for c in given if type(c) is hf.MaxLengthCriteria]
        ends = [c.eos_token_id for c in given if type(c) is hf.EosTokenCriteria]
        if not given:  # called without generate
            ends = [read(config, "_eos_token_tensor", Tensor)]
            if config.max_length is None:
                raise ConfigurationError(
                    "a custom function needs a length where generate does not call it; got "
                    "max_length=None; set it in the generation_config, or call model.generate"
                )
        self.longest: int = min(map(int, lengths or [config.max_length]))
        self.eos: list[int] = sorted({token for tensor in ends for token in ids_of(tensor)})
        #: whether rows that have ended are padded; else they go on until all have ended
        self.padded: bool = bool(self.eos) or any(
            read(c, "eos_token_id", object) is not None for c in given
        )
        others = [c for c in given if type(c) not in (hf.MaxLengthCriteria, hf.EosTokenCriteria)]
        self.alone = [c for c in others if rows == 1 or type(c) in _ALONE]
        self.together = [c for c in others if c not in self.alone]


class CriteriaTracker:
    """Tokens of every row and where the rows end."""

    def __init__(
        self, criteria: Criteria, input_ids: Tensor, pad: int, scores: Scores = None
    ) -> None:
        rows = len(input_ids)
        self.criteria, self.input_ids, self.pad, self._scores = criteria, input_ids, pad, scores
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.ends: list[int | None] = [None] * rows  #: tokens of rows that have ended
        self._closed = [False] * rows  #: rows that get no more tokens
        self._text, self._columns = input_ids, 0
        self._seen: list[Tensor] = []

    def add(self, row: int, token: int) -> list[int]:
        """One more token of a row; rows that end by it, or by a column that it completes."""
        self.tokens[row].append(token)
        ended = []
        if self.ends[row] is None and self.criteria.alone:
            tail = torch.tensor([self.tokens[row]], device=self.input_ids.device)
            text = torch.cat([self.input_ids[row : row + 1], tail], 1)
            scores = None
            if self._scores is not None:
                count = len(self.tokens[row])
                scores = tuple(self._scores(row, at)[None] for at in range(count))
            if any(bool(_answer(c, text, scores).any()) for c in self.criteria.alone):
                self.ends[row] = len(self.tokens[row])
                ended.append(row)
        return ended + self._columns_ready()

    def close(self, row: int) -> list[int]:
        """A row gets no more tokens; rows that end by columns that only waited for it."""
        self._closed[row] = True
        if self.ends[row] is None:
            self.ends[row] = len(self.tokens[row])
        return self._columns_ready()

    @property
    def complete(self) -> bool:
        """Without an end token a finished row goes on until all have finished, as in generate."""
        ends = [end for end in self.ends if end is not None]
        if len(ends) < len(self.ends):
            return False
        return self.criteria.padded or min(map(len, self.tokens)) >= max(ends)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(
            len(made) if end is None else end
            for made, end in zip(self.tokens, self.ends, strict=True)
        )

    def over(self, row: int, column: int) -> bool:
        """Whether there is padding in this column of a row."""
        end = self.ends[row]
        return end is not None and end <= column and (self.criteria.padded or self._closed[row])

    def _columns_ready(self) -> list[int]:
        ended: list[int] = []
        while self.criteria.together and any(
            end is None or end > self._columns for end in self.ends
        ):
            at, column = self._columns, []
            for row, made in enumerate(self.tokens):
                if len(made) <= at and not self.over(row, at):
                    return ended
                column.append(self.pad if self.over(row, at) else made[at])
            new = torch.tensor(column, device=self.input_ids.device)[:, None]
            self._text, self._columns = torch.cat([self._text, new], 1), at + 1
            if self._scores is not None:
                self._seen.append(self._column_scores(at))
            scores = None if self._scores is None else tuple(self._seen)
            done = torch.zeros(len(column), dtype=torch.bool, device="cpu")
            for criterion in self.criteria.together:
                done |= _answer(criterion, self._text, scores)
            for row in done.nonzero()[:, 0].tolist():
                end = self.ends[row]
                if end is None or end > at + 1:
                    self.ends[row] = at + 1
                    ended.append(row)
        return ended

    def _column_scores(self, at: int) -> Tensor:
        assert self._scores is not None
        rows = range(len(self.tokens))
        lines = [None if self.over(row, at) else self._scores(row, at) for row in rows]
        blank = torch.zeros_like(next(line for line in lines if line is not None))
        return torch.stack([blank if line is None else line for line in lines])


def _answer(
    criterion: hf.StoppingCriteria, text: Tensor, scores: tuple[Tensor, ...] | None
) -> Tensor:
    """One bool for every row; a single answer is meant for all of them."""
    given = criterion(text, scores)
    try:
        answer = torch.as_tensor(given, device="cpu").bool().reshape(-1).expand(len(text))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"stopping criterion {type(criterion).__name__} must return a bool, or a tensor with "
            f"one for each of {len(text)} rows; got {given!r:.80}; correct its return value"
        ) from error
    return answer
