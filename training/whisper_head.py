"""The ids that a draft for Whisper can propose: `python -m training.whisper_head`.

    python -m training.whisper_head --model whisper-base --homeassistant homeassistant-*.whl \\
        --bible sword --spoken work/whisper/spoken --out work/whisper/ids.safetensors

The head of Whisper base is a third of its decoder's cost; a draft's is restricted to the ids that
the target wrote on the training data, then the commonest of the texts up to `--size`, and all
timestamps and the end. What the target never writes (its suppressed ids) is left out.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, WhisperTokenizer

from training.whisper_texts import LANGUAGES, sentences


def choose(written: Tensor, common: list[int], settings: GenerationConfig, size: int) -> Tensor:
    """Sorted ids `[size]` at most: the timestamps and the end, `written`, then of `common`."""
    first_time = settings.no_timestamps_token_id + 1
    times = 1501  # 0.00 to 30.00 s in steps of 0.02 s
    banned = set(settings.suppress_tokens or [])
    ids = dict.fromkeys([settings.eos_token_id, *range(first_time, first_time + times)])
    for token in [*written.tolist(), *common]:
        if len(ids) >= size:
            break
        if token < settings.eos_token_id and token not in banned:
            ids[token] = None
    return torch.tensor(sorted(ids))


def by_count(ids: list[int]) -> list[int]:
    """Each id once, the commonest first."""
    return [token for token, _ in Counter(ids).most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Whisper's folder")
    parser.add_argument("--homeassistant", type=Path, required=True, help="the wheel")
    parser.add_argument("--bible", type=Path, required=True, help="unpacked sword-text-web")
    parser.add_argument("--spoken", type=Path, required=True, help="shards of whisper_record")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = WhisperTokenizer.from_pretrained(args.model)
    lines = [
        " " + line for name in LANGUAGES for line in sentences(name, args.homeassistant, args.bible)
    ]
    common = by_count([t for ids in tokenizer(lines, add_special_tokens=False).input_ids for t in ids])
    shards = sorted(args.spoken.glob("*.safetensors"))
    written = by_count([t for shard in shards for t in load_file(shard)["tokens"].tolist()])
    settings = GenerationConfig.from_pretrained(args.model)
    ids = choose(torch.tensor(written), common, settings, args.size)
    save_file({"ids": ids}, args.out)
    print(f"{len(ids)} ids; {len(written)} written on {len(shards)} shards, {len(common)} in the texts")


if __name__ == "__main__":
    main()
