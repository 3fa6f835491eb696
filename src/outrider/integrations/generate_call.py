"""One call of `generate`: prompts in, sequences out, criteria judged token by token."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, generation as hf

from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request, StopConditions, source_ids
from outrider.errors import ConfigurationError
from outrider.integrations.criteria import Criteria, CriteriaTracker
from outrider.integrations.logits_processor_mapping import Prompts, ids_of, of_row, settings
from outrider.models.config import read
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Draft, Inputs, Scores, StepTensors, Verdict

# Attention weights of a finished text, from one pass over all of it.
#
# Speculation reads several tokens in a call, and some for nothing: what `generate` gives with
# `output_attentions` is computed afterwards, once, and cut as if the tokens had come one by one.
# Whisper's word timestamps are made of them.

Layers: TypeAlias = tuple[Tensor, ...]


class Attentions(NamedTuple):
    """Weights of every layer, one entry for each call that plain decoding makes."""

    decoder_attentions: tuple[Layers, ...]  #: [B, H, Q, keys so far]
    cross_attentions: tuple[Layers, ...]  #: [B, H, Q, T]


def of_text(
    model: PreTrainedModel, sequences: Tensor, width: int, model_kwargs: Mapping[str, object]
) -> Attentions:
    """Weights of sequences [B, L] whose first `width` tokens are the prompt.

    Raises ConfigurationError for a model whose attention gives none.
    """
    text = sequences[:, :-1]  # nothing was read behind the last token
    mask = model_kwargs.get("decoder_attention_mask")
    if isinstance(mask, Tensor):
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    inputs = model.prepare_inputs_for_generation(
        text,
        attention_mask=model_kwargs.get("attention_mask"),
        decoder_attention_mask=mask,
        encoder_outputs=model_kwargs["encoder_outputs"],
        use_cache=False,
    )
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, return_dict=True)
    if not output.cross_attentions or any(one is None for one in output.cross_attentions):
        raise ConfigurationError(
            f"output_attentions needs attention that keeps its weights; got {type(model).__name__} "
            f"with attn_implementation={model.config._attn_implementation!r}; load it with 'eager'"
        )
    starts = [0, *range(width, text.shape[1])]
    ends = [*starts[1:], text.shape[1]]
    spans = list(zip(starts, ends, strict=True))
    return Attentions(
        tuple(
            tuple(layer[:, :, first:last, :last] for layer in output.decoder_attentions)
            for first, last in spans
        ),
        tuple(
            tuple(layer[:, :, first:last] for layer in output.cross_attentions)
            for first, last in spans
        ),
    )


class OutputScores:
    """One pair for every token of every row: what it was drawn from, and the model's own logits."""

    def __init__(self, rows: int, scores: bool, logits: bool) -> None:
        self.scores, self.logits = scores, logits
        self._rows: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in range(rows)]

    @property
    def wanted(self) -> bool:
        """Whether anything is gathered."""
        return self.scores or self.logits

    def observe(
        self, draft: Draft, scores: Scores, verdict: Verdict, block: StepTensors, rows: list[int]
    ) -> None:
        """What a step emitted, in the way of the engine's observers."""
        laws = scores.laws
        raw = scores.raw_BNV if scores.raw_BNV is not None else laws.logits_BRV
        emitted = block.emitted_B.tolist()
        path = verdict.path_BD.tolist()
        for at, request in enumerate(rows):
            for node in [0, *path[at]][: emitted[at]]:
                processed = None
                if self.scores:
                    processed = laws.logits_BRV[at, node].float().clone()
                    if laws.floor_BR is not None:
                        processed[processed < laws.floor_BR[at, node]] = -torch.inf
                    if laws.greedy == "none":
                        processed *= laws.inverse_temperature_B[at]
                kept = raw[at, node].float().clone() if self.logits else None
                self._rows[request].append((processed, kept))

    def scored(self, row: int, at: int) -> Tensor:
        """The scores [V] of a row's token."""
        scores = self._rows[row][at][0]
        assert scores is not None
        return scores

    def stacked(
        self, which: int, longest: int, over: Callable[[int, int], bool]
    ) -> tuple[Tensor, ...]:
        """Scores (0) or logits (1) of every column, [B, V] each; 0 in rows that were over."""
        steps = []
        for at in range(longest):
            lines = [
                None if at >= len(row) or over(number, at) else row[at][which]
                for number, row in enumerate(self._rows)
            ]
            some = next(line for line in lines if line is not None)
            ended = torch.zeros_like(some)
            steps.append(torch.stack([ended if line is None else line for line in lines]))
        return tuple(steps)


class CallRows(NamedTuple):
    """What is decoded: prompts [B, L] and what stands ahead of and beside them."""

    input_ids: Tensor
    pads: list[int]  #: pad tokens ahead of each prompt
    inputs: Sequence[Inputs] | None = None  #: what each row reads besides its text
    references: Sequence[Sequence[int]] | None = None  #: tokens that each may copy from


def requested(
    engine: Engine,
    rows: CallRows,
    processors: Sequence[hf.LogitsProcessor],
    criteria: Criteria,
    do_sample: bool,
) -> list[Request]:
    """A request for each row: its prompt without padding, its processors as settings, its end."""
    count, width = rows.input_ids.shape
    about = Prompts(
        width,
        any(rows.pads),
        criteria.eos,
        engine.target.vocab_size,
        min(criteria.longest, engine.target.context),
        [source_ids(inputs) for inputs in rows.inputs or ()],
    )
    how = settings(list(processors), do_sample, about)
    limits = StopConditions(max(criteria.longest - width, 1), tuple(criteria.eos))
    return [
        Request(
            rows.input_ids[row, pad:].tolist(),
            SamplingParams(
                **of_row(how, row, count), padding=tuple(rows.input_ids[row, :pad].tolist())
            ),
            limits,
            None if rows.inputs is None else rows.inputs[row],
            () if rows.references is None else rows.references[row],
        )
        for row, pad in enumerate(rows.pads)
    ]


class GenerateResult(NamedTuple):
    """What one call has made, as `generate` gives it."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None


class GenerateCall:
    """Rows decoded under the processors, criteria and configuration that `generate` prepared."""

    def __init__(
        self,
        engine: Engine,
        rows: CallRows,
        processors: Sequence[hf.LogitsProcessor],
        criteria: Sequence[hf.StoppingCriteria],
        config: hf.GenerationConfig,
        streamer: hf.BaseStreamer | None,
    ) -> None:
        self.config, self.streamer = config, streamer
        self.input_ids, self.context = rows.input_ids, engine.target.context
        self.count, self.width = rows.input_ids.shape
        if streamer is not None and self.count > 1:
            raise ConfigurationError(
                f"a streamer takes one sequence; got a batch of {self.count}; stream one at a time"
            )
        self.criteria = Criteria(criteria, config, self.count)
        requests = requested(engine, rows, processors, self.criteria, bool(config.do_sample))
        wanted = bool(config.return_dict_in_generate)
        self.kept = OutputScores(
            self.count, wanted and bool(config.output_scores), wanted and bool(config.output_logits)
        )
        self._ended: set[int] = set()
        pad = ids_of(read(config, "_pad_token_tensor", Tensor))
        scored = self.kept.scored if self.kept.scores else None
        self.tracker = CriteriaTracker(self.criteria, rows.input_ids, pad[0] if pad else 0, scored)
        self.run: EngineRun = engine.run(
            [request.prompt for request in requests],
            [request.sampling for request in requests],
            [request.limits for request in requests],
            inputs=rows.inputs,
            references=rows.references,
            observe=self.kept.observe if self.kept.wanted else None,
        )

    def result(self) -> GenerateResult:
        """Decode to the end: sequences [B, L] with their prompts, padded as plain `generate`'s."""
        tracker = self.tracker
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())
        for block in self.run:
            self._take(block)
            if tracker.complete:
                break
        self._warn()
        longest = tracker.longest
        made = torch.full((self.count, longest), tracker.pad, dtype=torch.int64, device="cpu")
        for row, tokens in enumerate(tracker.tokens):
            kept = tokens[: tracker.ends[row] if self.criteria.padded else longest]
            made[row, : len(kept)] = torch.tensor(kept, dtype=torch.int64, device="cpu")
        return GenerateResult(
            torch.cat([self.input_ids, made.to(self.input_ids.device)], 1),
            self.kept.stacked(0, longest, tracker.over) if self.kept.scores else None,
            self.kept.stacked(1, longest, tracker.over) if self.kept.logits else None,
        )

    def _take(self, block: StepOutput) -> None:
        row, tracker = block.request_id, self.tracker
        for token in block.token_ids:
            ended = tracker.add(row, token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token], device="cpu"))
            if ended and (self.criteria.padded or self.count == 1):
                for one in ended:
                    self._end(one)
                if row in ended:
                    return
        if block.finish_reason is not None and tracker.close(row) and self.criteria.padded:
            for one, end in enumerate(tracker.ends):
                if end is not None:
                    self._end(one)

    def _end(self, row: int) -> None:
        """Nothing more of this row is wanted; why it ended by itself, if it did, stays."""
        if row not in self._ended:
            self._ended.add(row)
            self.run.end(row, self.run.reasons[row] or "stop")

    def _warn(self) -> None:
        """Say it if the model's context ended a row, where plain generate would go on."""
        short = [
            row
            for row, reason in enumerate(self.run.reasons)
            if reason == "context" and self.tracker.ends[row] == len(self.tracker.tokens[row])
        ]
        if short:
            warnings.warn(
                f"row {', '.join(map(str, short))} ended at the model's context of {self.context} "
                f"tokens, before max_length={self.criteria.longest}; outrider stops there, plain "
                "generate goes on to positions that the model was not made for; lower "
                "max_new_tokens or shorten the prompt",
                stacklevel=2,
            )
