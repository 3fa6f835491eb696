"""What is asked of a beam search: its width, how finished beams are compared, when it ends."""

import math
from dataclasses import dataclass
from typing import Literal

from outrider import arguments
from outrider.errors import ConfigurationError


@dataclass(frozen=True)
class Beams:
    """A beam search as transformers defines it; with `patience`, as openai-whisper does.

    num_beams             beams kept in every step
    length_penalty        a finished beam's score is its log-probability / length ** penalty: above
                          0 longer beams win more often, below 0 shorter ones
    early_stopping        when a search ends, once `num_beams` beams are finished. False: when the
                          best running beam, as it is now, is no better than the worst of them;
                          True: at once; "never": when no running beam could become better at any
                          length
    num_return_sequences  how many of the finished beams are returned, the best first
    patience              None: ends as `early_stopping` says. A number: every beam that ends ahead
                          of num_beams better ones that go on is finished, and the search ends once
                          round(num_beams * patience) are (Kasai et al. 2022); stop tokens do not
                          count in the length then. openai-whisper and CTranslate2 have 1.0

    Raises ConfigurationError for values of another kind.

    >>> Beams(5).length_penalty
    1.0
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    patience: float | None = None

    def __post_init__(self) -> None:
        counts = {"num_beams": self.num_beams, "num_return_sequences": self.num_return_sequences}
        for name, given in counts.items():
            count = arguments.whole(name, given, "give at least 1", least=1)
            object.__setattr__(self, name, count)
        if self.num_return_sequences > self.num_beams:
            raise ConfigurationError(
                "no more sequences can be returned than there are beams; got "
                f"num_return_sequences={self.num_return_sequences} for num_beams={self.num_beams}; "
                "raise num_beams"
            )
        what, do = "a finite number", "leave it out for 1.0"
        penalty = arguments.number("length_penalty", self.length_penalty, what, do)
        if not math.isfinite(penalty):
            arguments.refuse("length_penalty", what, self.length_penalty, do)
        object.__setattr__(self, "length_penalty", penalty)
        if self.early_stopping is not True and self.early_stopping not in (False, "never"):
            what = "True, False or 'never'"
            arguments.refuse("early_stopping", what, self.early_stopping, "leave it out for False")
        if self.patience is None:
            return
        what, do = "a number above 0", "leave it out, or use 1.0 as openai-whisper does"
        patience = arguments.number("patience", self.patience, what, do)
        if not 0 < patience < math.inf or round(self.num_beams * patience) < 1:
            arguments.refuse("patience", what, self.patience, do)
        if self.early_stopping is not False:
            raise ConfigurationError(
                "patience says when the search ends, and so does early_stopping; got "
                f"patience={patience} and early_stopping={self.early_stopping!r}; leave one out"
            )
        object.__setattr__(self, "patience", patience)
