"""Speak texts and record what a Whisper makes of them: `python -m training.whisper_record`.

    python -m training.whisper_record --model whisper-base --homeassistant homeassistant-*.whl \\
        --bible sword --out work/whisper/spoken --windows 600

Each window is transcribed three times: greedily without timestamps, greedily with them, and drawn
at temperature 1 (either way). Some transcripts follow on from another, as in long recordings.
Needs `apt-get install espeak-ng flite libttspico-utils`. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from training.whisper_laws import Row, Target, record
from training.whisper_speech import RATE, windows
from training.whisper_texts import LANGUAGES, sentences

SHARD = 8  # windows
PROMPTED = (0.15, 0.15, 0.5)  # how often each of the three follows on from another transcript
LONGEST_PROMPT = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Whisper's folder")
    parser.add_argument("--homeassistant", type=Path, required=True, help="the wheel")
    parser.add_argument("--bible", type=Path, required=True, help="unpacked sword-text-web")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = WhisperForConditionalGeneration.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    extract = WhisperFeatureExtractor.from_pretrained(args.model)
    texts = {name: sentences(name, args.homeassistant, args.bible) for name in LANGUAGES}
    for number in range(args.windows // SHARD):
        out = args.out / f"{args.seed:02}-{number:04}.safetensors"
        if out.exists():
            continue
        seed = args.seed * 100_000 + number
        spoken = list(islice(windows(texts, seed), SHARD))
        features = extract(
            [w.samples for w in spoken], sampling_rate=RATE, return_tensors="pt"
        ).input_features
        target, dice = Target(model, seed), random.Random(seed)
        rows = [three(target, window.language, args.out, dice) for window in spoken]
        tokens = record(target, features, rows, out)
        print(f"{time.strftime('%H:%M:%S')} {out.name}: {tokens} tokens", flush=True)


def three(target: Target, language: str, folder: Path, dice: random.Random) -> list[Row]:
    """The transcripts to make of a window."""
    rows = []
    for number, share in enumerate(PROMPTED):
        timestamps = number == 1 or (number == 2 and dice.random() < 0.5)
        prompt = target.prompt(language, timestamps)
        if dice.random() < share:
            prompt = earlier(target, folder, dice) + prompt
        rows.append(Row(prompt, timestamps, temperature=float(number == 2)))
    return rows


def earlier(target: Target, folder: Path, dice: random.Random) -> list[int]:
    """The end of a transcript of a finished shard as what was said before, if there is one."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        return []
    shard = load_file(dice.choice(shards))
    _, first, length, prompt = dice.choice(shard["rows"].tolist())
    said = shard["tokens"][first + prompt : first + length]
    said = said[said < target.settings.eos_token_id][-dice.randint(4, LONGEST_PROMPT) :]
    return [target.settings.prev_sot_token_id, *said.tolist()]


if __name__ == "__main__":
    main()
