"""What may draft beside a target: another model, layers of the target, or a head on its states."""

from pathlib import Path
from typing import TypeAlias

from outrider.models import heads, shallow_source
from outrider.models.shallow_source import Layers, ShallowSource
from outrider.models.sources import Given, Source

Draft: TypeAlias = Source | ShallowSource | heads.AnySource


def source_of(given: Given | Layers, target: Source) -> Draft:
    """Where a draft comes from: a folder of layers or of a head says what it is by itself.

    Raises UnsupportedModel and ConfigurationError for what cannot be used.
    """
    if isinstance(given, Layers):
        return ShallowSource(target, given)
    if isinstance(given, (str, Path)) and shallow_source.is_folder(given):
        return ShallowSource(target, given)
    return heads.source_of(given, target) or Source(given, "draft", trust=target.trust)
