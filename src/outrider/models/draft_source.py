"""What may draft beside a target: another model, layers of the target, or a head on its states."""

from pathlib import Path
from typing import TypeAlias

from outrider.models import heads, layer_subset_source
from outrider.models.layer_subset_source import LayerSubset, LayerSubsetSource
from outrider.models.sources import Given, ModelSource

Draft: TypeAlias = ModelSource | LayerSubsetSource | heads.AnySource


def resolve_draft(given: Given | LayerSubset, target: ModelSource) -> Draft:
    """Where a draft comes from: a folder of layers or of a head says what it is by itself.

    Raises UnsupportedModel and ConfigurationError for what cannot be used.
    """
    if isinstance(given, LayerSubset):
        return LayerSubsetSource(target, given)
    if isinstance(given, (str, Path)) and layer_subset_source.is_folder(given):
        return LayerSubsetSource(target, given)
    return heads.source_of(given, target) or ModelSource(given, "draft", trust=target.trust)
