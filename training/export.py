"""Write a run's checkpoint as an ordinary transformers checkpoint: bf16 weights and tokenizer.

    python -m training.export --checkpoint runs/target/last.pt --tokenizer tokenizer.json \\
        --out export/target
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from training.model import load, to_transformers


def export(checkpoint: Path, tokenizer_file: Path, out: Path) -> int:
    """Write model and tokenizer; the size of the weights in bytes.

    bf16 halves the download and loses nothing that shows: the model was trained in it.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end, pad = (tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|pad|>"))
    # The document mark opens a text and closes it, so it is both.
    specials = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    twin = to_transformers(load(checkpoint), specials).to(torch.bfloat16)
    twin.save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=twin.config.max_position_embeddings,
    ).save_pretrained(out)
    return (out / "model.safetensors").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    size = export(args.checkpoint, args.tokenizer, args.out)
    print(f"{args.out}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
