"""Servers on several machines, by Ray. Needs the extra `ray`; nothing else imports Ray.

    serve run outrider.server.ray.replicas:application target=HuggingFaceTB/SmolLM2-135M-Instruct

replicas  a server as a Serve replica, several of them, and which one is asked
ingress   where requests come in; a stream whose replica dies goes on elsewhere
requests  which replica a request goes to, how it is asked in its own process, what was sent of a
          stream: nothing of it needs Ray
batches   files of requests on Ray Data
"""
