"""What encoder-decoders read, from what `generate` hands to a custom function.

By then the encoder has run: its states go to the engine as they are. Source ids come along for
drafters that copy from them, and inputs for draft models with an encoder of their own.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.integrations.references import GenerateWindows, Ids, lists
from outrider.models.config import read
from outrider.models.seq2seq.input_modality import WindowInput, modality_of
from outrider.types import Encoded, Inputs

#: A tensor, or what a processor or tokenizer of transformers returns.
EncoderInputs: TypeAlias = Tensor | Mapping[str, Tensor]


class EncoderSources(NamedTuple):
    """What is known of the sources besides the encoder's states."""

    inputs_tensor: Tensor | None = None  #: what `generate` gave the encoder
    source_ids: Ids | None = None  #: the caller's word on the rest
    draft_inputs: EncoderInputs | None = None
    windows: GenerateWindows | None = None  #: what the rows are, if Whisper's `generate` calls


def refuse(model: PreTrainedModel, given: EncoderSources) -> None:
    """Refuse sources for a model of text alone."""
    for name in ("source_ids", "draft_inputs"):
        if getattr(given, name) is not None:
            raise ConfigurationError(
                f"{name}= are for encoder-decoders; got {type(model).__name__}, which reads its "
                "prompt alone; leave them out"
            )


def read_sources(
    model: PreTrainedModel,
    encoder: PreTrainedModel | None,
    model_kwargs: Mapping[str, object],
    given: EncoderSources,
    rows: int,
) -> list[Inputs]:
    """What each row of an encoder-decoder reads besides its text.

    `encoder` is the draft model that has an encoder of its own, if there is one. Raises
    ConfigurationError if what that shall read is not known.
    """
    encoded = _encoded(model, model_kwargs)
    source = _source(model, model_kwargs, given, rows)
    draft = None
    if encoder is not None and given.draft_inputs is not None:
        draft = _inputs(encoder, given.draft_inputs, "draft_inputs", rows, given.windows)
    elif encoder is not None:
        _check_draft(model, encoder, source)
    if source is None:
        source = Inputs(None, None, encoded.mask_BT)
    if encoder is None:
        source = source._replace(features=None)  # nobody reads them again
    together = source._replace(encoded=encoded, draft=draft)
    return [together.take([row]) for row in range(rows)]


def _check_draft(model: PreTrainedModel, encoder: PreTrainedModel, source: Inputs | None) -> None:
    """Refuse a draft model that has nothing to read, or that reads something else."""
    do = "pass draft_inputs=..., or a draft model that shares the encoder, or reference=..."
    if source is None:
        raise ConfigurationError(
            "the draft model has an encoder of its own, but what it shall read is not known: "
            f"generate was given encoder_outputs or inputs_embeds alone; {do}"
        )
    read = [(one.main_input_name, _mels(one)) for one in (model, encoder)]
    if read[0] != read[1]:
        kinds = [name if mels is None else f"{name} of {mels} mels" for name, mels in read]
        raise ConfigurationError(
            f"the draft model reads {kinds[1]}, the target {kinds[0]}, which is what generate was "
            f"given; {do}"
        )


def _encoded(model: PreTrainedModel, model_kwargs: Mapping[str, object]) -> Encoded:
    """The encoder's states as `generate` has them, and which of them are there."""
    output = model_kwargs.get("encoder_outputs")
    states = output[0] if isinstance(output, (tuple, Mapping)) else None
    if not isinstance(states, Tensor) or states.dim() != 3:
        do = "leave it out: generate runs the encoder"
        arguments.refuse("encoder_outputs", "the output of the model's encoder", output, do)
    mask, size = model_kwargs.get("attention_mask"), states.shape[:2]
    own = read(output, "attention_mask", Tensor)  # the encoder knows best
    if own is not None and own.shape == size:
        return Encoded(states, own.bool())
    if not isinstance(mask, Tensor) or isinstance(modality_of(model), WindowInput):
        return Encoded(states, torch.ones(size, dtype=torch.bool, device=states.device))
    if mask.shape != size:
        mask = model._get_feature_vector_attention_mask(size[1], mask)
    return Encoded(states, mask.bool())


def _source(
    model: PreTrainedModel, model_kwargs: Mapping[str, object], given: EncoderSources, rows: int
) -> Inputs | None:
    """What the encoder has read, if that is known."""
    mask = model_kwargs.get("attention_mask")
    text = model.get_encoder().main_input_name == "input_ids"
    tensor = given.inputs_tensor
    if given.source_ids is not None:
        if not text:
            raise ConfigurationError(
                f"source_ids= are what an encoder of text has read; got {type(model).__name__}, "
                "which reads something else; to copy from a text pass reference=..."
            )
        each = lists("source_ids", given.source_ids)
        longest = max(map(len, each))
        padded = [[*ids, *[-1] * (longest - len(ids))] for ids in each]
        tensor = _spread("source_ids", torch.tensor(padded), rows)
        return Inputs(tensor.clamp(min=0), None, tensor >= 0)
    # a dummy of -100 stands for inputs that generate was not given
    if tensor is None or (text and (tensor.is_floating_point() or bool((tensor < 0).all()))):
        return None
    fields = {"input_ids" if text else "input_features": tensor}
    if isinstance(mask, Tensor):
        fields["attention_mask"] = mask
    return _inputs(model, fields, "inputs", rows)


def _inputs(
    model: PreTrainedModel,
    given: EncoderInputs,
    name: str,
    rows: int,
    windows: GenerateWindows | None = None,
) -> Inputs:
    """What a processor or tokenizer made for this model's encoder."""
    fields = {"": given} if not isinstance(given, Mapping) else dict(given)
    mask = fields.pop("attention_mask", None)
    tensor = next(iter(fields.values()), None)
    if len(fields) != 1 or not isinstance(tensor, Tensor):
        do = "pass what the model's own processor or tokenizer returns"
        arguments.refuse(name, "a tensor, or a mapping of one and an attention_mask", given, do)
    kind = modality_of(model)
    if isinstance(kind, WindowInput):  # frames stand in columns there, and silence counts
        tensor, mask = _window(kind, tensor, name, windows), None
    tensor = _spread(name, tensor, rows)
    if mask is None or tensor.dim() == 4:
        mask = torch.ones(rows, 1 if tensor.dim() == 4 else tensor.shape[1])
    mask = _spread("attention_mask", mask, rows).to(tensor.device).bool()
    if tensor.is_floating_point():
        return Inputs(None, tensor, mask)
    return Inputs(tensor, None, mask)


def _window(
    kind: WindowInput, frames_BMF: Tensor, name: str, windows: GenerateWindows | None
) -> Tensor:
    """The window [B, F, M] of each row, cut out of whole recordings [B, M, F]."""
    if frames_BMF.dim() != 3 or frames_BMF.shape[1] != kind.mels:
        what = f"frames [B, {kind.mels}, F] of the same sound"
        do = "pass what the draft model's own processor makes of it"
        arguments.refuse(name, what, f"shape {list(frames_BMF.shape)}", do)
    if windows is None:
        cut = list(frames_BMF[..., : kind.frames])
    else:
        starts = zip(windows.own(list(frames_BMF)), windows.starts, strict=True)
        cut = [frames[:, start : start + kind.frames] for frames, start in starts]
    padded = [torch.nn.functional.pad(one, (0, kind.frames - one.shape[1])) for one in cut]
    return torch.stack(padded).transpose(1, 2)


def _mels(model: PreTrainedModel) -> int | None:
    """Channels of the frames that a model hears, if it hears windows of frames."""
    kind = modality_of(model)
    return kind.mels if isinstance(kind, WindowInput) else None


def _spread(name: str, table: Tensor, rows: int) -> Tensor:
    """One row for each sequence: several of them may continue one prompt."""
    if not len(table) or rows % len(table):
        raise ConfigurationError(
            f"{name} has {len(table)} rows for {rows} sequences; give one row for each prompt"
        )
    return table if len(table) == rows else table.repeat_interleave(rows // len(table), 0)
