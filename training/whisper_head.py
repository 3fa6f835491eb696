"""The ids that a draft for Whisper can propose: `python -m training.whisper_head`.

    python -m training.whisper_head --model whisper-base --homeassistant homeassistant-*.whl \\
        --bible sword --spoken work/whisper/spoken --out work/whisper/ids.safetensors

The head of Whisper base is a third of its decoder's cost, so a draft's is restricted to `--size`
ids: the end and all timestamps, what the target wrote on the training data and what is in the
texts, the commonest first, then the lowest ids, which are the commonest of what Whisper's own
tokenizer was made from. All in Latin letters; what is suppressed is left out.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, WhisperConfig, WhisperTokenizer

from training.whisper_texts import LANGUAGES, Sources, sentences

_LATIN = re.compile("[ -~\u00c0-\u017f\u2010-\u2026]*")  # with quotes and dashes


def choose(
    ids_by_worth: list[int], settings: GenerationConfig, vocabulary: int, size: int
) -> Tensor:
    """At most `size` ids, sorted: the end, the timestamps, then text in the order given."""
    times = range(settings.no_timestamps_token_id + 1, vocabulary)  # the last ids of a Whisper
    banned = set(settings.suppress_tokens or [])
    ids = dict.fromkeys([settings.eos_token_id, *times])
    for token in ids_by_worth:
        if len(ids) >= size:
            break
        if token < settings.eos_token_id and token not in banned:
            ids[token] = None
    return torch.tensor(sorted(ids))


def latin(tokenizer: WhisperTokenizer, token: int) -> bool:
    """Whether an id stands for text in Latin letters, or for a single byte of any text."""
    piece = tokenizer.convert_ids_to_tokens(token)
    return len(piece) == 1 or _LATIN.fullmatch(tokenizer.decode([token])) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Whisper's folder")
    Sources.arguments(parser)
    parser.add_argument("--spoken", type=Path, required=True, help="shards of whisper_record")
    parser.add_argument("--size", type=int, default=16_384)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = WhisperTokenizer.from_pretrained(args.model)
    sources = Sources(args.homeassistant, args.bible, args.wordnet)
    lines = [" " + line for name in LANGUAGES for line in sentences(name, sources)]
    counts = Counter(chain.from_iterable(tokenizer(lines, add_special_tokens=False).input_ids))
    for shard in sorted(args.spoken.glob("*.safetensors")):
        counts.update(load_file(shard)["tokens"].tolist())
    seen = [token for token, _ in counts.most_common()]
    settings = GenerationConfig.from_pretrained(args.model)
    vocabulary = WhisperConfig.from_pretrained(args.model).vocab_size
    pieces = [token for token in [*seen, *range(settings.eos_token_id)] if latin(tokenizer, token)]
    ids = choose(pieces, settings, vocabulary, args.size)
    save_file({"ids": ids}, args.out)
    print(f"{len(ids)} ids; {len(seen)} were seen")


if __name__ == "__main__":
    main()
