"""Runs models some of whose layers keep a state: their own forward, with handles for states."""

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModel
from outrider.models.cache import SlotCache
from outrider.models.config import read
from outrider.models.cpu_kernels import outer_product
from outrider.models.encoder_cache import EncoderCache
from outrider.models.hf import FULL, Mask, TransformersRunner
from outrider.models.multi_modal import MultiModalRunner
from outrider.models.recurrent import ATTEND, COMPILED, LAYERS, MIXERS
from outrider.models.recurrent.hooks import ask, install
from outrider.types import MultiModalInputs, Nodes, Output

_log = logging.getLogger("outrider.models")

#: Names for full attention.
_FULL = frozenset({FULL, "attention"})
#: Kinds of layers without either.
_NEITHER = frozenset({"mlp", "moe"})
#: Families that take no cache of another class from who wants it back.
_OWN_CACHE = frozenset({"minimax", "xlstm"})


class RecurrentRunner(TransformersRunner):
    """`ForCausalLM.forward` over trees, for mixers that call functions behind our wrappers."""

    recurrent = True

    def __init__(self, model: PreTrainedModel) -> None:
        found = install(model)
        if not found:
            raise UnsupportedModel(
                f"the mixers of {type(model).__name__} call none of the functions that outrider "
                "can stand before; got a modelling file of another version of transformers; "
                "install transformers 5.23 or later"
            )
        super().__init__(model)
        if self._kinds is not None:
            self._kinds = tuple(sorted({ATTEND.get(kind, kind) for kind in self._kinds}))
        self.tracks |= any(MIXERS[name] == "relative_attention" for name in found)
        names = (name for name in ("past_key_values", "cache_params", "state"))
        self.takes_cache = next(name for name in names if name in self._takes)
        self.returns_cache = model.config.model_type not in _OWN_CACHE
        _rescale(model)
        #: what the mixers cut the steps of their recurrences to
        self.limit = limit_of(model.modules())
        self.means = f"{self.means}, states by {_kernel(found, self.device)}"

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        """Logits of the (last) nodes, and their states at the aux layers."""
        try:
            return super().__call__(cache, nodes, last, aux_layers)
        finally:
            ask(None)  # or a call of the user's own would meet the last layer's handle

    def masks(self, visible_BQW: Tensor, positions_BQ: Tensor, keys_BW: Tensor | None) -> Mask:
        """Masks of the attention layers under any name, and None for those that keep a state."""
        if self.takes_cache != "past_key_values":
            return None  # no layer attends
        made = super().masks(visible_BQW, positions_BQ, keys_BW)
        named: dict[str, Tensor | None] = {FULL: made} if not isinstance(made, dict) else made
        full = next((named[kind] for kind in _FULL if kind in named), None)
        named = {**dict.fromkeys(_FULL, full), **named, **dict.fromkeys(LAYERS)}
        return named | {name: named[kind] for name, kind in ATTEND.items() if kind in named}

    def _cuts(self) -> bool:
        if self._kinds is None:
            return super()._cuts()
        return bool({ATTEND.get(kind, kind) for kind in self._kinds} - LAYERS - _FULL - _NEITHER)


class RecurrentMultiModalRunner(MultiModalRunner, RecurrentRunner):
    """A model whose layers keep states and whose prompts may hold images: Qwen3.5, LFM2-VL.

    The call that reads the images settles their tokens, as any call that reads text does.
    """

    def read_media(
        self,
        cache: SlotCache,
        prompt: Sequence[int],
        inputs: MultiModalInputs,
        aux_layers: tuple[int, ...] = (),
        known: EncoderCache | None = None,
    ) -> tuple[int, tuple[Tensor, ...]]:
        """Read a row's prompt up to its last placeholder: see `MultiModalRunner`."""
        try:
            return super().read_media(cache, prompt, inputs, aux_layers, known)
        finally:
            ask(None)


def _kernel(functions: Iterable[str], device: torch.device) -> str:
    """What computes the states of mixers that call these functions; why no kernel does, if none.

    The packages that transformers looks for (fla, mamba_ssm, causal_conv1d) are never asked: their
    kernels know no trees.
    """
    kinds = {MIXERS[name] for name in functions}
    if not (kinds - {"short_conv"} or kinds) & COMPILED:  # of a scan and its convolution the scan
        return "torch's operators"
    why = outer_product.unsupported_reason(
        torch.empty(1, 1, 16, 16, dtype=torch.float32, device=device)
    )
    if why is None:
        return "a compiled kernel"
    if device.type == "cpu":
        _said_once(why)
    return f"torch's operators ({why})"


@cache
def _said_once(why: str) -> None:
    _log.warning("states of hybrid models are computed by torch's operators: %s", why)


def _rescale(model: PreTrainedModel) -> None:
    """Let RWKV divide its weights for inference now, not in its first call: they may be copied."""
    body = read(model, "rwkv", PreTrainedModel)
    if body is not None and not model.training:
        body._rescale_layers()


def limit_of(parts: Iterable[object]) -> tuple[float, float]:
    """The `time_step_limit` of a model's mixers, (0, inf) if they name none.

    Their one-token function is not told of it, so that transformers' decoding goes on otherwise
    than its whole forward, which is what the model was trained as.
    """
    found = (read(part, "time_step_limit", (tuple, list)) for part in parts)
    low, high = next((limit for limit in found if limit is not None), (0.0, float("inf")))
    return float(low), float(high)
