"""Registry of drafters: one file and one line each."""

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.prompt_lookup import PromptLookup
from outrider.drafters.root import Root

DRAFTERS = {"root": Root, "draft_model": DraftModel, "prompt_lookup": PromptLookup}

__all__ = ["DRAFTERS", "DraftModel", "PromptLookup", "Root"]
