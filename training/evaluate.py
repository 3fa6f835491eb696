"""Measure a pair: loss, agreement on held-out text and on own output, loops, samples.

    python -m training.evaluate --data corpus --target export/target --draft export/draft

Prints a JSON document. Agreement on own output is measured at the temperature the text was
written at, because that is what decoding meets.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training import parallel
from training.heldout_loss import mean_loss, windows
from training.model import Llama, load
from training.ngram import NgramTable
from training.overlap import overlap
from training.rollout import continue_text
from training.tokens import read_documents, read_tokens
from training.unloop import distinct_share, loops

TEMPERATURES = (1.0, 0.6, 0.0)
PROMPT, CONTINUATION = 128, 160
Drafter = Callable[[Tensor], Tensor]  # tokens to logits, as a model


def tokens_per_step(alphas: Tensor, drafted: int) -> float:
    """Expected tokens a target call yields with `drafted` tokens ahead.

    `alphas` is `[rows, positions]` in the order of the text. Neighbours agree or disagree
    together, so this is not the formula for independent positions.
    """
    places = alphas.shape[1] - drafted + 1
    alive, total = torch.ones(alphas.shape[0], places), torch.ones(alphas.shape[0], places)
    for ahead in range(drafted):
        alive = alive * alphas[:, ahead : ahead + places]
        total = total + alive
    return total.mean().item()


def agreement(
    target: Llama, draft: Drafter, texts: Tensor, start: int, temperature: float
) -> Tensor:
    """Alpha for every token from `start` on, `[rows, length - start]`."""
    parts = [
        overlap(target(x)[:, start - 1 : -1], draft(x)[:, start - 1 : -1], temperature)
        for x in texts.split(8)
    ]
    return torch.cat(parts)


def on_heldout_text(
    target: Llama, draft: Drafter, tokens: np.ndarray, every: int
) -> dict[str, float]:
    """Mean alpha over windows of held-out text at the three temperatures."""
    found: dict[float, list[float]] = {t: [] for t in TEMPERATURES}
    for inputs, _ in windows(tokens, target.shape.context, 8, every):
        inputs = inputs.to(target.cos.device)
        target_logits, draft_logits = target(inputs), draft(inputs)
        for t in TEMPERATURES:
            found[t].append(overlap(target_logits, draft_logits, t).mean().item())
    return {f"T={t:g}": float(np.mean(values)) for t, values in found.items()}


def spread_prompts(tokens: np.ndarray, count: int) -> Tensor:
    """`[count, PROMPT]` pieces evenly spread over the held-out modules."""
    starts = np.linspace(0, len(tokens) - PROMPT - CONTINUATION - 1, count).astype(int)
    return torch.from_numpy(np.stack([tokens[s : s + PROMPT] for s in starts]).astype(np.int64))


def loop_figures(texts: Tensor) -> dict[str, float]:
    """Share of continuations that loop, and how much of them is new on average."""
    rows = [row[PROMPT:].tolist() for row in texts]
    return {
        "loop share": float(np.mean([loops(row) for row in rows])),
        "distinct 4-grams": float(np.mean([distinct_share(row) for row in rows])),
    }


def ngram_drafter(table: NgramTable) -> Drafter:
    """The table as a function from tokens to log-probabilities."""

    def logits(tokens: Tensor) -> Tensor:
        rows = [
            [table.law(row[max(0, i + 2 - table.order) : i + 1]) for i in range(len(row))]
            for row in tokens.tolist()
        ]
        return torch.from_numpy(np.array(rows)).float().clamp(min=1e-30).log().to(tokens.device)

    return logits


def text_figures(target: Llama, data: Path, tokens: np.ndarray, every: int) -> dict[str, float]:
    """Loss per token, and per byte so that tokenizers can be compared."""
    size = sum(len(row["text"].encode()) for row in read_documents(data / "heldout.jsonl"))
    loss = mean_loss(target, tokens, target.shape.context, 8, every, target.cos.device)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits per byte": loss / math.log(2) * len(tokens) / size,
    }


def own_output(
    target: Llama, drafters: dict[str, Drafter], tokens: np.ndarray, count: int
) -> tuple[dict[str, object], dict[float, Tensor]]:
    """Agreement on text the target writes at each temperature, and that text."""
    figures: dict[str, object] = {}
    texts = {}
    for t in TEMPERATURES:
        texts[t] = continue_text(target, spread_prompts(tokens, count), CONTINUATION, t)
        here: dict[str, object] = {**loop_figures(texts[t])}
        for name, draft in drafters.items():
            alphas = agreement(target, draft, texts[t], PROMPT, t)
            here[name] = {
                "alpha": alphas.mean().item(),
                "tokens per step": {g: tokens_per_step(alphas, g) for g in (2, 4, 6)},
            }
        figures[f"T={t:g}"] = here
    return figures, texts


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with heldout.*")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, nargs="*", default=[])
    parser.add_argument("--ngram", type=Path, help="table written by training.ngram")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for samples as text")
    parser.add_argument("--prompts", type=int, default=48, help="texts written per temperature")
    parser.add_argument("--every", type=int, default=2, help="use each n-th held-out window")
    parser.add_argument("--samples", type=int, default=3, help="texts printed per temperature")
    args = parser.parse_args()
    device = parallel.start()
    tokens = read_tokens(args.data / "heldout.bin")
    target = load(args.target).to(device).eval()
    if target.shape.context < PROMPT + CONTINUATION:
        raise SystemExit(
            f"{args.target} has a context of {target.shape.context}; the texts measured have "
            f"{PROMPT + CONTINUATION} tokens; train with a longer --context"
        )
    drafters: dict[str, Drafter] = {str(path): load(path).to(device).eval() for path in args.draft}
    result: dict[str, object] = {
        "held-out text": text_figures(target, args.data, tokens, args.every)
    }
    result["agreement on held-out text"] = {
        name: on_heldout_text(target, draft, tokens, 4 * args.every)
        for name, draft in drafters.items()
    }
    if args.ngram:
        # A look-up in Python for every position: own output only, which is little text.
        drafters["ngram"] = ngram_drafter(NgramTable.load(args.ngram, target.shape.vocabulary))
    result["own output"], texts = own_output(target, drafters, tokens, args.prompts)
    real = np.stack(
        [tokens[i : i + PROMPT + CONTINUATION] for i in range(0, len(tokens) - 288, 288)]
    )
    result["held-out text itself"] = loop_figures(torch.from_numpy(real.astype(np.int64)))
    if args.tokenizer:
        result["samples"] = samples(texts, args.tokenizer, args.samples)
    print(json.dumps(result, indent=2, ensure_ascii=False))


def samples(
    texts: dict[float, Tensor], tokenizer_file: Path, count: int
) -> list[dict[str, object]]:
    """A few of the texts, spread over the held-out modules."""
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    return [
        {"T": t, "prompt": decode(row[:PROMPT].tolist()), "text": decode(row[PROMPT:].tolist())}
        for t, rows in texts.items()
        for row in rows[:: max(1, len(rows) // max(1, count))][:count]
    ]


if __name__ == "__main__":
    main()
