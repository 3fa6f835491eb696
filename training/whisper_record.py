"""Speak texts and record what a Whisper makes of them: `python -m training.whisper_record`.

    python -m training.whisper_record --model whisper-base --homeassistant homeassistant-*.whl \\
        --bible sword --wordnet wordnet --out work/whisper/spoken --windows 600

Each window is transcribed three times: greedily without timestamps, greedily with them, and drawn
at temperature 1 (either way). With `--follow` the target is led along the text that was read
instead, without and with timestamps: a tenth of the time. Some transcripts follow on from another,
as in long recordings.
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
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

from training.whisper_attention import NAME
from training.whisper_laws import Followed, Row, Target, record
from training.whisper_speech import RATE, Window, windows
from training.whisper_texts import LANGUAGES, Sources, sentences

SHARD = 8  # windows
PROMPTED = (0.15, 0.15, 0.5)  # how often each of the three follows on from another transcript
LONGEST_PROMPT = 48
LONGEST_JOIN = 0.5  # seconds between sentences that Whisper writes without a gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Whisper's folder")
    Sources.arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--follow", action="store_true", help="the texts, no transcripts")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = WhisperForConditionalGeneration.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation=NAME
    ).eval()
    extract = WhisperFeatureExtractor.from_pretrained(args.model)
    sources = Sources(args.homeassistant, args.bible, args.wordnet)
    texts = {name: sentences(name, sources) for name in LANGUAGES}
    tokenizer = WhisperTokenizer.from_pretrained(args.model)
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
        rows: list[list[Row | Followed]] = []
        for window in spoken:
            if args.follow:
                rows.append(read_out(target, window, tokenizer, texts[window.language], dice))
            else:
                rows.append([*three(target, window.language, args.out, dice)])
        tokens = record(target, features, rows, out)
        print(f"{time.strftime('%H:%M:%S')} {out.name}: {tokens} tokens", flush=True)


def read_out(
    target: Target,
    window: Window,
    tokenizer: WhisperTokenizer,
    texts: list[str],
    dice: random.Random,
) -> list[Row | Followed]:
    """What was read to a window as its transcripts: without timestamps and with them."""
    rows: list[Row | Followed] = []
    for timestamps in (False, True):
        prompt = target.prompt(window.language, timestamps)
        if dice.random() < PROMPTED[0]:
            before = encoded(tokenizer, dice.choice(texts))[-LONGEST_PROMPT:]
            prompt = [target.settings.prev_sot_token_id, *before, *prompt]
        tokens = list(prompt)
        start = 0.0
        for number, said in enumerate(window.said):
            piece = encoded(tokenizer, said.text)
            if timestamps:
                following = window.said[number + 1].start if number + 1 < len(window.said) else 30
                ends = min(said.end, 30.0)
                piece = [target.time(start), *piece, target.time(ends)]
                start = following if following - ends > LONGEST_JOIN else ends
            tokens += piece
        tokens = tokens[: target.model.config.max_target_positions - 1]
        rows.append(Followed([*tokens, target.settings.eos_token_id], len(prompt)))
    return rows


def encoded(tokenizer: WhisperTokenizer, text: str) -> list[int]:
    """A sentence as Whisper writes it: after a space, with a full stop."""
    ended = text if text[-1] in ".!?" else f"{text}."
    return list(tokenizer(f" {ended}", add_special_tokens=False).input_ids)


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
