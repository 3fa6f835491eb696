"""Where each row's prompt begins: the padding ahead of it, read from masks and positions."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.models.config import read


def _tensor(model_kwargs: Mapping[str, object], name: str) -> Tensor | None:
    given = model_kwargs.get(name)
    if given is not None and not isinstance(given, Tensor):
        arguments.refuse(name, "a tensor", given, "pass the tokenizer's own")
    return given


def left_padding(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, object]
) -> list[int]:
    """How many pad tokens stand ahead of each row's prompt [B, L].

    The prompt of an encoder-decoder is the decoder's; its masks and positions are named for it.
    """
    rows, width = input_ids.shape
    pair = bool(model.config.is_encoder_decoder)
    names = ("attention_mask", "position_ids")
    of_mask, of_positions = (f"decoder_{name}" if pair else name for name in names)
    mask, positions = _tensor(model_kwargs, of_mask), _tensor(model_kwargs, of_positions)
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape or bool(((mask != 0) & (mask != 1)).any()):
        raise ConfigurationError(
            f"{of_mask} must hold a 0 or 1 for every token of the prompt; got shape "
            f"{list(mask.shape)} with values {sorted(set(mask.reshape(-1).tolist()))[:8]} for "
            f"a prompt of shape {list(input_ids.shape)}; pass the tokenizer's own"
        )
    mask = mask.long()
    pads = [int(n) for n in (width - mask.sum(1)).tolist()]
    for row, pad in enumerate(pads):
        if not bool(mask[row, pad:].all()) or pad >= width:
            raise ConfigurationError(
                f"prompt {row} is not left-padded: its {of_mask} has holes or nothing in it; "
                "use tokenizer.padding_side = 'left'"
            )
    if positions is not None:
        counted = mask.cumsum(1) - 1
        fits = positions.dim() > 1 and positions.shape[-2:] in ((1, width), (rows, width))
        if not fits or bool(((positions.to(counted) != counted) & mask.bool()).any()):
            raise ConfigurationError(
                f"{of_positions} other than 0, 1, 2, ... behind the padding are not supported by "
                f"outrider's generate; got {positions[..., :8].tolist()}... for {width} tokens; "
                f"leave them out, and give {of_mask} as long as the prompt"
            )
    if pair and any(pads) and not _counts_behind_padding(model, input_ids, mask):
        raise ConfigurationError(
            f"{type(model).__name__} counts the padding ahead of a decoder prompt as text, so that "
            f"a row's own prompt would give another text; got {max(pads)} pad tokens; give rows "
            "whose decoder prompts are equally long, or one at a time"
        )
    return pads


def _counts_behind_padding(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> bool:
    """Whether plain `generate` decodes a left-padded decoder prompt as the prompt alone."""
    if read(model.config, "relative_attention_num_buckets", int):  # distances alone matter
        return True
    inputs = model.prepare_inputs_for_generation(input_ids, decoder_attention_mask=mask)
    positions = inputs.get("decoder_position_ids")
    if positions is None:
        return False
    return bool(((positions == mask.cumsum(1) - 1) | (mask == 0)).all())
