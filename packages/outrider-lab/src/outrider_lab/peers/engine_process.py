"""An engine in a process of its own that answers line by line; started by `engines.EngineProcess`.

    PYTHON engine_process.py '{"engine": "llama.cpp", "model": "m.gguf", "mode": "NONE",
                               "threads": 1, "cores": [0]}'

PYTHON needs the engine's package and, but for `outrider`, nothing of ours: this file imports from
the standard library alone. The first line out tells what it took to be ready, every other line is
the answer to a line in: what the engine says (`text`, `tokens`) with `cpu`, the processor seconds
of the whole process, `wall`, and `memory`, the most megabytes that were resident so far, a mapped
file's pages among them.
"""

import atexit
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

Words = dict[str, Any]
#: Room for its caches, threads where this process may run, and no calls home.
QUIET_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
Answer = Callable[[Words], Words]


def outrider_text(asked: Words) -> Answer:
    """Ours: every way of decoding one model, plain and with nothing set, and what steps take."""
    import outrider
    from outrider.models.calibrate import cost

    more = {"draft": asked["draft"]} if asked.get("draft") else {}
    loaded = outrider.load(asked["model"], threads=asked["threads"], dtype=asked["dtype"], **more)
    ways = {"plain": loaded.plain(), "default": loaded}
    asked["means"] = loaded.notes.means

    def answer(one: Words) -> Words:
        if "widths" in one:
            return {"ms": cost(loaded.engine.target, one["widths"], repeats=20)}
        done = ways[one["way"]].generate(
            one["prompt"], outrider.SamplingParams(0), outrider.Stop(one["tokens"])
        )
        first = done.completions[0]
        steps = done.stats.engine_steps
        return {"text": first.text, "tokens": len(first.token_ids), "steps": steps}

    return answer


def llama_cpp(asked: Words) -> Answer:
    """llama.cpp's server without HTTP, one row."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.cache_prompt = False
    params.verbosity = -1
    kinds, speculative = xllamacpp.common_speculative_type, params.speculative
    speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{asked['mode']}")]
    if asked["mode"].startswith("DRAFT"):
        speculative.draft.mparams.path = asked["draft"]
        threads = speculative.draft.cpuparams, speculative.draft.cpuparams_batch
        for one in threads:
            one.n_threads = asked["threads"]
    server = xllamacpp.Server(params)
    asked["means"] = xllamacpp.get_system_info().strip(" |")

    def answer(one: Words) -> Words:
        body = {
            "prompt": one["prompt"],
            "max_tokens": one["tokens"],
            "temperature": 0.0,
            "cache_prompt": False,
        }
        told = server.handle_completions(body)
        told = json.loads(told) if isinstance(told, (str, bytes)) else told
        return {
            "text": told["choices"][0]["text"],
            "tokens": told["usage"]["completion_tokens"],
        }

    return answer


def llama_cpp_server(asked: Words) -> Answer:
    """llama.cpp's server with HTTP; prompts are read anew, whoever asked them before."""
    import xllamacpp

    rows = asked["rows"]
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_parallel, params.n_ctx = rows, rows * asked["context"]
    params.warmup, params.verbosity, params.port = True, -1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.cache_prompt, params.cache_ram_mib = False, 0
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{asked['mode']}")]
    server = xllamacpp.Server(params)
    asked["address"] = server.listening_address

    def answer(_: Words) -> Words:
        return {"worked": worked(os.getpid()), "address": server.listening_address}

    return answer


def outrider_server(asked: Words) -> Answer:
    """`outrider serve`, without its cache of prompts."""
    words = ["-m", "outrider", "serve", "--model", asked["model"], "--dtype", asked["dtype"]]
    words += ["--max-num-seqs", str(asked["rows"]), "--max-model-len", str(asked["context"])]
    words += ["--threads", str(asked["threads"]), "--prefix-cache-mib", "0"]
    return _command(asked, words + asked["more"])


def vllm_server(asked: Words) -> Answer:
    """vLLM's server, without its cache of prompts, asking nobody but this machine."""
    for name, value in QUIET_VLLM.items():
        os.environ.setdefault(name, value)
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", asked["model"]]
    words += ["--max-num-seqs", str(asked["rows"]), "--max-model-len", str(asked["context"])]
    words += ["--no-enable-prefix-caching", "--dtype", "bfloat16"]
    return _command(asked, words + asked["more"])


def _command(asked: Words, words: list[str]) -> Answer:
    """A server as a command of this Python, once it answers; it ends with this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, *words, "--port", str(port)]
    server = subprocess.Popen(words, start_new_session=True)
    atexit.register(_end, server)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked["address"] = f"http://127.0.0.1:{port}"
    while True:
        try:
            opener.open(f"{asked['address']}/v1/models", timeout=10).close()
            return lambda one: {"worked": worked(server.pid)}
        except (urllib.error.URLError, ConnectionError, TimeoutError):  # it reads its model
            if server.poll() is not None:
                sys.exit(f"the server ended with status {server.returncode}: {' '.join(words)}")
            time.sleep(0.1)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and after some seconds end it and all that it has started."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def worked(process: int) -> float:
    """Seconds that processors have worked for a process and for what it has started (Linux)."""
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for thread in os.listdir(f"/proc/{process}/task"):
        with open(f"/proc/{process}/task/{thread}/children") as file:
            seconds += sum(worked(int(child)) for child in file.read().split())
    return seconds


def transformers_text(asked: Words) -> Answer:
    """transformers' generate on the same file, which it unpacks to float32."""
    import torch
    import transformers

    torch.set_num_threads(asked["threads"])
    folder, file = os.path.split(asked["model"])
    known = {"gguf_file": file} if file.endswith(".gguf") else {}
    where = folder if known else asked["model"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=getattr(torch, asked["dtype"]), trust_remote_code=False, **known
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **known)
    lookup = {"prompt_lookup_num_tokens": 10} if asked["mode"] == "PROMPT_LOOKUP" else {}

    def answer(one: Words) -> Words:
        ids = torch.tensor([one["prompt"]], device="cpu")
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=one["tokens"],
                do_sample=False,
                **lookup,
            )
        new = out[0, ids.shape[1] :].tolist()
        return {"text": tokenizer.decode(new, skip_special_tokens=True), "tokens": len(new)}

    return answer


def openvino_text(asked: Words) -> Answer:
    """OpenVINO GenAI's pipeline on the same GGUF file."""
    import numpy as np
    import openvino
    import openvino_genai

    lookup = {"prompt_lookup": True} if asked["mode"] == "PROMPT_LOOKUP" else {}
    plan = openvino_genai.SchedulerConfig()
    plan.enable_prefix_caching = False  # a prompt that comes twice is read twice, as by all
    plan.cache_size = 1
    more = lookup | {"scheduler_config": plan, "INFERENCE_NUM_THREADS": asked["threads"]}
    pipe = openvino_genai.LLMPipeline(asked["model"], "CPU", **more)
    tokenizer = pipe.get_tokenizer()

    def answer(one: Words) -> Words:
        how = openvino_genai.GenerationConfig()
        how.max_new_tokens = one["tokens"]
        how.do_sample = False
        how.set_eos_token_id(tokenizer.get_eos_token_id())
        if lookup:
            how.num_assistant_tokens, how.max_ngram_size = 5, 3
        ids = openvino.Tensor(np.array([one["prompt"]], np.int64))
        new = list(pipe.generate(ids, how).tokens[0])
        return {"text": tokenizer.decode(new), "tokens": len(new)}

    return answer


def outrider_speech(asked: Words) -> Answer:
    """Ours: every way of transcribing with one Whisper."""
    import numpy as np

    import outrider

    more: Words = {"draft": asked["draft"]} if asked.get("draft") else {}
    loaded = outrider.load(asked["model"], dtype=asked["dtype"], threads=asked["threads"], **more)
    ways = {"plain": loaded.plain(), "default": loaded}
    asked["means"] = loaded.notes.means

    def answer(one: Words) -> Words:
        beams = {} if one["beams"] == 1 else {"beam_size": one["beams"]}
        done = ways[one["way"]].transcribe(
            np.load(one["path"]), language="en", temperature=0, timestamps=False, **beams
        )
        return {"text": done.text, "encoder": done.stats.encoder_ms / 1e3}

    return answer


def faster_whisper(asked: Words) -> Answer:
    """faster-whisper on a folder in CTranslate2's format."""
    import numpy as np
    from faster_whisper import WhisperModel

    model = WhisperModel(
        asked["model"], device="cpu", compute_type=asked["mode"], cpu_threads=asked["threads"]
    )

    def answer(one: Words) -> Words:
        parts, _ = model.transcribe(
            np.load(one["path"]),
            language="en",
            beam_size=one["beams"],
            temperature=0,
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        return {"text": " ".join(part.text.strip() for part in parts)}

    return answer


def transformers_speech(asked: Words) -> Answer:
    """transformers' Whisper in float32."""
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(asked["threads"])
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        asked["model"], dtype=torch.float32, trust_remote_code=False
    ).eval()
    features = transformers.WhisperFeatureExtractor.from_pretrained(
        asked["model"], trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"], trust_remote_code=False)

    def answer(one: Words) -> Words:
        found = features(np.load(one["path"]), sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(
                found.input_features,
                language="en",
                task="transcribe",
                num_beams=one["beams"],
                do_sample=False,
            )
        return {"text": tokenizer.decode(ids[0], skip_special_tokens=True)}

    return answer


#: What `engine` may say.
ENGINES: dict[str, Callable[[Words], Answer]] = {
    "outrider": outrider_text,
    "llama.cpp": llama_cpp,
    "outrider, server": outrider_server,
    "llama.cpp, server": llama_cpp_server,
    "vLLM, server": vllm_server,
    "transformers": transformers_text,
    "OpenVINO GenAI": openvino_text,
    "outrider, speech": outrider_speech,
    "faster-whisper": faster_whisper,
    "transformers, speech": transformers_speech,
}


def memory() -> float:
    """The most megabytes that were resident so far.

    Linux's `ru_maxrss` outlives exec, so that a small program would have its parent's.
    """
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as lines:
            (most,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(most) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


def main() -> None:
    """Serve standard input until it ends."""
    asked = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if asked["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, asked["cores"])

    def tell(what: Words) -> None:
        print(json.dumps(what), file=answers, flush=True)

    answer = ENGINES[asked["engine"]](asked)
    ready = {"cpu": time.process_time(), "memory": memory(), "means": asked.get("means")}
    ready["address"] = asked.get("address")
    tell(ready)
    for line in sys.stdin:
        one = json.loads(line)
        cpu, wall = time.process_time(), time.perf_counter()
        done = answer(one)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tell(done | {"cpu": cpu, "wall": wall, "memory": memory()})


if __name__ == "__main__":
    main()
