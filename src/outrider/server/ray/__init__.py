"""Servers on several machines, by Ray. Needs the extra `ray`; nothing else imports Ray.

    serve run outrider.server.ray.replicas:application target=HuggingFaceTB/SmolLM2-135M-Instruct

replicas  a server as a Serve replica, asked in its own process, and several of them
ingress   where requests come in: prompts that begin alike go to the replica that has read them,
          and a stream whose replica dies goes on elsewhere
batches   files of requests on Ray Data
"""
