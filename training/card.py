"""Write the model card from measured figures; nothing in it is typed by hand but the recipe.

    python -m training.card --evaluation evaluation.json --manifest corpus/manifest.jsonl \\
        --weights export --recipe recipe.md --out MODEL_CARD.md
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from training.heldout import MODULES
from training.tokens import read_documents

HEAD = """# Model card: a target and a draft for Python code

Two Llama models with one tokenizer, made to show speculative decoding on an ordinary machine.
They write text that looks like Python. They know nothing, follow no instructions, and their code
is not meant to be run. With them comes an n-gram table in the same vocabulary: the cheapest drafter
with a law.
"""


def data_section(manifest: list[dict[str, Any]]) -> str:
    """Where the text is from, under which licences, and what was held out."""
    kept: Counter[tuple[str, str]] = Counter()
    for row in manifest:
        if row["split"] == "train":
            kept[row["package"], row["licence"]] += row["kept"]
    rows = [
        f"| {package} | {licence} | {size / 1e6:.2f} |"
        for (package, licence), size in kept.most_common()
        if size > 50_000
    ]
    held = sum(row["kept"] for row in manifest if row["split"] == "heldout") / 1e6
    modules = ", ".join(sorted(MODULES))
    return f"""## Data

{sum(kept.values()) / 1e6:.1f} million characters of Python source, deduplicated by block, generated
tables left out. `training/manifest.jsonl` lists every file with its SHA-256 and licence. Sources
with more than 0.05 million characters:

| source | licence | million characters kept |
|---|---|---|
{chr(10).join(rows)}

Held out by name, library file and tests ({held:.2f} million characters): {modules}.
Their blocks of more than 200 characters are left out wherever else they occur.
"""


def figures_section(title: str, figures: dict[str, Any]) -> str:
    """The tables of one evaluation."""
    text = figures["held-out text"]
    lines = [
        f"## {title}",
        "",
        f"Held-out modules: {text['loss']:.4f} nats per token, "
        f"perplexity {text['perplexity']:.2f}, {text['bits per byte']:.3f} bits per byte.",
        "",
        "Alpha is the mean of sum min(target, draft), the chance that a drawn token is kept; at",
        "T = 0 the share of places where both choose the same token.",
        "",
        "| text | draft | T = 1 | T = 0.6 | T = 0 |",
        "|---|---|---|---|---|",
    ]
    for name, alphas in figures["agreement on held-out text"].items():
        values = " | ".join(f"{alphas[t]:.3f}" for t in ("T=1", "T=0.6", "T=0"))
        lines.append(f"| held-out modules | {Path(name).name} | {values} |")
    own = figures["own output"]
    drafters = [name for name, value in own["T=1"].items() if isinstance(value, dict)]
    for name in drafters:
        values = " | ".join(f"{own[t][name]['alpha']:.3f}" for t in ("T=1", "T=0.6", "T=0"))
        lines.append(f"| own output | {Path(name).name} | {values} |")
    lines += [
        "",
        "| own output, 160 tokens | T = 1 | T = 0.6 | T = 0 | held-out text itself |",
        "|---|---|---|---|---|",
    ]
    for what in ("loop share", "distinct 4-grams"):
        values = " | ".join(f"{own[t][what]:.2f}" for t in ("T=1", "T=0.6", "T=0"))
        lines.append(f"| {what} | {values} | {figures['held-out text itself'][what]:.2f} |")
    for name in drafters:
        for drafted in ("2", "4", "6"):
            values = " | ".join(
                f"{own[t][name]['tokens per step'][drafted]:.2f}" for t in ("T=1", "T=0.6", "T=0")
            )
            lines.append(
                f"| tokens per target call, {Path(name).name}, {drafted} ahead | {values} | |"
            )
    lines += ["", "A text loops if fewer than half of its 4-grams are distinct.", ""]
    return "\n".join(lines)


def samples_section(samples: list[dict[str, Any]]) -> str:
    """Continuations of held-out text, not chosen."""
    lines = ["## Samples", "", "Evenly spread over the held-out modules, not chosen by hand."]
    for sample in samples:
        ending = sample["prompt"][-160:]
        lines += [
            "",
            f"T = {sample['T']:g}, after a prompt that ends in",
            "```",
            ending.strip("\n"),
            "```",
            "the target writes",
            "```",
            sample["text"].strip("\n"),
            "```",
        ]
    return "\n".join(lines) + "\n"


def sizes_section(folder: Path) -> str:
    """Files and their sizes."""
    files = sorted([*folder.rglob("*.safetensors"), *folder.glob("*/tokenizer.json")])
    rows = [f"| {f.relative_to(folder)} | {f.stat().st_size / 1e6:.1f} |" for f in files]
    return "## Files\n\n| file | MB |\n|---|---|\n" + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--evaluation", type=Path, required=True, help="JSON of training.evaluate")
    parser.add_argument("--baseline", type=Path, help="the same figures of an older pair")
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the exports")
    parser.add_argument("--recipe", type=Path, required=True, help="how this run was made")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figures = json.loads(args.evaluation.read_text())
    parts = [
        HEAD,
        "## Recipe\n\n" + args.recipe.read_text().strip() + "\n",
        sizes_section(args.weights),
        figures_section("Figures", figures),
    ]
    if args.baseline:
        older = json.loads(args.baseline.read_text())
        parts.append(figures_section("The same figures for the pair before", older))
    parts += [data_section(read_documents(args.manifest)), samples_section(figures["samples"])]
    args.out.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
