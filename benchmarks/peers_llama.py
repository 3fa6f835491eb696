"""llama.cpp as a process of its own that answers line by line: run by `processors.py`.

Its Python needs the package xllamacpp and nothing of ours. Each line in is a JSON object with
`prompt` (token ids) and `tokens`; each line out has `text`, `tokens` and the processor seconds of
the whole process, `cpu`.
"""

import json
import os
import sys
import time
from typing import Any

MODES = ("NONE", "NGRAM_SIMPLE", "NGRAM_CACHE", "NGRAM_MAP_K", "NGRAM_MOD")


def server(path: str, mode: str, threads: int) -> Any:
    """llama.cpp's server without HTTP, one row."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.verbosity = -1
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{mode}")]
    return xllamacpp.Server(params)


def main() -> None:
    """Serve standard input with a file, a mode, a number of threads and a core (-1: any)."""
    path, mode, threads, core = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if core >= 0:
        os.sched_setaffinity(0, {core})
    started = time.process_time()
    engine = server(path, mode, threads)
    print(json.dumps({"ready": time.process_time() - started}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        body = {
            "prompt": asked["prompt"],
            "max_tokens": asked["tokens"],
            "temperature": 0.0,
            "cache_prompt": False,
        }
        started = time.process_time()
        told = engine.handle_completions(body)
        spent = time.process_time() - started
        told = json.loads(told) if isinstance(told, (str, bytes)) else told
        answer = {
            "text": told["choices"][0]["text"],
            "tokens": told["usage"]["completion_tokens"],
            "cpu": spent,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
