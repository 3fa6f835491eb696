"""Registry of drafters: one file and one line each."""

from collections.abc import Callable

from outrider.drafters.beam import Beam
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.dynamic_tree import DynamicTree
from outrider.drafters.hub_tree import HubTree
from outrider.drafters.ngram_table import NgramTable
from outrider.drafters.paths import Paths
from outrider.drafters.prompt_lookup import PromptLookup
from outrider.drafters.root import Root
from outrider.drafters.sampled_tree import SampledTree
from outrider.drafters.static_tree import StaticTree
from outrider.types import Drafter

DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "root": Root,
    "draft_model": DraftModel,
    "sampled_tree": SampledTree,
    "beam": Beam,
    "paths": Paths,
    "hub_tree": HubTree,
    "static_tree": StaticTree,
    "dynamic_tree": DynamicTree,
    "prompt_lookup": PromptLookup,
    "ngram_table": NgramTable,
}

__all__ = [
    "DRAFTERS",
    "Beam",
    "DraftModel",
    "DynamicTree",
    "HubTree",
    "NgramTable",
    "Paths",
    "PromptLookup",
    "Root",
    "SampledTree",
    "StaticTree",
]
