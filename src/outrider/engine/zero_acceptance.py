"""A draft model of which nothing is kept: said once, with the reason where one can be found.

Text stays exact whatever is drafted, so a draft that is of no use shows in the time alone. The log
says so, `Stats.why_plain` does, and a planner asks it no more for texts that cannot depend on that.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from outrider.engine.outputs import StepOutput
from outrider.models.prefill import inference
from outrider.models.tree_inputs import causal
from outrider.types import LanguageModel

LOOKS = 32  #: drafted tokens looked at without one that was kept
TEXT = 64  #: tokens that the reason is looked for in
UNIFORM = 0.98  #: of the largest entropy there is: what no trained model comes to
AGREES = 0.2  #: of a text's tokens: what a draft that is of use says as its target does


class DraftWatch:
    """Counts drafted tokens that were verified, until one is kept or it is time to tell.

    >>> watch = DraftWatch()
    >>> refused = StepOutput(0, [5], 0, None, drafted=3)
    >>> [watch.saw([refused]) for _ in range(LOOKS)].index(True), watch.saw([refused])
    (31, False)
    """

    def __init__(self) -> None:
        self.looks = 0
        self.over = False  #: whether a token was kept, or it has been told that none was
        self.why = ""  #: what was told

    def saw(self, blocks: Sequence[StepOutput]) -> bool:
        """Count a step's blocks; whether none of all was kept and it is to be told now."""
        if self.over:
            return False
        self.looks += sum(block.drafted > 0 for block in blocks)
        kept = any(block.accepted for block in blocks)
        self.over = kept or self.looks >= LOOKS
        return self.over and not kept


@inference
def zero_reason(target: LanguageModel, draft: LanguageModel, ids: Sequence[int]) -> str:
    """Why nothing of this draft model is kept, by what both models say of a text of the target's.

    >>> from outrider.testing import pair
    >>> zero_reason(*pair(), [3, 1, 4, 1, 5, 9, 2, 6])[:33]
    'it agrees with the target where b'
    """
    if draft.taps:
        return "it is a head: made for another target, or its weights were not read"
    if draft.reads != "text" or target.reads != "text":
        return "no reason was found; was it trained for this target?"
    tokens_1Q = torch.tensor([list(ids[-TEXT:])])
    said, wanted = (_laws(model, tokens_1Q) for model in (draft, target))
    if not bool(torch.isfinite(said.logsumexp(-1)).all()):
        return "its scores are no numbers; try dtype='float32'"
    chances = said.softmax(-1)
    entropy = float(torch.special.entr(chances).sum(-1).mean())
    if entropy > UNIFORM * log(said.shape[-1]):
        return "its law is all but uniform: its weights were not read, or never trained"
    guesses = said.argmax(-1)
    if len(guesses) > 1 and bool((guesses == guesses[0]).all()):
        return f"it says token {int(guesses[0])} whatever it reads: is its checkpoint whole?"
    agree = float((guesses == wanted.argmax(-1)).float().mean())
    if agree >= AGREES:
        return (
            f"it agrees with the target where both read the text ({agree:.0%} of its tokens), and "
            "yet not as a draft: please report this"
        )
    return (
        f"it agrees with the target on {agree:.0%} of a text's tokens: it was trained for another "
        "model or other text, or its tokenizer is another one (then give draft_tokenizer)"
    )


def _laws(model: LanguageModel, tokens_1Q: Tensor) -> Tensor:
    """A model's logits [Q, V] of a text."""
    tokens_1Q = tokens_1Q.to(torch.device(model.device))
    size = tokens_1Q.shape[1]
    wide = model.width(size)
    cache = model.open(1, wide)
    at_1Q = torch.arange(size, device=tokens_1Q.device)[None]
    logits: Tensor = model.forward(cache, causal(tokens_1Q, at_1Q, wide)).logits_BQV
    return logits[0].float().cpu()
