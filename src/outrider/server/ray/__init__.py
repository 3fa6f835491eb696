"""Servers on several machines, by Ray. Needs the extra `ray`; nothing else imports Ray.

    serve run outrider.server.ray.replicas:application target=HuggingFaceTB/SmolLM2-135M-Instruct

replicas       a server as a Serve replica, several of them, and which one is asked
asgi_call      that server asked in its own process
ingress        where requests come in; a stream whose replica dies goes on elsewhere
stream_resume  what was sent of a stream, so that another replica can go on with it
routing        prompts that begin alike go to the replica that has read them
batches        files of requests on Ray Data
"""
