"""Prompt lookup (Saxena 2023): copy what followed the last occurrence of the current suffix.

The longest suffix n-gram of `most_ngram` down to `least_ngram` tokens that occurs earlier in the
row's own text wins; among equals the most recent. What followed is proposed as a chain of placed
tokens: a point mass, so no draft law exists and none is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import arguments
from outrider.drafters import recipes
from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.tree_drafting import TreeBuilder, bare, shapes
from outrider.tree import numbers
from outrider.types import Context, Draft, DraftShape, DrawKind

# Copying: where the text's last tokens stand in a corpus, and drafts of what follows there.
#
# A corpus is token ids [B, C]. What is -1 stands between texts: it matches nothing and is never
# copied.


def check(of: object) -> None:
    """Read the settings of a lookup, which are fields of `of`, or raise ConfigurationError."""
    arguments.wholes(of, recipes.PLAIN, num_speculative_tokens=1)
    arguments.wholes(of, "leave it out for 1", least_ngram=1)
    arguments.wholes(of, "give at least least_ngram", most_ngram=vars(of)["least_ngram"])


def text(context: Context) -> Tensor:
    """The rows' own text as a corpus."""
    at = numbers(context.bound, context.length_B.device)
    tokens = context.tokens_BL[:, : context.bound]
    return tokens.masked_fill(at >= context.length_B[:, None], -1)


def repeats(context: Context) -> bool:
    """Whether any row's last token stands elsewhere in the tokens at hand: without, no run does.

    Behind a long text that takes a tenth of the time of looking for runs.
    """
    tokens = context.tokens_BL[:, : context.bound]
    last_B1 = context.tokens_BL.gather(1, context.length_B[:, None] - 1)
    return int((tokens == last_B1).count_nonzero()) > len(tokens)


def runs(corpus_BC: Tensor, context: Context, most: int) -> Tensor:
    """[B, C]: how many tokens ending here, at most `most`, equal those that end the row's text.

    0 where nothing follows that could be copied.
    """
    last = context.length_B[:, None] - 1
    run = torch.zeros_like(corpus_BC, dtype=torch.int32)
    alive = torch.nn.functional.pad(corpus_BC[:, 1:] >= 0, (0, 1))
    for back in range(min(most, context.bound)):
        want = context.tokens_BL.gather(1, (last - back).clamp(min=0))
        here = torch.roll(corpus_BC == want, back, 1)  # marks: an eighth of the tokens' bytes
        here[:, :back] = False
        alive = alive & here & (last >= back)
        run += alive
    return run.long()


def latest(corpus_BC: Tensor, context: Context, most: int, least: int) -> Tensor:
    """[B, 1]: behind the longest match of `most` to `least` tokens, of equals the last; or -1."""
    run = runs(corpus_BC, context, most)
    rank = run * context.bound + numbers(context.bound, run.device)
    best, where = rank.where(run >= least, -1).max(1, keepdim=True)
    return torch.where(best >= 0, where + 1, -1)


def copied(corpus_BC: Tensor, start_Bw: Tensor, context: Context, count: int) -> Draft:
    """`count` tokens from each of w places of the corpus on, as chains below the pending token.

    A chain ends ahead of the first -1; a place of -1 has none. Nothing is drawn: a point mass.
    """
    device, (rows, width) = corpus_BC.device, start_Bw.shape
    ahead = start_Bw[:, None] + numbers(count, device)[:, None]
    inside = (start_Bw >= 0)[:, None] & (ahead < corpus_BC.shape[1])
    tokens = corpus_BC.gather(1, ahead.clamp(0, corpus_BC.shape[1] - 1).flatten(1))
    tokens = tokens.view(rows, count, width)
    there = (inside & (tokens >= 0)).cumprod(1).bool()
    if device.type == "cpu":  # no device to wait for: score no more nodes than were found
        count = int(there.any(2).any(0).sum())
        if count == 0:
            return bare(context)
        tokens, there = tokens[:, :count], there[:, :count]
    parents = (-1, *(max(node - width, 0) for node in range(1, 1 + width * count)))
    tree = TreeBuilder(shapes.fixed(parents, device), context)
    tree.fill(tokens.clamp(min=0).flatten(1), there.flatten(1))
    return tree.draft((DrawKind.FIXED,))


@dataclass(frozen=True)
class PromptLookup(shapes.Chains, Forgetful):
    """No model and no training: strong on text that repeats itself (code, edits, summaries).

    Its defaults are those of `load` and of `model.generate`. Copies cost nothing to draft, so that
    8 tokens are worth their scoring where a draft model's chain would be shorter. `suffix` finds
    the same places in constant time.
    """

    num_speculative_tokens: int = 8
    most_ngram: int = 4
    least_ngram: int = 1
    name: ClassVar[str] = "prompt_lookup"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})

    def __post_init__(self) -> None:
        check(self)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """The chain that followed the best earlier match; rows without one propose nothing."""
        count = shapes.declared(self, shape).max_depth
        if context.length_B.device.type == "cpu" and not repeats(context):
            return bare(context)
        corpus = text(context)
        start_B1 = latest(corpus, context, self.most_ngram, self.least_ngram)
        return copied(corpus, start_B1, context, count)


def _made(
    num_speculative_tokens: int = PromptLookup.num_speculative_tokens,
    ngram: tuple[int, int] = (PromptLookup.least_ngram, PromptLookup.most_ngram),
) -> PromptLookup:
    return PromptLookup(num_speculative_tokens, most_ngram=ngram[1], least_ngram=ngram[0])


RECIPE = recipes.Recipe(
    _made,
    takes=("num_speculative_tokens", "ngram"),
    depth=PromptLookup.num_speculative_tokens,
    deepest=16,
)
