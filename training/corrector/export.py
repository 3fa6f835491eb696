"""Write a run's checkpoint as an ordinary transformers checkpoint in bf16, without a tokenizer.

    python -m training.corrector.export --checkpoint work/runs/corrector/last.pt \\
        --out work/export/corrector

The tokenizer is the shipped pair's; `outrider.load` takes it from there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from training.corrector.model import T5, Shape, to_transformers


def export(checkpoint: Path, out: Path) -> int:
    """Write the model; the size of its weights in bytes."""
    with torch.serialization.safe_globals([Shape]):
        saved = torch.load(checkpoint, weights_only=True)
    model = T5(saved["shape"])
    model.load_state_dict(saved["optimiser"]["weights"])
    to_transformers(model).to(torch.bfloat16).save_pretrained(out)
    return (out / "model.safetensors").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(f"{args.out}: {export(args.checkpoint, args.out) / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
