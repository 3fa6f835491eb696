"""A mixture of experts that writes text, made of a dense Llama: for measurements beside llama.cpp.

A layer's MLP is the expert that all tokens share, as Qwen2-MoE has one; the others are parts of it,
drawn at random, which add a tenth of what they give, and a router of random directions chooses.
What comes out is a folder of transformers, from which `outrider bench peers` writes the GGUF file
that all engines read:

    python benchmarks/experts.py SMOLLM2 MIXTURE --experts 16 --chosen 4
    outrider bench peers --out peers -m MIXTURE --weights Q8_0 --engines llama.cpp --cores 0
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

_PART = 3  #: experts are so many times narrower than the MLP
_ADDED = 0.1  #: how much of what an expert gives is added
_GATE = 0.5  #: what the shared expert is multiplied by: the logistic function near 0,
_SLIGHT = 1e-3  #: not at it, where llama.cpp divides 0 by 0


def upcycled(source: Path, experts: int, chosen: int) -> Qwen2MoeForCausalLM:
    """The mixture, in bfloat16."""
    dense = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, trust_remote_code=False, weights_only=True
    )
    known = dense.config
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **{
            name: getattr(known, name)
            for name in (
                "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
                "max_position_embeddings rms_norm_eps rope_parameters "
                "bos_token_id eos_token_id pad_token_id"
            ).split()
        },
        intermediate_size=known.intermediate_size,
        moe_intermediate_size=known.intermediate_size // _PART,
        shared_expert_intermediate_size=known.intermediate_size,
        num_experts=experts,
        num_experts_per_tok=chosen,
        tie_word_embeddings=False,  # as llama.cpp wants it of this type
        dtype=torch.bfloat16,
    )
    made = Qwen2MoeForCausalLM(config).to(torch.bfloat16).eval()
    weights = {**dense.state_dict(), "lm_head.weight": dense.lm_head.weight}
    state, width = made.state_dict(), config.moe_intermediate_size
    with torch.no_grad():
        for name, to in state.items():
            if name in weights and to.shape == weights[name].shape:
                to.copy_(weights[name])
            elif name.endswith("mlp.gate.weight"):
                to.normal_()
            elif name.endswith("shared_expert_gate.weight"):
                to.normal_(std=_SLIGHT)
            elif not name.endswith("_proj.weight") and ".experts." not in name:
                to.zero_()  # biases
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}.mlp"
            gate, up, down = (
                weights[f"{at}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            for part, one in (("gate", gate), ("up", up), ("down", down / _GATE)):
                state[f"{at}.shared_expert.{part}_proj.weight"].copy_(one)
            for expert in range(experts):
                some = torch.randperm(len(gate))[:width]
                both = torch.cat([gate[some], up[some]])
                state[f"{at}.experts.gate_up_proj"][expert].copy_(both)
                state[f"{at}.experts.down_proj"][expert].copy_(_ADDED * down[:, some])
    return made


def write(source: Path, out: Path, experts: int, chosen: int) -> int:
    """The mixture and its tokenizer as a folder; how many weights it has."""
    made = upcycled(source, experts, chosen)
    made.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return sum(weight.numel() for weight in made.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a folder of a Llama, such as SmolLM2")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=4)
    asked = parser.parse_args()
    count = write(asked.source, asked.out, asked.experts, asked.chosen)
    print(f"{count / 1e6:.0f} million weights in {asked.out}")


if __name__ == "__main__":
    main()
