"""Which replica a request goes to: those that begin alike meet, where their prompt was read."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

HEAD = 1024  #: characters of a prompt that say where it goes


def key(body: Mapping[str, Any]) -> str:
    """What requests have in common that should meet: `prompt_cache_key`, or how prompts begin.

    >>> key({"prompt": "def f(x):", "prompt_cache_key": "mine"}), key({"prompt": "def f(x):"})
    ('mine', '"def f(x):"')
    """
    told = body.get("prompt_cache_key")
    if isinstance(told, str):
        return told
    return json.dumps(body.get("prompt", body.get("messages")))[:HEAD]


def ranked(key: str, names: Sequence[str]) -> list[str]:
    """Names by preference of a key: when one comes or goes, no other two change places.

    Rendezvous hashing (Thaler and Ravishankar 1998).

    >>> first, second, third = ranked("a prompt", ["x", "y", "z"])
    >>> ranked("a prompt", [third, second]) == [second, third]
    True
    """
    return sorted(names, key=lambda name: blake2b(f"{name}\n{key}".encode()).digest())
