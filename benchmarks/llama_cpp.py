"""llama.cpp's speculative decoding and ours on one GGUF file, one thread each, in turn.

    pip install xllamacpp 'outrider[gguf]'
    python benchmarks/llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf

llama.cpp (by xllamacpp, its server without HTTP) multiplies with the packed weights; outrider
unpacks them to bfloat16 or float32 and reads four or more times as many bytes. So compare each with
its own plain decoding. There is no draft model: llama.cpp drafts by n-grams (`ngram_simple` and
`ngram_cache`), outrider by `recall`. Greedy, processor time of the process, tokens a second; texts
with drafts are compared with plain ones.
"""

import argparse
import json
import time
from collections.abc import Callable

import outrider
from outrider import Sampling, Stop

CODE = (
    "def area(width, height):\n    return width * height\n\n\n"
    "def volume(width, height, depth):\n    return area(width, height) * depth\n"
)
QUESTIONS = (
    "Name the largest planet of the solar system.",
    f"Repeat this Python code exactly:\n{CODE}",
    "Write a Python function that adds two numbers, and one that multiplies them.",
    f"Add a docstring to each function and repeat the code:\n{CODE}",
    "What is the capital of France?",
    "List the numbers from one to twenty, each on a line of its own.",
)

Arm = Callable[[str], tuple[str, int, float]]  #: text, tokens and seconds of an answer


def clocked(run: Callable[[], tuple[str, int]]) -> tuple[str, int, float]:
    """With the processor time of the whole process: threads of llama.cpp are not this one."""
    started = time.process_time()
    text, tokens = run()
    return text, tokens, time.process_time() - started


def theirs(path: str, kind: str, size: int, tokens: int) -> Arm:
    """llama.cpp's server in this process, one thread, one row."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_prompt = False
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    params.speculative.ngram_simple.size_n = size
    params.speculative.ngram_simple.size_m = 8
    server = xllamacpp.Server(params)

    def answer(prompt: str) -> tuple[str, int, float]:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "seed": 1}

        def run() -> tuple[str, int]:
            told = server.handle_completions({**asked, "cache_prompt": False})
            told = json.loads(told) if isinstance(told, (str, bytes)) else told
            return told["choices"][0]["text"], told["usage"]["completion_tokens"]

        return clocked(run)

    return answer


def ours(speculator: outrider.Speculator, tokens: int) -> Arm:
    """Ours, with whatever drafts."""

    def answer(prompt: str) -> tuple[str, int, float]:
        def run() -> tuple[str, int]:
            done = speculator.generate(prompt, Sampling(0), Stop(tokens)).completions[0]
            return done.text, len(done.token_ids)

        return clocked(run)

    return answer


def main() -> None:
    """Print tokens a second of each arm and question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    speculator = outrider.load(asked.file, drafter="recall", threads=1)
    arms = {
        "llama.cpp plain": theirs(asked.file, "NONE", 3, asked.tokens),
        "llama.cpp ngram_simple": theirs(asked.file, "NGRAM_SIMPLE", 3, asked.tokens),
        "llama.cpp ngram_cache": theirs(asked.file, "NGRAM_CACHE", 3, asked.tokens),
        "outrider plain": ours(speculator.plain(), asked.tokens),
        "outrider recall": ours(speculator, asked.tokens),
    }
    print(f"outrider in {speculator.notes.dtype}, packed {speculator.notes.packed}")
    seconds = dict.fromkeys(arms, 0.0)
    counts, texts = dict.fromkeys(arms, 0), {name: [] for name in arms}
    for question in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        prompt = speculator.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        found: dict[str, list[tuple[str, int, float]]] = {name: [] for name in arms}
        for _ in range(asked.repeats):
            for name, arm in arms.items():
                found[name].append(arm(prompt))
        for name, tries in found.items():
            text, count, _ = tries[0]
            least = min(spent for _, _, spent in tries)
            texts[name].append(text)
            counts[name] += count
            seconds[name] += least
        shown = ", ".join(
            f"{name} {tries[0][1] / min(t[2] for t in tries):.1f}" for name, tries in found.items()
        )
        print(f"{question.splitlines()[0][:44]!r}: {shown}", flush=True)
    for name in arms:
        base = name.split()[0] + " plain"
        rate, plain = counts[name] / seconds[name], counts[base] / seconds[base]
        same = sum(a == b for a, b in zip(texts[name], texts[base], strict=True))
        print(
            f"{name:24} {rate:7.1f} tokens/s, {rate / plain:.2f} of its plain decoding, "
            f"texts as plain {same} of {len(QUESTIONS)}"
        )


if __name__ == "__main__":
    main()
