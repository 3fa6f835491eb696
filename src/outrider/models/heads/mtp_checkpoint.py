"""Multi-token prediction layers that checkpoints bring as `mtp.*`, read from their files.

Qwen3-Next and Qwen3.5 have one such layer in every checkpoint, which transformers drops at load: it
is a decoder layer with full attention behind a linear layer over the token's embedding and the
state before it, both normalised. transformers' `MtpModel` is that very module; it only has to be
told of the layer, and to be given the weights by its own names.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider.models.config import decoder_of
from outrider.models.model_lock import CONFIGURATION

#: Modules of a checkpoint's layer, and what `MtpModel` calls them.
NAMES = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
    "layers.0": "mtp_block",
}
_PART = re.compile(rf"(?:^|\.)mtp\.({'|'.join(map(re.escape, NAMES))})\.(.+)$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def is_whole(names: list[str]) -> bool:
    """Whether tensors with these names are such a layer, none of its modules missing.

    >>> is_whole(["mtp.fc.weight"])
    False
    """
    found = (_PART.search(name) for name in names)
    return {match[1] for match in found if match} == set(NAMES)


def read(made: Any, model: PreTrainedModel, folder: Path) -> Any:
    """The first such layer of a folder's safetensors, as `made` (`MtpModel`) for a loaded model.

    Raises RuntimeError, as torch does, where tensors are missing, too many, or of other shapes.
    """
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():
                if (part := _PART.search(name)) is not None:
                    weights[f"{NAMES[part[1]]}.{part[2]}"] = stored.get_tensor(name)
    with CONFIGURATION, _told(decoder_of(model.config)):
        layer = made(model, 1)
    layer.layers[0].load_state_dict(_fused(weights))
    layer.layers.to(model.device, model.dtype)
    return layer


@contextmanager
def _told(config: PretrainedConfig) -> Iterator[None]:
    """A configuration that says, for the time of a `with`, what the checkpoint's did not."""
    says = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    if vars(config).get("mlp_layer_types"):
        says["mtp_mlp_layer_types"] = config.mlp_layer_types[-1:]
    kept = dict(vars(config))
    try:
        vars(config).update(says)
        yield
    finally:
        vars(config).clear()
        vars(config).update(kept)


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' matrices in one tensor, as transformers has them; authors store each alone."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    rest: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _EXPERT.match(name)
        if match is None:
            rest[name] = weight
        else:
            kinds = experts.setdefault(match[1], {})
            kinds.setdefault(match[3], {})[int(match[2])] = weight
    for place, kinds in experts.items():
        stacked = {
            kind: torch.stack([each[number] for number in sorted(each)])
            for kind, each in kinds.items()
        }
        if stacked.keys() == {"gate", "up", "down"}:  # or else `load_state_dict` says what is not
            rest[f"{place}.down_proj"] = stacked["down"]
            rest[f"{place}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], 1)
    return rest
