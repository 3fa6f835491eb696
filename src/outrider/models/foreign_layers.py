"""Quantised layers of other libraries, set to compute as the model around them does.

compressed-tensors unpacks a checkpoint's weights in the model's first forward, in a hook that is
gone behind it: what is read of the layers before that is not there yet, so it is called at load.

bitsandbytes multiplies 4-bit weights by a kernel of bfloat16 products where the processor has them
(AVX-512 BF16), whatever the model's dtype: what a layer is given is rounded to 8 bits of mantissa,
and where the last bit of a float32 sum decides how, a node's score follows what else is in the call
(relative differences of up to 0.01 of the largest logit on SmolLM2). In float32 its other way is
right: weights are widened and multiplied in float32, at two to three times the cost of a layer.
"""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from outrider.models.config import read


def compute_in_float32(model: nn.Module) -> int:
    """Let bitsandbytes' 4-bit layers of a float32 model multiply in float32; returns how many were
    changed.

    Layers that were told to compute in another dtype (`bnb_4bit_compute_dtype`) stay as they are.

    >>> compute_in_float32(nn.Linear(4, 4))
    0
    """
    changed = 0
    for module in model.modules():
        if type(module).__name__ != "Linear4bit" or not vars(module).get(_PACKS):
            continue
        if read(module, "compute_dtype", torch.dtype) not in (None, torch.float32):
            continue
        setattr(module, _PACKS, False)
        _laid_out_again(module)
        changed += 1
    return changed


def unpack(model: nn.Module) -> bool:
    """Let compressed-tensors unpack weights that wait for a model's first call; whether any did.

    >>> unpack(nn.Linear(4, 4))
    False
    """
    compressor = read(read(model, "hf_quantizer", object), "compressor", object)
    if read(model, "ct_decompress_hook", object) is None or compressor is None:
        return False
    method: Any = compressor
    method.decompress_model(model)
    return True


#: Whether a layer lays its weights out for that kernel at its first call.
_PACKS = "support_avx512bf16_for_cpu"


def _laid_out_again(module: Any) -> None:
    """A layer's weights as they were before its first call laid them out for the kernel.

    Their scales were rounded to bfloat16 then, and stay so. (The library's own way back leaves them
    turned, or quantises them once more.)
    """
    state = module.weight.quant_state
    if read(state, "packing_format_for_cpu", bool):
        functional = import_module("bitsandbytes.functional")
        inverse: Any = vars(functional)["_convert_weight_packed_for_cpu_inverse"]
        scales = state.absmax.T.reshape(-1).float()
        module.weight.data, module.weight.quant_state = inverse(module.weight.data, state)
        state.absmax, state.nested = scales, False
