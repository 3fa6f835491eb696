"""A model as a GGUF file of another type, so that every engine reads the same numbers.

From a GGUF file everything but the matrices is copied as it is; from a folder of transformers the
file is written whole, for Llama, Qwen2 and Qwen2-MoE with a byte-level BPE. Weights go by way of
bfloat16: a file of type BF16 has the numbers of a bfloat16 folder.

    python -m outrider_lab.peers.gguf_files SmolLM2.Q4_1.gguf SmolLM2.Q8_0.gguf --type Q8_0
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ConfigurationError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TYPES = ("BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
#: transformers' `model_type` to GGUF's architecture.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe"}
_ROUTER = "ffn_gate_inp"  #: what stays in float32 whatever type is asked for, as llama.cpp keeps it
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
_NORMAL, _CONTROL = 1, 3  #: kinds of tokens


def written(source: Path, folder: Path, kind: str) -> Path:
    """The model `source` in that folder with its matrices of type `kind`; written if not there.

    Raises ConfigurationError for an unknown type, UnsupportedModel for a folder of another family.
    """
    if kind not in TYPES:
        raise ConfigurationError(f"--weights are some of {', '.join(TYPES)}; got {kind!r}")
    target = folder / f"{source.stem if source.is_file() else source.name}.{kind}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        (_rewrite if source.is_file() else _convert)(source, part, kind)
        part.rename(target)
    return target


def tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """What is in the file itself, as transformers reads it."""
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name, trust_remote_code=False
    )
    return found


def rounded(weight: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    near = bits + 0x7FFF + ((bits >> 16) & 1)
    return (near & np.uint32(0xFFFF0000)).view(np.float32)


def _file_type(kind: str) -> Any:
    import gguf

    return getattr(gguf.LlamaFileType, f"MOSTLY_{kind}")


def _add(writer: Any, name: str, numbers: np.ndarray, kind: str) -> None:
    """A matrix in the type, a vector in float32."""
    import gguf
    from gguf.quants import quantize

    wanted = gguf.GGMLQuantizationType[kind]
    if numbers.ndim < 2 or _ROUTER in name:  # norms and biases
        writer.add_tensor(name, numbers.astype(np.float32))
    else:
        writer.add_tensor(name, quantize(rounded(numbers), wanted), raw_dtype=wanted)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rewrite(source: Path, target: Path, kind: str) -> None:
    """From a GGUF file."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    own = ("general.architecture", "general.file_type")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in own:
            continue
        first = field.types[0]
        inner = field.types[-1] if first == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), first, inner)
    writer.add_file_type(_file_type(kind))
    for tensor in reader.tensors:
        _add(writer, tensor.name, dequantize(tensor.data, tensor.tensor_type), kind)
    _finish(writer)


def _convert(source: Path, target: Path, kind: str) -> None:
    """From a folder of transformers."""
    import gguf

    config = json.loads((source / "config.json").read_text("utf-8"))
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"a folder of {', '.join(ARCHITECTURES)} is written as GGUF; got {family!r}; give a "
            "GGUF file, as llama.cpp's convert_hf_to_gguf.py writes it"
        )
    writer = gguf.GGUFWriter(str(target), ARCHITECTURES[family])
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    rope = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    writer.add_name(source.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_freq_base(rope or 10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if family == "llama":
        writer.add_rope_dimension_count(config["hidden_size"] // heads)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_file_type(_file_type(kind))
    _vocabulary(writer, source, config)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[ARCHITECTURES[family].upper()], config["num_hidden_layers"]
    )
    for name, numbers in _stacked(_tensors(source), config.get("num_experts", 0)):
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            numbers = _interleaved(numbers, heads if "q_proj" in name else groups)
        _add(writer, known, numbers, kind)
    _finish(writer)


def _stacked(
    tensors: Iterator[tuple[str, np.ndarray]], experts: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The same, all experts' matrices of a layer as one tensor: [experts, outputs, inputs]."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, numbers in tensors:
        if (found := _EXPERT.match(name)) is None:
            # one output is a vector there
            yield name, numbers[0] if name.endswith("shared_expert_gate.weight") else numbers
            continue
        each = parts.setdefault(found[1] + found[3], {})
        each[int(found[2])] = numbers
        if len(each) == experts:
            yield found[1] + found[3], np.stack([each[number] for number in range(experts)])
            each.clear()


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a rotated projection as llama.cpp turns them: pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _tensors(source: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 numbers of a folder's safetensors."""
    import torch
    from safetensors import safe_open

    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name).to(torch.float32).numpy()


def _vocabulary(writer: Any, source: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE as `tokenizer.json` has it."""
    told = json.loads((source / "tokenizer.json").read_text("utf-8"))
    model = told["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise UnsupportedModel(
            f"a byte-level BPE is written as GGUF; got {model['type']} in {source}; give a "
            "GGUF file"
        )
    size = config["vocab_size"]
    tokens = [f"[PAD{n}]" for n in range(size)]
    kinds = [_CONTROL] * size
    for word, number in model["vocab"].items():
        tokens[number], kinds[number] = word, _NORMAL
    for one in told["added_tokens"]:
        tokens[one["id"]] = one["content"]
        kinds[one["id"]] = _CONTROL if one["special"] else _NORMAL
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    split = json.dumps(told["pre_tokenizer"])  # how text is split ahead of BPE
    writer.add_tokenizer_pre("qwen2" if '"Split"' in split else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    adders: dict[str, Callable[[int], None]] = {
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "pad_token_id": writer.add_pad_token_id,
    }
    for name, add in adders.items():
        given = config.get(name)
        if isinstance(given, int):
            add(given)
    writer.add_add_bos_token(False)
    template = source / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text("utf-8"))


def main() -> None:
    """Read two names and a type."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=TYPES, required=True)
    asked = parser.parse_args()
    (_rewrite if asked.source.is_file() else _convert)(asked.source, asked.target, asked.type)


if __name__ == "__main__":
    main()
