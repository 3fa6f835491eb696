"""What `generate` hands to a custom function, checked; what cannot be honoured is refused."""

import inspect
from collections.abc import Mapping
from types import FrameType

import torch
from torch import Tensor
from transformers import Cache
from transformers import generation as hf

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.models.config import read

_UNDERSTOOD = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
}
#: Keywords of a generation configuration that ask for another way of decoding.
_OTHER_WAYS = (
    "penalty_alpha",
    "dola_layers",
    "assistant_early_exit",
    "constraints",
    "force_words_ids",
    "use_mtp",
    "speculation_type",
)
#: Arguments that `generate` keeps to itself when a custom function runs, and what to do instead.
_KEPT_BACK = {
    "assistant_model": "pass draft_model=..., or call outrider.integrations.generate.generate",
    "streamer": "pass out_streamer=..., or call outrider.integrations.generate.generate",
    "assistant_tokenizer": "leave it out: target and draft model must share one vocabulary",
    "synced_gpus": "leave it out: each process decodes with a whole model",
}


def _refuse(what: str, do: str) -> None:
    raise ConfigurationError(f"{what} is not supported by outrider's generate; {do}")


def refuse_kept_back(caller: FrameType | None) -> None:
    """Refuse arguments of the calling `generate` that it would drop without a word.

    It hands none of them to a custom function, so they are read from its frame; where it is not
    found (a model with a `generate` of its own), there is nothing to see.
    """
    method = inspect.unwrap(hf.GenerationMixin.generate).__code__
    for _ in range(4):
        if caller is None or caller.f_code is method:
            break
        caller = caller.f_back
    if caller is None or caller.f_code is not method:
        return
    given = {name: caller.f_locals.get(name) for name in _KEPT_BACK}
    decorator = caller.f_back  # torch.no_grad's, with the keywords that generate has taken out
    keywords = decorator.f_locals.get("kwargs") if decorator is not None else None
    if isinstance(keywords, dict):
        given["assistant_tokenizer"] = keywords.get("assistant_tokenizer")
    for name, advice in _KEPT_BACK.items():
        if given[name] is None or given[name] is False:
            continue
        if given["streamer"] is not None:
            given["streamer"].end()  # it has the prompt already: nobody may wait for more
        raise ConfigurationError(
            f"{name}= does not reach outrider: transformers' generate keeps it to itself when "
            f"custom_generate is given; got {type(given[name]).__name__}; {advice}"
        )


def refuse(config: hf.GenerationConfig, model_kwargs: Mapping[str, object]) -> None:
    """Refuse what speculation cannot give."""
    if (read(config, "num_beams", int) or 1) > 1:
        _refuse(f"num_beams={config.num_beams}", "use num_beams=1")
    for name in _OTHER_WAYS:
        if read(config, name, object):
            _refuse(f"{name}={read(config, name, object)!r}", "leave it out")
    kind = read(config, "cache_implementation", str) or ""
    if "quantized" in kind or "offloaded" in kind:
        _refuse(f"cache_implementation={kind!r}", "leave it out: the cache is one of our own")
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if read(config, name, object):
                _refuse(name, "leave it out")
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        _refuse("a filled past_key_values", "pass the whole prompt instead")
    if read(cache, "_is_user_defined", object) or not (cache is None or isinstance(cache, Cache)):
        _refuse(
            f"past_key_values (got an empty {type(cache).__name__}, which would stay empty)",
            "leave it out: the cache is one of our own",
        )
    others = {k for k, v in model_kwargs.items() if k not in _UNDERSTOOD and v is not None}
    if others:
        _refuse(
            f"model input {', '.join(sorted(others))}", "pass input_ids and attention_mask only"
        )


def _tensor(model_kwargs: Mapping[str, object], name: str) -> Tensor | None:
    given = model_kwargs.get(name)
    if given is not None and not isinstance(given, Tensor):
        arguments.refuse(name, "a tensor", given, "pass the tokenizer's own")
    return given


def left_padding(input_ids: Tensor, model_kwargs: Mapping[str, object]) -> list[int]:
    """How many pad tokens stand ahead of each row's prompt [B, L]."""
    rows, width = input_ids.shape
    mask, positions = (_tensor(model_kwargs, n) for n in ("attention_mask", "position_ids"))
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape or bool(((mask != 0) & (mask != 1)).any()):
        raise ConfigurationError(
            "attention_mask must hold a 0 or 1 for every token of input_ids; got shape "
            f"{list(mask.shape)} with values {sorted(set(mask.reshape(-1).tolist()))[:8]} for "
            f"input_ids of shape {list(input_ids.shape)}; pass the tokenizer's own"
        )
    mask = mask.long()
    pads = [int(n) for n in (width - mask.sum(1)).tolist()]
    for row, pad in enumerate(pads):
        if not bool(mask[row, pad:].all()) or pad >= width:
            raise ConfigurationError(
                f"prompt {row} is not left-padded: its attention mask has holes or nothing in it; "
                "use tokenizer.padding_side = 'left'"
            )
    if positions is not None:
        counted = mask.cumsum(1) - 1
        fits = positions.dim() > 1 and positions.shape[-2:] in ((1, width), (rows, width))
        if not fits or bool(((positions.to(counted) != counted) & mask.bool()).any()):
            raise ConfigurationError(
                "position_ids other than 0, 1, 2, ... behind the padding are not supported by "
                f"outrider's generate; got {positions[..., :8].tolist()}... for {width} tokens; "
                "leave them out, and give an attention_mask as long as input_ids"
            )
    return pads
