"""Servers on several machines, by Ray. Needs the extra `ray`; nothing else imports it.

    serve run outrider.server.fleet:application target=HuggingFaceTB/SmolLM2-135M-Instruct

replicas  a server as a Serve replica, and the application around several of them
routing   prompts that begin alike go to the replica that has read them
going_on  what was sent of a stream, so that another replica can go on with it
ingress   where requests come in; a stream whose replica dies goes on elsewhere
batches   files of requests on Ray Data
"""

from outrider.server.fleet.replicas import Settings, application

__all__ = ["Settings", "application"]
