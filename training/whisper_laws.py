"""What a Whisper says about windows of speech, recorded once to train drafts from.

Each window is encoded once and transcribed by the target itself, several times. Of every position
the last hidden state is kept (2 bytes x width) and the logarithm of the sum over the logits, so
that any part of the law can be had again.

A shard is a safetensors file:

| name | shape | what |
|---|---|---|
| `states` | [W, S, D] bf16 | the encoder's states of the windows |
| `tokens` | [N] int64 | prompts and transcripts, one after the other |
| `hidden` | [N, D] f16 | the target's states after its last norm, position by position |
| `total` | [N] f32 | log of the sum of exp(logits) over the ids that are not suppressed |
| `rows` | [R, 4] int64 | window, first token, length, length of the prompt |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)


class Row(NamedTuple):
    """One transcript to make: its prompt, and how it is made."""

    prompt: list[int]
    timestamps: bool
    temperature: float


class Followed(NamedTuple):
    """A text to be given, with its end, and how much of it is prompt."""

    tokens: list[int]
    prompt: int


class Transcript(NamedTuple):
    """Prompt and text `[N]`, and per position what the target said there."""

    tokens: Tensor
    hidden: Tensor
    total: Tensor
    prompt: int


@dataclass
class Target:
    """A Whisper with its rules."""

    model: WhisperForConditionalGeneration
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings = self.model.generation_config
        self.head = self.model.get_output_embeddings().weight
        self.generator = torch.Generator().manual_seed(self.seed)
        self.suppressed = torch.tensor(self.settings.suppress_tokens or [], dtype=torch.long)

    def prompt(self, language: str, timestamps: bool) -> list[int]:
        """What a transcript begins with."""
        settings = self.settings
        spoken = [settings.lang_to_id[f"<|{language}|>"], settings.task_to_id["transcribe"]]
        without = [] if timestamps else [settings.no_timestamps_token_id]
        return [settings.decoder_start_token_id, *spoken, *without]

    def time(self, seconds: float) -> int:
        """The timestamp of a moment of a window."""
        return int(self.settings.no_timestamps_token_id) + 1 + round(seconds / 0.02)

    @torch.no_grad()
    def encode(self, features: Tensor) -> Tensor:
        """The encoder's states of log-mel features `[W, mels, frames]`."""
        return self.model.model.encoder(features.to(self.model.dtype)).last_hidden_state

    @torch.no_grad()
    def transcribe(self, states: Tensor, rows: Sequence[Row], most: int) -> list[Transcript]:
        """Transcripts of at most `most` tokens, all rows side by side; `states` is `[R, S, D]`."""
        end = self.settings.eos_token_id
        texts = [list(row.prompt) for row in rows]
        rules = [self._rules(row) for row in rows]
        hidden, totals = [], []
        cache, over = None, [False] * len(rows)
        for place in range(max(len(row.prompt) for row in rows) + most):
            column = torch.tensor([text[place] if place < len(text) else end for text in texts])
            out = self.model.model.decoder(
                input_ids=column[:, None],
                encoder_hidden_states=states,
                past_key_values=cache,
                use_cache=True,
            )
            cache, state = out.past_key_values, out.last_hidden_state[:, 0]
            logits = (state @ self.head.T).float()
            logits[:, self.suppressed] = -torch.inf
            hidden.append(state.half())
            totals.append(logits.logsumexp(-1))
            for r, (row, text) in enumerate(zip(rows, texts, strict=True)):
                over[r] = over[r] or len(text) >= len(row.prompt) + most or text[-1] == end
                if not over[r] and len(text) == place + 1:
                    text.append(self._choose(row, text, logits[r], rules[r]))
            if all(over) or place + 1 >= self.model.config.max_target_positions:
                break
        all_hidden, all_totals = torch.stack(hidden, 1), torch.stack(totals, 1)
        found = []
        for r, (row, text) in enumerate(zip(rows, texts, strict=True)):
            n = min(len(text), all_hidden.shape[1])
            tokens = torch.tensor(text[:n])
            found.append(Transcript(tokens, all_hidden[r, :n], all_totals[r, :n], len(row.prompt)))
        return found

    @torch.no_grad()
    def follow(self, states: Tensor, texts: Sequence[Followed]) -> list[Transcript]:
        """Given texts of a window instead of its own, all in one call; `states` is `[S, D]`."""
        rows = [torch.tensor(text.tokens) for text in texts]
        row_N = torch.cat([torch.full_like(row, r) for r, row in enumerate(rows)])
        at = torch.arange(len(row_N))
        sees_NN = (row_N[:, None] == row_N) & (at[:, None] >= at)
        mask = torch.zeros(sees_NN.shape).masked_fill(~sees_NN, torch.finfo(states.dtype).min)
        hidden = self.model.model.decoder(
            input_ids=torch.cat(rows)[None],
            position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
            attention_mask=mask[None, None].to(states.dtype),
            encoder_hidden_states=states[None],
            use_cache=False,
        ).last_hidden_state[0]
        logits = (hidden @ self.head.T).float()
        logits[:, self.suppressed] = -torch.inf
        sizes = [len(row) for row in rows]
        parts = zip(hidden.half().split(sizes), logits.logsumexp(-1).split(sizes), strict=True)
        return [
            Transcript(row, state, total, text.prompt)
            for row, text, (state, total) in zip(rows, texts, parts, strict=True)
        ]

    def _rules(self, row: Row) -> LogitsProcessorList:
        """transformers' own rules; positions are counted from the end of the prompt."""
        banned = self.settings.begin_suppress_tokens
        rules = LogitsProcessorList()
        if banned:
            rules.append(SuppressTokensAtBeginLogitsProcessor(banned, len(row.prompt)))
        if row.timestamps:
            rules.append(WhisperTimeStampLogitsProcessor(self.settings, len(row.prompt)))
        return rules

    def _choose(
        self, row: Row, text: list[int], logits_V: Tensor, rules: LogitsProcessorList
    ) -> int:
        scores = rules(torch.tensor([text]), logits_V[None].clone())[0]
        if not row.timestamps:
            scores[self.settings.no_timestamps_token_id + 1 :] = -torch.inf
        if row.temperature == 0:
            return int(scores.argmax())
        law = (scores / row.temperature).softmax(-1)
        return int(torch.multinomial(law, 1, generator=self.generator))


def record(
    target: Target,
    features: Tensor,
    rows: Sequence[Sequence[Row | Followed]],
    out: Path,
    most: int = 200,
) -> int:
    """Transcripts of windows of features `[W, mels, frames]`, each by its rows, into a shard.

    Rows of a window are made side by side with those of the others, or followed. Returns the
    number of tokens in the shard.
    """
    states = target.encode(features)
    found: list[Transcript] = []
    owners: list[int] = []  # the windows of those found
    made: list[Row] = []
    theirs: list[int] = []
    for window, mine in enumerate(rows):
        if given := [row for row in mine if isinstance(row, Followed)]:
            found += target.follow(states[window], given)
            owners += [window] * len(given)
        for row in mine:
            if isinstance(row, Row):
                made.append(row)
                theirs.append(window)
    if made:
        found += target.transcribe(states[theirs], made, most)
        owners += theirs
    lengths = torch.tensor([len(transcript.tokens) for transcript in found])
    prompts = torch.tensor([transcript.prompt for transcript in found])
    first = lengths.cumsum(0) - lengths
    shard = {
        "states": states.bfloat16(),
        "tokens": torch.cat([transcript.tokens for transcript in found]),
        "hidden": torch.cat([transcript.hidden for transcript in found]),
        "total": torch.cat([transcript.total for transcript in found]),
        "rows": torch.stack([torch.tensor(owners), first, lengths, prompts], 1),
    }
    partial = out.with_suffix(".partial")
    save_file({name: part.contiguous() for name, part in shard.items()}, partial)
    partial.replace(out)
    return int(lengths.sum())


class Spoken(NamedTuple):
    """A window with its transcripts, packed one after the other."""

    states_SD: Tensor
    tokens_N: Tensor
    hidden_ND: Tensor
    total_N: Tensor
    row_N: Tensor
    position_N: Tensor
    counted_N: Tensor  # positions whose next token is the transcript's, not the prompt's


def windows(shard: Path) -> Iterator[Spoken]:
    """The windows of a shard."""
    parts = load_file(shard)
    for window in range(len(parts["states"])):
        mine = parts["rows"][parts["rows"][:, 0] == window].tolist()
        at, row, position, counted = [], [], [], []
        for number, (_, first, length, prompt) in enumerate(mine):
            at.append(torch.arange(first, first + length))
            row.append(torch.full((length,), number))
            position.append(torch.arange(length))
            counted.append(position[-1] >= prompt - 1)
        places = torch.cat(at)
        counted_N = torch.cat(counted)
        last = places.new_tensor([first + length - 1 for _, first, length, _ in mine])
        counted_N &= ~torch.isin(places, last)  # the end of a text: nothing follows
        yield Spoken(
            parts["states"][window],
            parts["tokens"][places],
            parts["hidden"][places],
            parts["total"][places],
            torch.cat(row),
            torch.cat(position),
            counted_N,
        )
