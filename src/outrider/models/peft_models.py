"""Adapters of the library peft: a model that wears one, and a folder that holds one alone.

A folder's adapter is merged into its base's weights when they are read, so that the model runs as
any other does. A `PeftModel` object stays its owner's: the model inside it runs, with the adapters
that are active in it at each call. Several adapters over one target, chosen by request:
`models.lora`.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import pretrained
from outrider.models.config import found, read

_FILE = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: Weights of a whole model beside an adapter's.
_WHOLE = ("model*.safetensors", "pytorch_model*.bin", "*.gguf")
#: Kinds that write tokens or states ahead of the text instead of changing layers.
_AHEAD = frozenset(
    {
        "ADAPTION_PROMPT",
        "CARTRIDGE",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
        "P_TUNING",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
    }
)


class AdapterFolder(NamedTuple):
    """An adapter as hubs hold it: its own few weights, and the name of the model it is for."""

    folder: Path
    base: str  #: a folder, or a name that transformers looks up
    kind: str  #: peft's name of it, such as "LORA"

    def merged(self, model: PreTrainedModel, role: str) -> PreTrainedModel:
        """The base with the adapter in its weights: as `merge_and_unload` of peft makes it.

        Raises ConfigurationError where the adapter's weights are not all for this model.
        """

        def refuse(why: str, error: Exception | None = None) -> ConfigurationError:
            return ConfigurationError(
                f"the adapter does not fit its base, the {role} model {self.base}; got "
                f"{str(self.folder)!r} ({why}); give the base that it was trained on: "
                "base_model_name_or_path in its adapter_config.json"
            )

        try:
            worn, told = pretrained.read_adapter(model, str(self.folder))
        except Exception as error:  # peft raises what torch and json do, too
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise refuse(" ".join(line.strip() for line in lines[:2])[:200], error) from error
        missing = [key for key in told.missing_keys if "vblora_vector_bank" not in key]
        if missing:
            raise refuse(f"it has nothing for {missing[0]} and {len(missing) - 1} more")
        if told.unexpected_keys:
            strange = told.unexpected_keys
            raise refuse(f"the base has no place for {strange[0]} and {len(strange) - 1} more")
        done: PreTrainedModel = worn.merge_and_unload()
        return done


def adapter_folder(given: object, role: str) -> AdapterFolder | None:
    """What a path is, if it is an adapter's folder; None for anything else.

    Raises ConfigurationError where the package peft is missing, the base is not named or not to be
    found, or the folder holds a whole model as well; UnsupportedModel for a prompt in place of
    weights.

    >>> adapter_folder("org/name", "target")
    """
    if not isinstance(given, (str, Path)) or not (Path(given) / _FILE).is_file():
        return None
    folder = Path(given)
    said = settings(folder)
    base, kind = said.get("base_model_name_or_path"), str(said.get("peft_type", "LORA"))
    if kind in _AHEAD:
        raise UnsupportedModel(_ahead(kind, repr(str(folder))))
    if any(file for pattern in _WHOLE for file in folder.glob(pattern)):
        raise ConfigurationError(
            f"the {role} model must be a whole model or an adapter; got {str(folder)!r}, which has "
            f"weights of both; move {_FILE} and {WEIGHTS} to a folder of their own"
        )
    if not (folder / WEIGHTS).is_file():
        raise ConfigurationError(
            f"an adapter's weights are read from {WEIGHTS} alone; got {str(folder)!r} as the "
            f"{role} model, which has no such file; save it with safe_serialization=True"
        )
    if not isinstance(base, str) or not base:
        raise ConfigurationError(
            f"{_FILE} names no base; got {str(folder)!r} as the {role} model; write "
            "base_model_name_or_path into it"
        )
    if find_spec("peft") is None:
        raise ConfigurationError(
            f"an adapter is put on with the package peft; got {str(folder)!r}, an adapter of "
            f"{base}, without it; pip install 'outrider[peft]'"
        )
    return AdapterFolder(folder, _located(folder, base, role), kind)


def settings(folder: Path) -> dict[str, Any]:
    """A folder's adapter_config.json. Raises ConfigurationError for one that is broken."""
    try:
        said = json.loads((folder / _FILE).read_text("utf-8"))
        if not isinstance(said, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{_FILE} of the adapter cannot be used; got {str(folder)!r} ({error}); download it "
            "again"
        ) from error
    return said


def _located(folder: Path, base: str, role: str) -> str:
    """The base as transformers is to look for it: paths may be relative to the adapter's folder."""
    for place in (Path(base), folder / base, folder.parent / base):
        if (place / "config.json").is_file() or place.is_file():
            return str(place)
    if Path(base).is_absolute() or base.startswith(".") or base.count("/") > 1:
        raise ConfigurationError(
            f"the adapter's base is not here; got {str(folder)!r} as the {role} model, an adapter "
            f"of {base!r}, which is no folder; write the base's place into its adapter_config.json "
            "as base_model_name_or_path"
        )
    return base


def unwrapped(given: Any) -> Any:
    """The model inside a `PeftModel`, whose layers wear its adapters; anything else as it is.

    Its own forward hides what it takes, and it is no transformers model. Raises UnsupportedModel
    where an active adapter is a prompt: text ahead of the text, which only its wrapper adds.
    """
    worn = read(given, "peft_config", dict)
    if worn is None or not callable(found(given, "get_base_model")):
        return given
    active = found(given, "active_adapters") or list(worn)
    for name in active if isinstance(active, (list, tuple)) else [active]:
        config = worn.get(name)
        kind = str(found(found(config, "peft_type"), "value") or "")
        if kind in _AHEAD or found(config, "is_prompt_learning"):
            raise UnsupportedModel(_ahead(kind, f"a {type(given).__name__} with {name!r}"))
    return given.get_base_model()


def _ahead(kind: str, what: str) -> str:
    """The refusal of a prompt in place of weights."""
    return (
        f"adapters of kind {kind} put trained states ahead of the text, for which a tree has no "
        f"place; got {what}; use one that changes layers (LoRA, DoRA, IA3), or the base alone"
    )
