"""Whisper's rules for timestamps: they come in pairs, never go back, and come when likely."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider import arguments
from outrider.row_params import NEVER, Shaping
from outrider.sampling.node_prefixes import NodePrefixes, ceiling


@dataclass(frozen=True)
class Timestamps:
    """The rules that a text with timestamps keeps, for a vocabulary laid out as Whisper's.

    Text ids come first, then `end_id` and other special ids, then the timestamps to the end of the
    vocabulary. Their first, 0.00 s, stands behind `no_timestamps_id`.

    no_timestamps_id  the token that asks for none: it never comes (<|notimestamps|>)
    end_id            the end of the text: it may follow any timestamp (<|endoftext|>)
    max_initial       the text begins with a timestamp at most so many steps (of 0.02 s) from 0;
                      None: with any

    A timestamp that closes a segment is followed by one that opens the next or by the end, two are
    followed by text, and none is smaller than the last (nor equal, but where a segment opens).
    Where all timestamps together are more probable than any other token, one of them comes.

    Raises ConfigurationError for values of another kind.

    >>> Timestamps(no_timestamps_id=50363, end_id=50257).first_id
    50364
    """

    no_timestamps_id: int
    end_id: int
    max_initial: int | None = 50

    def __post_init__(self) -> None:
        do = "take it from the model's generation configuration"
        for name, given in arguments.fields_of(self, ("no_timestamps_id", "end_id")).items():
            token = arguments.whole(f"timestamps.{name}", given, do, least=0)
            object.__setattr__(self, name, token)
        if self.end_id >= self.no_timestamps_id:
            what = f"smaller than no_timestamps_id={self.no_timestamps_id}"
            arguments.refuse("timestamps.end_id", what, self.end_id, do)
        if self.max_initial is not None:
            do = "use 50 for one second, None for any"
            most = arguments.whole("timestamps.max_initial", self.max_initial, do, least=0)
            object.__setattr__(self, "max_initial", most)

    @property
    def first_id(self) -> int:
        """The timestamp 0.00 s."""
        return self.no_timestamps_id + 1

    @property
    def row(self) -> tuple[int, int, int]:
        """Its fields as a row of a table."""
        most = NEVER if self.max_initial is None else self.max_initial
        return self.no_timestamps_id, self.end_id, most


def hold(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """Keep the rules in the rows that ask for them. Written in place.

    The model's own probabilities are compared by their logits, and by nothing but these: what is
    common to all tokens does not matter.
    """
    table = shaping.timestamps_B3
    if table is None:
        return
    vocab, made = logits_BRV.shape[-1], prefixes.made_BR
    for mark, end in shaping.marks:
        first = mark + 1
        mine = ((table[:, 0] == mark) & (table[:, 1] == end))[:, None]
        last, before, latest = prefixes.last_made(first)
        begins, closed = mine & (made == 0), mine & last & ~before
        low = torch.where(closed, latest, latest + 1).clamp(min=first)
        low = torch.where(mine, torch.where(last & before, vocab, low), 0)
        high = torch.where(begins, first + table[:, 2:], vocab)

        ids = torch.arange(first, vocab, device=logits_BRV.device)
        stamps, text = logits_BRV[..., first:], logits_BRV[..., :first]
        stamps.masked_fill_((ids < low[..., None]) | (ids > high[..., None]), -torch.inf)
        text[..., mark].masked_fill_(mine, -torch.inf)
        special = text[..., end:].amax(-1)
        best = torch.where(closed, special, torch.maximum(text[..., :end].amax(-1), special))
        timed = begins | (mine & (stamps.logsumexp(-1) > best))
        text[..., :end].clamp_(max=ceiling(closed | timed))
        text[..., end:].clamp_(max=ceiling(timed))
