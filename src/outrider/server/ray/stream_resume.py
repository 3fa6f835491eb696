"""What was sent of a stream: enough for another replica to go on with it.

A seeded request is decoded with noise that is keyed by seed and place, so its text goes on as it
would have. Without a seed what comes is drawn anew behind what was sent, which is the same law.
"""

from collections.abc import Mapping
from typing import Any

from outrider.server.protocol import BaseRequest

Chunk = dict[str, Any]


class StreamState:
    """A stream as its client has it, from whatever replicas its chunks come."""

    def __init__(self, asked: Mapping[str, Any], body: BaseRequest) -> None:
        self._asked, self._told_ids = asked, body.return_token_ids
        self._sent: dict[int, dict[str, Any]] = {}
        self._name: Chunk = {}

    def body(self) -> dict[str, Any]:
        """What the next replica is asked for."""
        options = {**(self._asked.get("stream_options") or {}), "include_obfuscation": False}
        more: dict[str, Any] = {"return_token_ids": True, "stream_options": options}
        if self._sent:
            more["resume"] = [self._sent[index] for index in sorted(self._sent)]
        return {**self._asked, **more}

    def absorb(self, chunk: Chunk) -> Chunk | None:
        """A chunk as the client gets it; None for what it has already."""
        self._name = self._name or {"id": chunk["id"], "created": chunk["created"]}
        pieces = [piece for piece in chunk["choices"] if self._new(piece)]
        if chunk["choices"] and not pieces:
            return None
        return chunk | self._name | {"choices": [self._shown(piece) for piece in pieces]}

    def _new(self, piece: Chunk) -> bool:
        """Whether it tells something; what opens a choice is told once."""
        fresh = {"token_ids": [], "characters": 0, "finish_reason": None}
        opens = piece["index"] not in self._sent
        sent = self._sent.setdefault(piece["index"], fresh)
        if "token_ids" not in piece:
            return opens
        # thoughts and calls are not counted: where there are any, the tokens say what was told
        text = piece["delta"].get("content", "") if "delta" in piece else piece["text"]
        sent["token_ids"] += piece["token_ids"]
        sent["characters"] += len(text)
        sent["finish_reason"] = piece["finish_reason"]
        return True

    def _shown(self, piece: Chunk) -> Chunk:
        if self._told_ids:
            return piece
        own = ("token_ids", "prompt_token_ids")
        return {name: value for name, value in piece.items() if name not in own}
