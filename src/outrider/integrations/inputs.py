"""What `generate` hands to a custom function, checked; what cannot be honoured is refused."""

import inspect
from collections.abc import Mapping
from types import FrameType

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, generation as hf

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.models.config import read

# Where each row's prompt begins: the padding ahead of it, read from masks and positions.


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


_UNDERSTOOD = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
#: The same for encoder-decoders; and whatever else their encoder has read by now.
_UNDERSTOOD_BESIDE_A_SOURCE = {
    "attention_mask",
    "encoder_outputs",
    "decoder_attention_mask",
    "decoder_position_ids",
    "output_attentions",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
}
#: Keywords of a generation configuration that ask for another way of decoding, unless they are
#: None, 0, False or this.
_OTHER_WAYS: dict[str, object] = {
    "penalty_alpha": None,
    "dola_layers": None,
    "assistant_early_exit": None,
    "constraints": None,
    "force_words_ids": None,
    "num_beam_groups": 1,
    "diversity_penalty": None,
    "speculation_type": None,
}
_STATES = ("output_attentions", "output_hidden_states")
#: Arguments that `generate` keeps to itself when a custom function runs, and what to do instead.
_KEPT_BACK = {
    "assistant_model": "pass draft_model=..., or call outrider.integrations.generate.generate",
    "streamer": "pass out_streamer=..., or call outrider.integrations.generate.generate",
    "synced_gpus": "leave it out: each process decodes with a whole model",
}


def _refuse(what: str, do: str) -> None:
    raise ConfigurationError(f"{what} is not supported by outrider's generate; {do}")


def kept_back(caller: FrameType | None) -> dict[str, object]:
    """The tokenizers of target and draft model that the calling `generate` keeps to itself.

    What else it would drop without a word is refused. It hands none of it to a custom function, so
    it is read from its frame; where that is not found (a model with a `generate` of its own), there
    is nothing to see. A `tokenizer` alone is for stop strings.
    """
    method = inspect.unwrap(hf.GenerationMixin.generate).__code__
    for _ in range(4):
        if caller is None or caller.f_code is method:
            break
        caller = caller.f_back
    if caller is None or caller.f_code is not method:
        return {}
    given = {name: caller.f_locals.get(name) for name in _KEPT_BACK}
    decorator = caller.f_back  # torch.no_grad's, with the keywords that generate has taken out
    keywords = decorator.f_locals.get("kwargs") if decorator is not None else None
    for name, advice in _KEPT_BACK.items():
        if given[name] is None or given[name] is False:
            continue
        if given["streamer"] is not None:
            given["streamer"].end()  # it has the prompt already: nobody may wait for more
        raise ConfigurationError(
            f"{name}= does not reach outrider: transformers' generate keeps it to itself when "
            f"custom_generate is given; got {type(given[name]).__name__}; {advice}"
        )
    if not isinstance(keywords, dict) or keywords.get("assistant_tokenizer") is None:
        return {}
    return {name: keywords.get(name) for name in ("tokenizer", "assistant_tokenizer")}


def refuse(
    model: PreTrainedModel, config: hf.GenerationConfig, model_kwargs: Mapping[str, object]
) -> None:
    """Refuse what speculation cannot give."""
    pair = bool(model.config.is_encoder_decoder)
    for name, plain in _OTHER_WAYS.items():
        value = read(config, name, object)
        if value and value != plain:
            _refuse(f"{name}={value!r}", "leave it out")
    kind = read(config, "cache_implementation", str) or ""
    if "quantized" in kind or "offloaded" in kind:
        _refuse(f"cache_implementation={kind!r}", "leave it out: the cache is one of our own")
    if config.return_dict_in_generate:
        for name in _STATES:
            if read(config, name, object) and not (pair and name == "output_attentions"):
                _refuse(name, "leave it out")
        attention = model.get_decoder().config._attn_implementation if pair else "eager"
        if read(config, "output_attentions", object) and attention != "eager":
            _refuse(
                f"output_attentions with attn_implementation={attention!r}, which keeps none,",
                "load the model with attn_implementation='eager'",
            )
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        _refuse("a filled past_key_values", "pass the whole prompt instead")
    if read(cache, "_is_user_defined", object) or not (cache is None or isinstance(cache, Cache)):
        _refuse(
            f"past_key_values (got an empty {type(cache).__name__}, which would stay empty)",
            "leave it out: the cache is one of our own",
        )
    understood = _UNDERSTOOD
    if pair:
        encoder = inspect.signature(model.get_encoder().forward)
        understood = _UNDERSTOOD_BESIDE_A_SOURCE.union(encoder.parameters)
    others = {k for k, v in model_kwargs.items() if k not in understood and v is not None}
    if others:
        _refuse(
            f"model input {', '.join(sorted(others))}", "pass input_ids and attention_mask only"
        )
