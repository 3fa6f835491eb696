"""What objects of transformers say of themselves.

Their fields differ by family and by version: this is the one place that looks whether one is there.
"""

from typing import TypeVar

Kind = TypeVar("Kind")


def read(of: object, name: str, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind | None:
    """The field `name` of a configuration or a model if it is of this kind, else None.

    >>> from transformers import LlamaConfig
    >>> read(LlamaConfig(vocab_size=96), "vocab_size", int), read(LlamaConfig(), "n_ctx", int)
    (96, None)
    """
    value = getattr(of, name, None)
    return value if isinstance(value, kind) else None
