"""Servers on several machines, by Ray. Needs the extra `ray`; nothing else imports Ray.

    serve run outrider.server.ray.replicas:application target=HuggingFaceTB/SmolLM2-135M-Instruct

replicas  a server as a Serve replica, and the application around several of them
inside    that server asked in its own process
ingress   where requests come in; a stream whose replica dies goes on elsewhere
going_on  what was sent of a stream, so that another replica can go on with it
routing   prompts that begin alike go to the replica that has read them
router    the same as Serve asks for it
batches   files of requests on Ray Data
"""
