"""A drafter of every kind; the tiny models and runs are those of `outrider.testing`."""

from dataclasses import dataclass
from typing import Any

from letters import translated
from outrider import DraftModel, PromptLookup, ReferenceLookup, Root
from outrider.drafters import (
    Beam,
    DynamicTree,
    Either,
    HubTree,
    Paths,
    Recall,
    SampledTree,
    StaticTree,
    StringMatch,
    Suffix,
    Translated,
)
from outrider.drafters.ngram_table import NgramTable, count
from outrider.drafters.trees import optimal
from outrider.testing import (
    PROMPTS,
    RUNNERS,
    VOCAB,
    Restless,
    begun,
    decode,
    llama,
    pair,
    perturbed,
)
from outrider_lab.drafters.cascade import Cascade
from outrider_lab.drafters.layer_skip import LayerSkip
from outrider_lab.drafters.lookahead import Lookahead
from outrider_lab.drafters.ngram_tree import NgramTree
from outrider_lab.drafters.random import Random
from tiny_heads import driven

__all__ = [
    "DRAFTERS",
    "LOOKUPS",
    "MODELLESS",
    "ON_HOST",
    "PROMPTS",
    "RUNNERS",
    "TRANSLATED",
    "VOCAB",
    "Mislabelled",
    "Restless",
    "begun",
    "decode",
    "llama",
    "pair",
    "perturbed",
]

#: A drafter of every kind and shape; contract tests check that none that is registered is missing.
DRAFTERS = {
    "root": lambda small: Root(),
    "prompt_lookup": lambda small: PromptLookup(4),
    "suffix": lambda small: Suffix(6),
    "recall": lambda small: Recall(8),
    "recall chain": lambda small: Recall(6, chain=True),
    "reference_lookup": lambda small: ReferenceLookup(4),
    "two copies": lambda small: ReferenceLookup(4, width=2),
    "n-gram table": lambda small: NgramTable(count(list(range(VOCAB)) * 3, VOCAB), 3),
    "n-gram tree": lambda small: NgramTree(count(list(range(VOCAB)) * 3, VOCAB), 6, 3, 3),
    "random": lambda small: Random(small.vocab_size, 3),
    "cascade": lambda small: Cascade(small, num_speculative_tokens=5, guesses=3),
    "either": lambda small: Either(Recall(8), DraftModel(small, (1, 1, 1))),
    "either chain": lambda small: Either(Recall(6, chain=True), DraftModel(small, (1, 1, 1))),
    "layer skip": lambda small: LayerSkip(small, (1, 1, 1)),
    "lookahead": lambda small: Lookahead(4, 3, 2),
    "chain": lambda small: DraftModel(small, (1, 1, 1, 1)),
    "tree": lambda small: DraftModel(small, (3, 2, 1)),
    "wide tree": lambda small: DraftModel(small, (4, 2)),
    "sampled tree": lambda small: SampledTree(small, parents=optimal((0.6, 0.2, 0.1), 8, 3)),
    "beam": lambda small: Beam(small, 3, 3),
    "paths": lambda small: Paths(small, 3, 3),
    "paths of two models": lambda small: Paths(small, 3, 3, more=(small,)),
    "hub tree": lambda small: HubTree(small, (3, 2, 1)),
    "static tree": lambda small: StaticTree(small, (3, 2, 1)),
    "dynamic tree": lambda small: DynamicTree(small, 7, 4, 3),
    "string match": lambda small: StringMatch(translated(small), 3),
    "translated": lambda small: Translated(translated(small), 3),
    "tree of common tokens": lambda small: DraftModel(translated(small), (3, 2, 1)),
    "head": lambda small: DraftModel(driven(small.device), (2, 1)),
    "coupled chain": lambda small: DraftModel(small, (1, 1, 1, 1), shared_noise=True),
    "coupled tree": lambda small: DraftModel(small, (2, 2, 1), shared_noise=True),
    "coupled dynamic tree": lambda small: DynamicTree(small, 7, 4, 3, shared_noise=True),
}

#: Those whose draft model has another tokenizer: texts are cut on the host, of other ids.
TRANSLATED = ("string match", "translated", "tree of common tokens")

#: Those that copy.
LOOKUPS = ("prompt_lookup", "reference_lookup", "two copies")

#: Those that look at tokens where the models are on the host, and at none on a device.
ON_HOST = ("suffix", "recall", "recall chain", "cascade", "either", "either chain", *LOOKUPS)

#: Those whose proposals are no model's.
MODELLESS = (
    "root",
    "suffix",
    "recall",
    "recall chain",
    "n-gram table",
    "n-gram tree",
    "random",
    "lookahead",
    *LOOKUPS,
)


@dataclass(frozen=True)
class Mislabelled:
    """Draws from one law and declares another: what every exactness test has to catch."""

    drafter: DraftModel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, memory, context, shape):
        draft = self.drafter.propose(memory, context, shape)
        if draft.laws is None:  # every row places its children
            return draft
        declared = draft.laws.inverse_temperature_B * 0.25
        return draft._replace(laws=draft.laws._replace(inverse_temperature_B=declared))
