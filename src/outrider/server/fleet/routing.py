"""Requests that begin alike go to one replica, which keeps what it has read of prompts."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

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


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Serve's choice of a replica: by the key of a request; when that one is full, the next."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are asked."""
        by_name = {str(one.replica_id): one for one in candidate_replicas}
        told = "" if pending_request is None else pending_request.kwargs.get("key", "")
        return [[by_name[name]] for name in ranked(told, list(by_name))]
