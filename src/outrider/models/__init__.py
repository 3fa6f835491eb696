"""Registry of runners: how the layers of a model are run, most specific first.

Most families need nothing of their own: explicit positions, slots and masks are enough. An
exception is one small file and one line here. An architecture that nobody has listed is tried the
same way; the check at load decides, and the chain fallback is the last resort.

A family of your own is driven by a class of yours once that is registered for its `model_type`: by
`outrider.models.register("my_family", MyRunner)`, or by an entry point of the group
`outrider.model_runners` of an installed package.
"""

from collections.abc import Collection, MutableMapping
from typing import TYPE_CHECKING

from outrider import lazy, plugins
from outrider.errors import ConfigurationError
from outrider.models import recurrent

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from outrider.models.bart import BartRunner
    from outrider.models.decoder import TreeDecoder as TreeDecoder
    from outrider.models.hf import (
        ChainRunner as ChainRunner,
        TransformersRunner as TransformersRunner,
    )
    from outrider.models.llama import LlamaRunner as LlamaRunner
    from outrider.models.lora import LoraBank

#: Architectures checked by tests/models/test_families.py, by transformers' model_type.
SUPPORTED = frozenset(
    """
    biogpt bloom codegen cohere cohere2 deepseek_v3 ernie4_5 exaone4 falcon gemma gemma2
    gemma3_text gemma3n_text glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
    hunyuan_v1_dense llama llama4_text mistral mixtral mpt nemotron olmo2 olmo3 opt phi phi3
    qwen2 qwen3 qwen3_moe smollm3 stablelm starcoder2 xglm
    """.split()
)

_OWN = {
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo"),
        "outrider.models.multi_modal:InnerModelRunner",
    ),
    "bloom": "outrider.models.positions:BloomRunner",
    "falcon": "outrider.models.positions:FalconRunner",
    "git": "outrider.models.image_families:GitRunner",
    "gpt_neo": "outrider.models.positions:GPTNeoRunner",
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "outrider.models.image_families:KosmosRunner"),
    "idefics": "outrider.models.image_cross_attention:IdeficsRunner",
    "mllama": "outrider.models.image_cross_attention:MllamaRunner",
    "moshi": "outrider.models.positions:MoshiRunner",
    "mpt": "outrider.models.positions:MptRunner",
    "paligemma": "outrider.models.image_families:PaliGemmaRunner",
    "roformer": "outrider.models.positions:RoFormerRunner",
    **dict.fromkeys(
        (
            "camembert",
            "data2vec-text",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        "outrider.models.positions:OffsetPositionsRunner",
    ),
}


def _runner(given: object) -> "type[TransformersRunner]":
    """What `register` and entry points may give: a class of runners."""
    from outrider.models.hf import TransformersRunner as TransformersRunner

    what = "a model runner is a subclass of outrider.models.TransformersRunner"
    return plugins.subclass(given, TransformersRunner, what)


PLUGINS = plugins.PluginGroup("outrider.model_runners", "model runner", _runner)
#: Families that need more than positions, slots and masks, those of plug-ins among them.
EXCEPTIONS: MutableMapping[str, "type[TransformersRunner]"] = lazy.Registry(
    _OWN, lambda ours: PLUGINS.load(ours | SUPPORTED)
)


def register(model_type: str, runner: "type[TransformersRunner]") -> None:
    """Drive models of this `model_type`, decoders of text alone, by a class of your own.

    `outrider.testing.check_runner` says whether it does what a runner must. Raises
    ConfigurationError for a family that has a runner, and for what is no class of runners.

    >>> from outrider.models import TransformersRunner
    >>> register("mine", TransformersRunner)
    >>> EXCEPTIONS.pop("mine").__name__
    'TransformersRunner'
    """
    read = _runner(runner)
    PLUGINS.refuse_taken(model_type, {*SUPPORTED, *EXCEPTIONS, *recurrent.FAMILIES})
    EXCEPTIONS[model_type] = read


def _registered(kind: str) -> "type[TransformersRunner] | None":
    """The class of a family that has one of its own. Plug-ins are looked for last."""
    if kind in SUPPORTED and kind not in _OWN:
        return None
    found = EXCEPTIONS.get(kind)
    if found is None:
        PLUGINS.refuse_broken(kind)
    return found


def adapt(
    model: "PreTrainedModel",
    *,
    packed: bool = False,
    vocab_size: int | None = None,
    chain_only: bool = False,
    shares: bool = False,
    int8: bool = False,
    bank: "LoraBank | None" = None,
) -> "TreeDecoder":
    """Drive a loaded transformers model: the lean runner where it fits, else its own forward.

    `chain_only` takes the fallback that uses the model's own mask. `shares` leaves an
    encoder-decoder's own encoder unused (models of text alone have none): a draft model then
    attends to the target's states. `int8` keeps the weights that a step reads in 8 bits.
    `packed` lays those of linear layers out as products read them. Rows have the adapters of
    `bank`, of models of text alone. Raises UnsupportedModel, with
    the reason, for models that cannot be driven exactly.
    """
    import torch

    from outrider.models import linear, llama, placement, unsupported
    from outrider.models.decoder import TreeDecoder as TreeDecoder
    from outrider.models.llama import LlamaRunner as LlamaRunner

    unsupported.check(model)
    # weights that are fetched for a call cannot be laid out: its own forward runs them
    device = torch.device("meta") if placement.offloaded(model) else torch.device(model.device)
    on_cpu = device.type == "cpu"
    lean = _lean(model) if on_cpu and bank is None and reads_more(model.config) else None
    if lean is not None:
        return TreeDecoder(lean(model, packed, shares, int8), vocab_size)
    kind = model.config.model_type
    ours = kind in SUPPORTED or reads_more(model.config) or _registered(kind) is None
    own = on_cpu or (device.type == "cuda" and bank is None and not int8)
    text = own and ours and not chain_only and not reads_more(model.config)
    if text and llama.fits(model, adapters=bank is not None):
        runner = LlamaRunner(model, packed, int8)
        if bank is not None:
            runner.adapt(bank)
        return TreeDecoder(runner, vocab_size, bank)
    if int8 and placement.offloaded(model):
        raise ConfigurationError(
            "weights that a device_map has fetched for each call cannot be kept in 8 bits; got "
            f"{type(model).__name__} with draft_dtype='int8'; leave it out"
        )
    made = (
        linear.quantize_int8(model)
        if int8
        else linear.pack_linear_layers(model)
        if packed and on_cpu
        else None
    )
    run = model if made is None else made
    if bank is not None:
        run = linear.beside(model) if made is None else made  # the user's stays as it is
        bank.attach(run)
    driven = own_forward(run, shares, chain_only)
    if made is not None and driven.recurrent:
        from outrider.models.recurrent.norms import compile_norms

        compile_norms(made)
    if made is not None and not int8:
        driven.packed, driven.means = True, f"{driven.means}, its linear layers packed"
    return TreeDecoder(driven, vocab_size, bank)


def _lean(model: "PreTrainedModel") -> "type[BartRunner] | None":
    """The class that runs one of `bart_encoder.FAMILIES` on a CPU; None for others."""
    from outrider.models import bart_encoder

    if not bart_encoder.fits(model):
        return None
    if model.config.model_type == "whisper":
        from outrider.models.whisper import WhisperRunner

        return WhisperRunner
    from outrider.models.bart import BartRunner

    return BartRunner


def own_forward(
    model: "PreTrainedModel", shares: bool = False, chain_only: bool = False
) -> "TransformersRunner":
    """What runs a model through its own forward: see `adapt`."""
    from outrider.models import seq2seq
    from outrider.models.hf import ChainRunner as ChainRunner

    if reads_more(model.config):  # what is left has positions for trees; no chains to fall to
        return seq2seq.runner_of(model)(model, shares)
    return ChainRunner(model) if chain_only else runner_of(model)(model)


def reads_more(config: "PretrainedConfig") -> bool:
    """Whether models of this configuration read more than their text: sources, or states."""
    from outrider.models import unsupported
    from outrider.models.config import pairs

    return pairs(config) or unsupported.reads_states(config)


def runner_of(model: "PreTrainedModel") -> "type[TransformersRunner]":
    """The class that runs this architecture through its own forward."""
    from outrider.models import seq2seq
    from outrider.models.config import decoder_of, placeholders, read
    from outrider.models.hf import INDEXED, TransformersRunner as TransformersRunner
    from outrider.models.multi_modal import MultiModalRunner
    from outrider.models.positions import IndexedMultiModalRunner, IndexedRunner

    if reads_more(model.config):
        return seq2seq.runner_of(model)
    kind = model.config.model_type
    if kind in recurrent.FAMILIES:
        from outrider.models.recurrent.runner import RecurrentMultiModalRunner, RecurrentRunner

        return RecurrentMultiModalRunner if placeholders(model.config) else RecurrentRunner
    if kind == "falcon" and not model.config.alibi:
        return TransformersRunner
    if (registered := _registered(kind)) is not None:
        return registered
    layers: Collection[str] = read(decoder_of(model.config), "layer_types", (list, tuple)) or ()
    sees = bool(placeholders(model.config))
    if not INDEXED.isdisjoint(layers):
        return IndexedMultiModalRunner if sees else IndexedRunner
    return MultiModalRunner if sees else TransformersRunner


_EXPORTS = {
    "TreeDecoder": "outrider.models.decoder",
    "ChainRunner": "outrider.models.hf",
    "LlamaRunner": "outrider.models.llama",
    "TransformersRunner": "outrider.models.hf",
}
__getattr__, __dir__ = lazy.exports(__name__, _EXPORTS)
