"""EAGLE-3 checkpoints as their authors write them: which layout, what is computed, what is refused.

    speculators   config.json names `speculators_model_type`; decoder layers by configuration of
                  their own; flags for each norm; layers to read by number
    original      a Llama's config.json with `draft_vocab_size`; the layer is called `midlayer`;
                  layers to read often go without saying: 2, n / 2 and n - 3

A flag that nothing here computes is refused by its name: a head that runs without it proposes
worse tokens, and nobody knows why.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError, VocabularyMismatch, pickled
from outrider.models import tensor_file, unsupported
from outrider.models.config import folder_fields
from outrider.models.heads.eagle3 import KINDS, Eagle3, Eagle3Config
from outrider.models.heads.model import DraftHead
from outrider.models.sources import ModelSource
from outrider.models.weight_only import states_dtype

SPECULATORS, ORIGINAL = "speculators", "original"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
#: Fields beside the flags that say how a head was made, not what it computes.
INERT = frozenset(
    """
    architectures auto_map draft_dtype dtype embed_requires_grad enable_sp_ulysses
    has_no_defaults_at_init model_type speculators_config speculators_model_type
    speculators_version torch_dtype transformers_version
    """.split()
)
_OWN = frozenset({_LAYERS, "draft_vocab_size", "target_hidden_size", *FLAGS})
#: What the only form that is computed says in these fields of an `eagle_config`.
_EAGLE = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
    "has_lm_head": True,
}
#: Older names of fields of a decoder's configuration, and those that change nothing here.
LAYER_TOO = frozenset(
    {"rope_theta", "rope_scaling", "pretraining_tp", "max_window_layers", "sliding_window"}
)


class Checkpoint(NamedTuple):
    """An EAGLE-3 head as read from its folder."""

    config: Eagle3Config
    weights: dict[str, Tensor]  #: by the names of the speculators layout
    #: whether its layers' numbers count outputs for sure; some authors count the layer before
    sure: bool
    draft_dtype: str | None  #: "int8" if it says that it is best kept so


def layout(fields: Mapping[str, Any]) -> str | None:
    """The layout of a head's configuration; None: it is no head's."""
    if "speculators_model_type" in fields:
        return SPECULATORS
    return ORIGINAL if "draft_vocab_size" in fields or "eagle_config" in fields else None


def read(
    folder: Path, target: PretrainedConfig, kind: str = "eagle3", more: frozenset[str] = frozenset()
) -> Checkpoint:
    """The head in a folder, for a target of this (decoder's) configuration.

    `kind` is what the speculators layout calls it, `more` are fields that are read elsewhere.

    Raises ConfigurationError for what cannot be read, what is not computed here, and what does not
    fit the target.
    """
    fields = {name: value for name, value in folder_fields(folder).items() if name not in more}
    if fields.get("speculators_model_type", kind) != kind:
        do = "give a head of EAGLE-3, P-EAGLE, DFlash or DSpark ('eagle3', 'peagle', ...)"
        raise bad_head(folder, f"speculators_model_type={fields['speculators_model_type']!r}", do)
    asked = _speculators if layout(fields) == SPECULATORS else _original
    config, sure = asked(folder, fields, int(target.num_hidden_layers))
    weights = weights_of(folder)
    if "fc.weight" not in weights:
        raise bad_head(folder, "no tensor fc.weight", "give a folder with an EAGLE-3 head")
    wide = int(target.hidden_size)
    states = weights["fc.weight"].shape[1]
    if states != len(config.aux_layers) * wide or config.target_width not in (None, wide):
        raise bad_head(
            folder,
            f"{states} inputs of fc for {len(config.aux_layers)} states of width "
            f"{config.target_width or wide}, and a target of width {wide}",
            "use it with the target that it was made for",
        )
    kept = fields.get("draft_dtype")
    if kept not in (None, "int8"):
        raise bad_head(
            folder, f"draft_dtype={kept!r}, which is not 'int8'", "leave draft_dtype out"
        )
    other = None if wide == config.layer.hidden_size else wide
    return Checkpoint(dataclasses.replace(config, target_width=other), weights, sure, kept)


def save(head: Eagle3, folder: str | Path, verifier: str) -> None:
    """Write a head in the speculators layout; `verifier` names its target.

    >>> save(head, "head", "HuggingFaceTB/SmolLM2-135M-Instruct")       # doctest: +SKIP
    """
    config = head.config
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_width,
        _LAYERS: list(config.aux_layers),
        **{flag: vars(config)[flag] for flag in FLAGS},
        "transformer_layer_config": config.layer.to_dict(),
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
    tensor_file.write_folder(folder, fields, head.state_dict())


def _speculators(folder: Path, fields: Mapping[str, Any], layers: int) -> tuple[Eagle3Config, bool]:
    refuse(folder, fields, INERT | _OWN | {"transformer_layer_config"})
    if "norm_before_residual" not in fields:
        do = "write norm_before_residual, true or false, into its config.json"
        raise bad_head(folder, "no norm_before_residual, which has no default that all share", do)
    ids = fields.get(_LAYERS)
    return _config(folder, fields, fields.get("transformer_layer_config"), ids, layers), True


def _original(folder: Path, fields: Mapping[str, Any], layers: int) -> tuple[Eagle3Config, bool]:
    eagle = fields.get("eagle_config") or {}
    for name, value in eagle.items():
        if name in (_LAYERS, *FLAGS) or value is None:
            continue
        if name not in _EAGLE or value != _EAGLE[name]:
            raise bad_head(folder, f"eagle_config.{name}={value!r}", "give another head")
    both = {**fields, **{name: eagle[name] for name in (_LAYERS, *FLAGS) if name in eagle}}
    layer = {name: value for name, value in fields.items() if name not in _OWN | {"eagle_config"}}
    return _config(folder, both, layer, both.get(_LAYERS), layers), False


def _config(
    folder: Path, fields: Mapping[str, Any], layer: Any, ids: Any, layers: int
) -> Eagle3Config:
    config = layers_as(folder, layer)
    aux_layers = tuple(ids) if ids else (2, layers // 2, layers - 3)
    fits(folder, aux_layers, layers)
    flags = {flag: bool(fields.get(flag)) for flag in FLAGS}
    width = fields.get("target_hidden_size")
    size = fields.get("draft_vocab_size") or config.vocab_size
    return Eagle3Config(config, aux_layers, int(size), width, **flags)


def layers_as(folder: Path, layer: Any, slides: bool = False) -> PretrainedConfig:
    """The configuration of a head's decoder layers; ConfigurationError for what is not computed.

    `slides`: layers may have windows.
    """
    if not isinstance(layer, dict) or layer.get("model_type") not in KINDS:
        given = layer.get("model_type") if isinstance(layer, dict) else layer
        do = f"its decoder layers may be of {' or '.join(KINDS)}"
        raise bad_head(folder, f"decoder layers of {given!r}", do)
    known = AutoConfig.for_model(layer["model_type"])
    refuse(folder, layer, set(known.to_dict()) | LAYER_TOO | INERT)
    windows = "sliding_attention" in (layer.get("layer_types") or ())
    if not slides and (layer.get("use_sliding_window") or windows):
        raise bad_head(folder, "use_sliding_window=True", "give a head with full attention")
    rest = {name: value for name, value in layer.items() if name != "model_type"}
    return AutoConfig.for_model(layer["model_type"], **rest)


def fits(folder: Path, aux_layers: tuple[int, ...], layers: int) -> None:
    """Refuse states that a target of so many layers does not have."""
    if not all(isinstance(layer, int) and 0 <= layer < layers for layer in aux_layers):
        do = "use it with the target that it was made for"
        raise bad_head(
            folder, f"states of layers {aux_layers}, for a target of {layers} layers", do
        )


def known_ids(folder: Path, weights: Mapping[str, Tensor], size: int, vocab: int) -> Tensor | None:
    """The tokens of the target's that a head can propose, by its `d2t`; None: all.

    Raises ConfigurationError where nothing says which, VocabularyMismatch for tokens beyond.
    """
    shift = weights.get("d2t")
    if shift is None:
        if size != vocab:
            given = f"{size} of {vocab} tokens and no d2t, which says which ones"
            raise bad_head(folder, given, "give a whole checkpoint")
        return None
    ids = shift.long() + torch.arange(len(shift), device=shift.device)
    marked = weights.get("t2d")
    fits = len(ids) == size and 0 <= int(ids.min()) <= int(ids.max()) < vocab
    if not fits or (marked is not None and not torch.equal(marked.nonzero()[:, 0], ids.sort()[0])):
        raise VocabularyMismatch(
            f"d2t and t2d of the head {str(folder)!r} must name the same {size} tokens of {vocab}; "
            f"got {len(ids)} from {int(ids.min())} to {int(ids.max())}; give a whole checkpoint, "
            "with the target that it was made for"
        )
    return ids


def refuse(folder: Path, fields: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    """Refuse fields that ask for something and are not known."""
    for name, value in fields.items():
        if name not in known and not name.startswith("_") and value not in (None, False, [], {}):
            do = "give a head that does not ask for it"
            raise bad_head(folder, f"{name}={value!r}, which is not computed here", do)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder by the names of the speculators layout."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        found: dict[str, Tensor] = {}
        for file in files:
            found |= load_file(file)
        if not files:
            whole = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
            found = dict(whole)
    except UnpicklingError as error:
        raise bad_head(folder, pickled(error), "give a head in safetensors") from error
    except (OSError, RuntimeError, SafetensorError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"cannot read the head's weights; got {str(folder)!r} ({type(error).__name__}: "
            f"{error}); it needs *.safetensors or pytorch_model.bin"
        ) from error
    named = {_renamed(name): tensor for name, tensor in found.items()}
    return {name: tensor for name, tensor in named.items() if not _dropped(name)}


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name[9:]}" if name.startswith("midlayer.") else name


def _dropped(name: str) -> bool:
    """What is computed anew, belongs to the target, or says how far to draft: our planner does."""
    left = name.startswith(("verifier_", "confidence_head."))
    return left or name.endswith("rotary_emb.inv_freq")


def settle(
    head: DraftHead, weights: Mapping[str, Tensor], name: str, dtype: str, device: torch.device
) -> None:
    """Give a head its weights, and put it where it runs beside a target of this dtype.

    Which tokens it knows is said already: some checkpoints have no t2d. Raises ConfigurationError
    for weights that are not those of its config.json, NumericalError for what is no number.
    """
    unsupported.check_numbers(weights, f"the head {name}")
    told = {} if head.ids_K is None else {"d2t": head.d2t, "t2d": head.get_buffer("t2d")}
    try:
        head.load_state_dict({**weights, **told})
    except RuntimeError as error:
        said = " ".join(line.strip() for line in str(error).splitlines()[1:])[:300]
        raise ConfigurationError(
            f"the weights of the head {name} are not those that its config.json asks for; got "
            f"{said}; give a whole checkpoint of one layout"
        ) from error
    head.to(device, states_dtype(dtype, device)).eval().requires_grad_(False)


def lent(
    model: PreTrainedModel, weights: Mapping[str, Tensor], ids_K: Tensor | None
) -> dict[str, Tensor | None]:
    """A target's embedding and the rows of its output layer, where a head has none of its own."""
    embedding: Tensor | None = None
    output: Tensor | None = None
    if "embed_tokens.weight" not in weights:
        embedding = model.get_input_embeddings().weight
    if "lm_head.weight" not in weights:
        output = model.get_output_embeddings().weight.detach()
        output = output if ids_K is None else output[ids_K.to(output.device)]
    return {"embedding_VE": embedding, "output_KE": output}


def same_vocabulary(name: str, own: int, target: ModelSource, known: int) -> None:
    """Refuse a head that was made for another vocabulary."""
    if own != known:
        raise VocabularyMismatch(
            f"the head {name} was made for a vocabulary of {own} tokens; got {target} with "
            f"{known}; use it with the target that it was made for"
        )


def bad_head(folder: Path, given: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"the head {str(folder)!r} cannot be used; got {given}; {do}")
