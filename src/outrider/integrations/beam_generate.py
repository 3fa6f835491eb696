"""Beam search behind `model.generate`: a row for each prompt where transformers has one a beam."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
)

from outrider.engine.beam_search import Beams
from outrider.engine.beam_search.search import Hypothesis, search
from outrider.engine.beam_search.step import State
from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError
from outrider.integrations import generate_call
from outrider.integrations.criteria import Criteria
from outrider.integrations.generate_call import CallRows, requested
from outrider.integrations.logits_processor_mapping import ids_of
from outrider.models.config import read
from outrider.stats import Stats

Result: TypeAlias = Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput


class BeamGenerate(NamedTuple):
    """What `generate` prepared for a beam search."""

    processors: Sequence[hf.LogitsProcessor]
    criteria: Sequence[hf.StoppingCriteria]
    config: hf.GenerationConfig
    encoder: bool  #: whether the model has one: it returns another output then


def beams_of(config: hf.GenerationConfig) -> int:
    """How many beams are asked for; 1 is no search."""
    return read(config, "num_beams", int) or 1


def one_row_each(
    input_ids: Tensor, model_kwargs: Mapping[str, object], beams: int
) -> tuple[Tensor, dict[str, Any]]:
    """Prompts and what stands beside them, without the copies that `generate` makes for beams."""
    rows = len(input_ids)

    def once(value: object) -> object:
        if isinstance(value, Tensor) and value.dim() and len(value) == rows:
            return value[::beams]
        if isinstance(value, Mapping):
            return type(value)(**{name: once(part) for name, part in value.items()})
        return value

    return input_ids[::beams], {name: once(value) for name, value in model_kwargs.items()}


def check(config: hf.GenerationConfig, asked: BeamGenerate, streamed: bool, windows: bool) -> None:
    """Refuse what a search here cannot give: ConfigurationError."""
    wrong = None
    words = windows and attends(config)  # of attention, word times alone are made
    if streamed:
        wrong = "a streamer for beams", "leave it out: they are known when their search ends"
    elif config.return_dict_in_generate and (
        config.output_logits or (config.output_attentions and not words)
    ):
        wrong = "output_logits or output_attentions of beams", "leave it out"
    known = (hf.MaxLengthCriteria, hf.EosTokenCriteria)
    others = [type(one).__name__ for one in asked.criteria if not isinstance(one, known)]
    if wrong is None and others:
        wrong = f"stopping criterion {others[0]} of beams", "leave it out, or use num_beams=1"
    if wrong is not None:
        raise ConfigurationError(f"{wrong[0]} is not supported by outrider's generate; {wrong[1]}")


def attends(config: hf.GenerationConfig) -> bool:
    """Whether attention is asked for, from which Whisper's `generate` makes the times of words."""
    return bool(config.output_attentions and read(config, "return_token_timestamps", bool))


def searched(
    engine: Engine,
    rows: CallRows,
    asked: BeamGenerate,
    attention: Callable[[Tensor], generate_call.Attentions],
) -> tuple[Result, Stats]:
    """Sequences [B * num_return_sequences, L], or transformers' output, and the statistics.

    `attention` is that of finished sequences, called if it is asked for.
    """
    config = asked.config
    criteria = Criteria(asked.criteria, config, len(rows.input_ids))
    requests = requested(engine, rows, asked.processors, criteria, bool(config.do_sample))
    beams = Beams(
        beams_of(config),
        float(config.length_penalty),
        config.early_stopping,
        int(config.num_return_sequences or 1),
    )
    told = bool(config.return_dict_in_generate)
    kept = KeptBeams(len(requests)) if told and config.output_scores else None
    found = search(
        engine.target,
        engine.drafter,
        requests,
        beams,
        settle=kept is None,  # a beam that is not scored has no scores to be told
        observe=None if kept is None else kept.observe,
    )
    every = [one for row in found.hypotheses for one in row]
    pad = ids_of(read(config, "_pad_token_tensor", Tensor))
    fill = -1
    if criteria.eos:  # as there: a pad token of id 0 counts as none
        fill = pad[0] if any(pad) else criteria.eos[0]
    longest = max(len(one.token_ids) for one in every)
    made = torch.full((len(every), longest), fill, dtype=torch.int64, device="cpu")
    for line, one in zip(made, every, strict=True):
        line[: len(one.token_ids)] = torch.tensor(one.token_ids, device="cpu")
    ahead = rows.input_ids.repeat_interleave(beams.num_return_sequences, 0)
    sequences = torch.cat([ahead, made.to(ahead.device)], 1)
    stats = Stats(engine_steps=found.counts.calls, seconds=found.seconds)
    stats.steps, stats.new_tokens = found.counts.calls, sum(len(one.token_ids) for one in every)
    if not told:
        return sequences, stats
    indices = beam_indices(found.hypotheses, beams.num_beams).to(sequences.device)
    parts: dict[str, Any] = {"beam_indices": indices}
    if kept is not None:
        sums = [one.score for one in every]
        scores = torch.tensor(sums, dtype=torch.float32, device=sequences.device)
        parts |= {"sequences_scores": scores, "scores": kept.scores()}
    if attends(config):
        weights = attention(sequences).cross_attentions
        rows_BW = len(requests) * beams.num_beams
        parts["cross_attentions"] = spread_attention(weights, indices, rows_BW)
    kind = GenerateBeamEncoderDecoderOutput if asked.encoder else GenerateBeamDecoderOnlyOutput
    return kind(sequences=sequences, **parts), stats


Layers: TypeAlias = tuple[Tensor, ...]


class KeptBeams:
    """Log-probabilities of every step of every prompt's search."""

    def __init__(self, rows: int) -> None:
        self._rows: list[list[Tensor]] = [[] for _ in range(rows)]

    def observe(self, row: int, state: State, logs_WV: Tensor) -> None:
        """A step of a prompt's search is taken."""
        self._rows[row].append(logs_WV)

    def scores(self) -> tuple[Tensor, ...]:
        """Log-probabilities of every step, [B * W, V] each; 0 where a search was over."""
        nothing = torch.zeros_like(self._rows[0][0])
        longest = max(map(len, self._rows))
        every = [row + [nothing] * (longest - len(row)) for row in self._rows]
        return tuple(torch.cat(step) for step in zip(*every, strict=True))


def beam_indices(texts: Sequence[Sequence[Hypothesis]], beams: int) -> Tensor:
    """For each token of each text the row [B * W] of the beam that it went on from, -1 padded."""
    lines = [
        [row * beams + beam for beam in one.beams]
        for row, found in enumerate(texts)
        for one in found
    ]
    longest = max(map(len, lines))
    padded = [line + [-1] * (longest - len(line)) for line in lines]
    return torch.tensor(padded, dtype=torch.int32, device="cpu")


def spread_attention(steps: Sequence[Layers], indices_BL: Tensor, rows: int) -> tuple[Layers, ...]:
    """Attention of texts, [B, ...] at every step, in the rows of the beams that they went on from.

    What beams that came to nothing looked at is not there: 0. Nobody's word times need it, but for
    those of the shorter texts of a batch, which transformers takes from another text's row.
    """

    def placed(layer: Tensor, at_B: Tensor) -> Tensor:
        there = at_B >= 0
        wide = layer.new_zeros(rows, *layer.shape[1:])
        wide[at_B[there].long()] = layer[there]
        return wide

    each = zip(steps, indices_BL.to(steps[0][0].device).unbind(1), strict=True)
    return tuple(tuple(placed(layer, at_B) for layer in layers) for layers, at_B in each)
