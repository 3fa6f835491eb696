"""Train the tokenizer: byte-level BPE that cuts Python where Python is cut.

    python -m training.tokenizer --corpus corpus --out tokenizer.json

A newline is a token of its own and so is the indentation after it. Were they one, a prompt that
ends in a newline would end in a token the model has never seen in that place, and the model
would stop or lose its indentation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.tokens import read_documents

SPECIAL = ["<|endoftext|>", "<|pad|>"]
# Newline; indentation; word; underscores; one digit; other signs; what blanks are left.
PIECES = r"\n|(?<=\n) +| ?\p{L}+|_+\p{L}*| ?\d| ?[^\s\p{L}\d_]+| +(?!\S)|\s"


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Learn merges inside the pieces; `SPECIAL` get the first numbers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="tokenizer.json to write")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=3000, help="learn from the first so many")
    args = parser.parse_args()
    texts = [row["text"] for row in read_documents(args.corpus / "train.jsonl")]
    tokenizer = train_tokenizer(texts[: args.documents], args.vocabulary)
    tokenizer.save(str(args.out))
    read = min(len(texts), args.documents)
    print(f"{args.out}: {tokenizer.get_vocab_size()} tokens from {read} documents")


if __name__ == "__main__":
    main()
