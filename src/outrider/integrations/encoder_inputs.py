"""What encoder-decoders read, from what `generate` hands to a custom function.

By then the encoder has run: its states go to the engine as they are. Source ids come along for
drafters that copy from them, and inputs for draft models with an encoder of their own.
"""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from outrider import arguments
from outrider.drafters import ReferenceLookup
from outrider.engine.request import token_ids
from outrider.errors import ConfigurationError
from outrider.models.config import read
from outrider.models.seq2seq.input_modality import WindowInput, modality_of
from outrider.types import Drafter, Encoded, Inputs

# Texts that rows may copy from, as callers of `generate` give them.

# Which window of which recording each row of a call is, where Whisper's `generate` calls.
#
# It decodes window after window, leaves out recordings that are over and those that need no other
# temperature, and tells a custom function none of it. What belongs to a recording (a reference, the
# frames of a draft model) is found by its own tables, in the frame of the call.

T = TypeVar("T")
_FAR = 8  #: frames between a custom function and Whisper's `generate`


class GenerateWindows(NamedTuple):
    """The rows of one call."""

    rows: list[int]  #: the recording of each
    starts: list[int]  #: its first frame
    recordings: int  #: in all; those of several sequences count as often

    def own(self, each: Sequence[T]) -> list[T]:
        """For each row what belongs to its recording."""
        return [each[row * len(each) // self.recordings] for row in self.rows]


def windows_of(caller: FrameType | None) -> GenerateWindows | None:
    """The windows that a call is about; None if it is not Whisper's `generate` that calls."""
    method = WhisperGenerationMixin.generate_with_fallback.__code__
    for _ in range(_FAR):
        if caller is None or caller.f_code is method:
            break
        caller = caller.f_back
    if caller is None or caller.f_code is not method:
        return None
    seek, recordings = caller.f_locals["seek"].tolist(), caller.f_locals["batch_idx_map"]
    rows = [recordings[row] for row in caller.f_locals["fallback_index_map"]]
    return GenerateWindows(rows, [seek[row] for row in rows], len(seek))


#: Token ids: one list, or a list for each prompt.
Ids: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]]


def references(
    given: Ids | None, rows: int, windows: GenerateWindows | None = None
) -> list[Sequence[int]] | None:
    """Tokens that each row may copy from.

    One list serves all rows; of several there must be one for each prompt, or recording.
    """
    if given is None:
        return None
    each = lists("reference", given)
    if len(each) == 1:
        return each * rows
    of = rows if windows is None else windows.recordings
    if of % len(each):
        raise ConfigurationError(
            f"reference= has one list of token ids for each prompt, or one for all; got "
            f"{len(each)} for {of} rows; give as many as there are prompts"
        )
    if windows is not None:
        return windows.own(each)
    return [ids for ids in each for _ in range(rows // len(each))]


def check(
    drafter: Drafter,
    named: str | None,
    inputs: Sequence[Inputs] | None,
    copied: Sequence[Sequence[int]] | None,
) -> None:
    """Refuse a reference that nobody looks into, and looking by name where there is none."""
    looks = isinstance(drafter, ReferenceLookup)
    if copied is not None and not looks:
        raise ConfigurationError(
            f"reference= is what drafter='reference_lookup' copies from; got {drafter.name!r}, "
            "which has no use for it; leave one of them out"
        )
    known = copied is not None or (inputs is not None and inputs[0].ids_BS is not None)
    if looks and named is not None and not known:
        raise ConfigurationError(
            f"drafter={named!r} copies from a reference, and there is none: no token ids of a "
            "source have come this far; pass reference=..., or source_ids=... if generate was "
            "given encoder_outputs instead of input_ids"
        )


def lists(name: str, given: Ids) -> list[Sequence[int]]:
    """Lists of token ids from a tensor, one list or several."""
    plain = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(plain, (list, tuple)) or not plain:
        do = f"write {name}=tokenizer(texts).input_ids"
        arguments.refuse(name, "token ids: one list, or a list for each prompt", given, do)
    if not isinstance(plain[0], (list, tuple, Tensor)):
        plain = [plain]
    return [token_ids(ids, number) for number, ids in enumerate(plain)]


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
    for name, value in arguments.fields_of(given, ("source_ids", "draft_inputs")).items():
        if value is not None:
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
        tensor = _spread("source_ids", torch.tensor(padded, device="cpu"), rows)
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
        long = 1 if tensor.dim() == 4 else tensor.shape[1]
        mask = tensor.new_ones(rows, long, dtype=torch.bool)
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
