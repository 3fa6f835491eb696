"""Which adapter writes each answer, as it is asked for: by its name, or by vLLM's LoRARequest."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from outrider import arguments
from outrider.errors import ConfigurationError


class NamedAdapter(Protocol):
    """What vLLM calls a LoRARequest: its name is read, and nothing else of it."""

    lora_name: str


Adapter: TypeAlias = str | NamedAdapter | None  #: None: the target alone


def adapter_names(given: Adapter | Sequence[Adapter], rows: int) -> list[str | None]:
    """One name a row, from one for all or one for each.

    >>> adapter_names("sql", 2), adapter_names([None, "sql"], 2)
    (['sql', 'sql'], [None, 'sql'])
    """
    if not isinstance(given, (list, tuple)):
        return [_name(given)] * rows
    if len(given) != rows:
        raise ConfigurationError(
            f"lora_request must be one adapter or one per prompt; got {len(given)} for {rows} "
            "prompts; give one to use it for all"
        )
    return [_name(one) for one in given]


def _name(given: object) -> str | None:
    if given is None or isinstance(given, str):
        return given
    name = getattr(given, "lora_name", None)
    if not isinstance(name, str):
        do = "give the name that it has in lora_modules, or None"
        arguments.refuse("lora_request", "an adapter by name", given, do)
    return name
