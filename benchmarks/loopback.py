"""Clients that ask a server on this machine go past proxies of the environment (http_proxy)."""

import os

OWN = ("localhost", "127.0.0.1")


def past_proxies() -> None:
    """Name this machine in no_proxy, which urllib and clients' httpx read."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if given.strip() != "*":
        os.environ["no_proxy"] = ",".join([*filter(None, given.split(",")), *OWN])
