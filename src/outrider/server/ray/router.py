"""Serve's choice of a replica, by `routing`."""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from outrider.server.ray.routing import ranked


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """By the key of a request; when that replica is full, the next one."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are asked."""
        by_name = {str(one.replica_id): one for one in candidate_replicas}
        told = "" if pending_request is None else pending_request.kwargs.get("key", "")
        return [[by_name[name]] for name in ranked(told, list(by_name))]
