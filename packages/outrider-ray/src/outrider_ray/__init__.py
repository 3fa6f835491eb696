"""Several machines, by Ray: servers, files of requests, and calls of `outrider.speculate`.

    serve run outrider_ray.replicas:application target=HuggingFaceTB/SmolLM2-135M-Instruct

replicas  a server as a Serve replica, several of them, and which one is asked
ingress   where requests come in; a stream whose replica dies goes on elsewhere
requests  which replica a request goes to, how it is asked in its own process, what was sent of a
          stream: nothing of it needs Ray
batches   files of requests on Ray Data: `outrider batch --ray`
executor  functions of `outrider.speculate` on a cluster's workers

Importing this imports nothing of Ray.
"""

from outrider_ray.executor import RayExecutor

__all__ = ["RayExecutor"]
