"""Modules that other libraries have quantised, or compiled, as targets on a CPU: a matrix.

    python benchmarks/quantised.py SMOLLM2                 # every way for which a package is there
    python benchmarks/quantised.py SMOLLM2 --ways torch.compile bitsandbytes-nf4

For each way the model is loaded by transformers and given to outrider as an object, or why not
(compressed-tensors: from a checkpoint in 4 bits that its own library is made to write first); the
seconds of this thread's processor time until `load` is done; whether the greedy texts under
`recall` are those of the model's own `generate` (called behind `load`, which sets bitsandbytes'
4-bit layers to compute in float32, and without compiled code); how far a tree's scores are from
those of its paths (`tree_check`); milliseconds of this thread's processor time for calls of one and
four nodes, and of a token with nothing set (`recall`, planned) beside plain decoding on a text that
repeats some of its prompt. States are float32 wherever the library lets them.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import SamplingParams, Stop
from outrider.errors import OutriderError
from outrider.models.prefill import of_tree
from outrider.tree import chain

PROMPTS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "def mean(values):\n    return sum(values) / len(values)\n\ndef median(values):",
)
NEW = 48


def bitsandbytes(**how: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**how)


def torchao(name: str, **how: Any) -> Callable[[], Any]:
    def made() -> Any:
        from torchao import quantization

        return transformers.TorchAoConfig(getattr(quantization, name)(**how))

    return made


#: How transformers is asked; None: it is not quantised.
WAYS: dict[str, Callable[[], Any] | None] = {
    "as it is": None,
    "torch.compile": None,
    "bitsandbytes-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes-int8-outliers": bitsandbytes(load_in_8bit=True),
    "torchao-int8-weights": torchao("Int8WeightOnlyConfig"),
    "torchao-int4-weights": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao-float8-weights": torchao("Float8WeightOnlyConfig"),
    "torchao-int8-activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto-int8": lambda: transformers.QuantoConfig(weights="int8"),
    "quanto-int4": lambda: transformers.QuantoConfig(weights="int4"),
    "hqq-int4": lambda: transformers.HqqConfig(nbits=4, group_size=64),
    "gptq-int4": lambda: transformers.GPTQConfig(bits=4, dataset=["a b c"] * 8),
    "awq-int4": lambda: transformers.AwqConfig(bits=4),
    "compressed-tensors-int4": None,
}


def compressed(folder: str, into: str) -> str:
    """A checkpoint in 4 bits of groups of 64, by their largest weight, of compressed-tensors."""
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor

    weights = quantization.QuantizationArgs(num_bits=4, strategy="group", group_size=64)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized"
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and hasattr(module, "weight_scale"):
            largest = module.weight.detach().unflatten(1, (-1, 64)).abs().amax(-1)
            module.weight_scale.data.copy_((largest / 7.5).view_as(module.weight_scale))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(into)
    compressor.update_config(into)
    return into


def loaded(folder: str, way: str) -> Any:
    if way.startswith("compressed-tensors"):
        with tempfile.TemporaryDirectory() as into:
            return AutoModelForCausalLM.from_pretrained(
                compressed(folder, into), dtype=torch.float32, trust_remote_code=False
            ).eval()
    config = WAYS[way]
    how = {} if config is None else {"quantization_config": config(), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, **how
    ).eval()
    if way == "torch.compile":
        model.compile(dynamic=True)
    return model


@torch.inference_mode()
def calls(target: Any, looks: int = 9) -> dict[int, float]:
    """Milliseconds of calls of so many nodes behind 64 tokens, medians of interleaved looks."""
    random, took = torch.Generator().manual_seed(0), {1: [], 4: []}
    cache, first = target.open(1, 128), torch.tensor([64])
    tokens = torch.randint(3, 1000, (1, 65), generator=random)
    target.forward(cache, of_tree(tokens, chain(64), torch.tensor([0]), 128))
    for _ in range(looks):
        for count, spent in took.items():
            nodes = of_tree(tokens[:, :count], chain(count - 1), first, 128)
            started = time.thread_time()
            target.forward(cache, nodes)
            spent.append(1e3 * (time.thread_time() - started))
    return {count: statistics.median(spent) for count, spent in took.items()}


def one(folder: str, way: str) -> str:
    """A line of the matrix."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    try:
        model = loaded(folder, way)
    except Exception as error:  # whatever a library makes of a processor that it does not know
        return f"does not load: {type(error).__name__}: {str(error).strip().splitlines()[0][:110]}"
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    started = time.thread_time()
    try:
        speculator = outrider.load(model, drafter="recall", threads=1, generation_config="none")
    except OutriderError as error:
        return f"refused: {str(error).split('; got')[0][:150]}"
    ready = time.thread_time() - started
    with torch.compiler.set_stance("force_eager"):
        own = [
            model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)).long(), **how)
            for p in prompts
        ]
    expected = [text[0, len(p) :].tolist() for text, p in zip(own, prompts, strict=True)]
    milliseconds, spent, equal = calls(speculator.engine.target), {}, 0
    for name, arm in (("plain", speculator.plain()), ("set", speculator)):
        arm.generate([prompts[0]], SamplingParams(0.0), Stop(8, token_ids=()))
        started = time.thread_time()
        stop = Stop(NEW, token_ids=())  # past the text's end, as `generate` was told
        told = [arm.generate([p], SamplingParams(0.0), stop).completions[0] for p in prompts]
        spent[name] = time.thread_time() - started
        equal = sum(one.token_ids == text for one, text in zip(told, expected, strict=True))
    each = 1e3 * spent["plain"] / (NEW * len(prompts))
    return (
        f"loads in {ready:.0f} s; {equal} of {len(prompts)} texts its own; tree_check "
        f"{speculator.notes.tree_check:.1e}; t(1) {milliseconds[1]:.1f} ms, t(4) "
        f"{milliseconds[4]:.1f}; plain {each:.1f} ms a token, nothing set "
        f"{spent['plain'] / spent['set']:.2f}x; {speculator.notes.means}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=WAYS, metavar="WAY")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for way in arguments.ways:
        print(f"{way}: {one(arguments.model, way)}", flush=True)


if __name__ == "__main__":
    main()
