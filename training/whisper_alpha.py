"""How well a draft for Whisper agrees with it: `python -m training.whisper_alpha`.

    python -m training.whisper_alpha --model whisper-base --draft work/whisper/draft \\
        --data work/whisper/real

Along the target's own greedy transcripts of `training.whisper_recordings`, by the laws that decode
(suppressed ids, timestamp rules): alpha at temperature 0 is how often both choose the same token,
at 1 the mean of sum min(target, draft). Tokens a step of a chain of 3 are those at temperature 0.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from training.overlap import overlap
from training.whisper_laws import Spoken, windows
from training.whisper_model import Draft, load

CHAIN = 3
LOW = -1e9  # minus infinity that softmax and comparisons can bear


class Figures(NamedTuple):
    """Sums over the positions of a set."""

    agrees: list[list[bool]]
    alpha_1: list[float]


def ruled(logits_CV: Tensor, text: Tensor, prompt: int, settings: GenerationConfig) -> Tensor:
    """Logits of the positions after `prompt` tokens of `text`, as they are decoded from."""
    logits_CV = logits_CV.clone()
    logits_CV[:, settings.suppress_tokens] = LOW
    logits_CV[0, settings.begin_suppress_tokens] = LOW
    if text[prompt - 1] == settings.no_timestamps_token_id:
        logits_CV[:, settings.no_timestamps_token_id + 1 :] = LOW
        return logits_CV
    rule = WhisperTimeStampLogitsProcessor(settings, prompt)
    lines = [
        rule(text[None, : prompt + place], line[None])[0] for place, line in enumerate(logits_CV)
    ]
    return torch.stack(lines).clamp_min(LOW)


@torch.no_grad()
def measure(
    draft: Draft, head_VD: Tensor, settings: GenerationConfig, window: Spoken, figures: Figures
) -> None:
    """Add a window's transcripts to the sums."""
    states = draft(window.tokens_N, window.position_N, window.row_N, window.states_SD)
    for row in window.row_N.unique().tolist():
        mine = window.row_N == row
        counted = window.counted_N[mine]
        text = window.tokens_N[mine]
        prompt = int(counted.nonzero()[0]) + 1
        target = window.hidden_ND[mine][counted].float() @ head_VD.T
        own = torch.full_like(target, LOW)
        own[:, draft.ids_K] = draft.logits(states[mine][counted])
        target, own = (ruled(logits, text, prompt, settings) for logits in (target, own))
        figures.agrees.append((target.argmax(-1) == own.argmax(-1)).tolist())
        figures.alpha_1.extend(overlap(target, own, 1.0).tolist())


def steps(agrees: list[bool], length: int) -> int:
    """Target calls that a chain of `length` needs for a text.

    >>> steps([True, True, False, True], 2)
    2
    """
    place = count = 0
    while place < len(agrees):
        kept = 0
        while kept < length and place + kept < len(agrees) and agrees[place + kept]:
            kept += 1
        place += kept + 1
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--draft", type=Path, required=True, help="the draft's folder")
    parser.add_argument("--data", type=Path, required=True, help="shards with greedy transcripts")
    args = parser.parse_args()
    target = WhisperForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32)
    draft = load(target, args.draft).eval()
    settings = target.generation_config
    head = target.get_output_embeddings().weight.detach()
    sets: dict[str, list[Path]] = defaultdict(list)
    for shard in sorted(args.data.glob("*.safetensors")):
        sets[shard.stem.rpartition("-")[0]].append(shard)
    for name, shards in sets.items():
        for row, mode in enumerate(("plain", "timestamps")):
            figures = Figures([], [])
            for shard in shards:
                for window in windows(shard):
                    measure(draft, head, settings, only(window, row), figures)
            positions = sum(map(len, figures.agrees))
            agreed = sum(map(sum, figures.agrees))
            calls = sum(steps(text, CHAIN) for text in figures.agrees)
            print(
                f"{name:12} {mode:10} {positions:5} tokens: "
                f"alpha {agreed / positions:.3f} at T = 0, "
                f"{sum(figures.alpha_1) / positions:.3f} at T = 1; "
                f"chain of {CHAIN}: {positions / calls:.2f} tokens a step",
                flush=True,
            )


def only(window: Spoken, row: int) -> Spoken:
    """One of a window's transcripts."""
    mine = window.row_N == row
    return Spoken(window.states_SD, *(part[mine] for part in window[1:]))


if __name__ == "__main__":
    main()
