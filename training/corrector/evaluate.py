"""How well a corrector corrects: greedy texts of held-out pairs against what was meant.

    python -m training.corrector.evaluate --model work/export/corrector \\
        --pairs work/heldout_pairs.jsonl

Prints JSON: for all pairs, and for those of one damage of each kind, the share of texts that are
exactly right, and the character error rate (edits per character meant) before and after.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import T5ForConditionalGeneration

from training.corrector.__main__ import TOKENIZER
from training.corrector.damage import KINDS
from training.corrector.pairs import MOST_TOKENS, Pair
from training.tokens import read_documents


def edits(one: str, other: str) -> int:
    """The Levenshtein distance: characters to insert, delete or replace.

    >>> edits("kitten", "sitting"), edits("", "abc"), edits("same", "same")
    (3, 3, 0)
    """
    letters = np.array([ord(letter) for letter in other], dtype=np.int64)
    steps = np.arange(len(letters) + 1)
    row = steps
    for number, letter in enumerate(one):
        after = np.empty_like(row)
        after[0] = number + 1
        after[1:] = np.minimum(row[:-1] + (letters != ord(letter)), row[1:] + 1)
        # An insertion adds one for each place it goes right.
        row = np.minimum.accumulate(after - steps) + steps
    return int(row[-1])


@torch.inference_mode()
def corrected(
    model: T5ForConditionalGeneration, tokenizer: Tokenizer, sources: list[str], rows: int = 32
) -> list[str]:
    """The model's greedy texts, in the order of the sources."""
    pad = model.config.pad_token_id
    ids = [encoding.ids for encoding in tokenizer.encode_batch(sources)]
    order = sorted(range(len(ids)), key=lambda n: len(ids[n]))
    texts = [""] * len(ids)
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        width = max(len(ids[n]) for n in numbers)
        padded = torch.tensor([ids[n] + [pad] * (width - len(ids[n])) for n in numbers])
        written = model.generate(
            input_ids=padded,
            attention_mask=(padded != pad).long(),
            do_sample=False,
            max_new_tokens=width + 32,
        )
        for n, row in zip(numbers, written.tolist(), strict=True):
            texts[n] = tokenizer.decode(row, skip_special_tokens=True)
    return texts


def figures(pairs: list[Pair], texts: list[str]) -> dict[str, float]:
    """What the module says; `harmed` is the share of undamaged texts that were changed."""
    characters = sum(len(pair.whole) for pair in pairs)
    both = list(zip(pairs, texts, strict=True))
    clean = [text != pair.whole for pair, text in both if pair.damaged == pair.whole]
    before = sum(edits(pair.damaged, pair.whole) for pair in pairs)
    after = sum(edits(text, pair.whole) for pair, text in both)
    right = sum(text == pair.whole for pair, text in both)
    found = {
        "texts": len(pairs),
        "exact": right / len(pairs),
        "error rate before": before / characters,
        "error rate after": after / characters,
    }
    return found | ({"harmed": sum(clean) / len(clean)} if clean else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of training.corrector.export"
    )
    parser.add_argument("--pairs", type=Path, required=True, help="of training.corrector.held_out")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--most", type=int, help="use only the first so many pairs")
    parser.add_argument("--each", type=int, default=32, help="pairs of each kind of damage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = T5ForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    rows = read_documents(args.pairs)[: args.most]
    sets = {"all": [Pair(row["source"], row["reference"]) for row in rows]}
    for kind in KINDS:
        tries = (
            Pair(kind(row["reference"], random.Random(row["id"])) or "", row["reference"])
            for row in rows[: args.each]
        )
        sets[kind.__name__] = [pair for pair in tries if pair.damaged not in ("", pair.whole)]
    found = {}
    for name, pairs in sets.items():
        pairs = [p for p in pairs if len(tokenizer.encode(p.damaged).ids) <= MOST_TOKENS]
        found[name] = figures(pairs, corrected(model, tokenizer, [p.damaged for p in pairs]))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
