"""Models that cannot be driven exactly, each with its reason.

A refusal is a promise kept: the alternative is text that silently follows another law.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider import arguments
from outrider.errors import ConfigurationError, NumericalError, UnsupportedModel
from outrider.models import placement, recurrent, seq2seq
from outrider.models.config import decoder_of, encoder_of, found, pairs, read, states_width
from outrider.models.weight_only import finite

_RECURRENT = "its layers carry a recurrent state, which cannot be rolled back or branched"
_EXPERTS = "how many tokens an expert takes depends on the whole call, so on a node's siblings"
_STREAMS = "its decoder reads n-gram streams of one text, which have no place for a tree's mask"

_SOUNDS = "it writes sound or notes, not text"

_TRANSDUCER = "it is a transducer, which walks through the frames of a recording, not along a text"

_POOLED = "it pools every few tokens into one key as they come, a tree's siblings with one another"
_TEXT_ALONE = "nobody has tried it with its encoders; its text model alone is supported"

_ATTENTION = "use a model whose layers are all attention"
#: What to do, where it is not to use a model that the table has.
_INSTEAD = {
    _RECURRENT: _ATTENTION,
    _POOLED: _ATTENTION,
    _TEXT_ALONE: "give its text model alone, in a folder of its own",
}
_TABLE = "use a model of docs/supported-models.md"

#: Reasons by transformers' model_type; others are found by their layer types or flags.
REASONS: dict[str, str] = {
    "plamo2": _RECURRENT,
    **dict.fromkeys(("inkling2", "inkling_mm_model", "qwen4_exp"), _TEXT_ALONE),
    "deepseek_v4": _POOLED,
    "diffusion_gemma": "it writes a block of tokens by passes of denoising, not token by token",
    "glm5_next": "its attention chooses groups of neighbouring slots of the cache, where a tree's "
    "siblings differ",
    "udop": "its encoder reads the boxes of words beside an image, for which sources have no place",
    "unlimited_ocr": "what its tokens see depends on where the prompt ended, which a text that is "
    "resumed does not say",
    "reformer": "its hashed attention depends on the whole sequence",
    "xlnet": "it is not a left-to-right decoder",
    "cpmant": "its prefix attention is not causal",
    **dict.fromkeys(("nllb-moe", "switch_transformers"), _EXPERTS),
    **dict.fromkeys(("prophetnet", "xlm-prophetnet"), _STREAMS),
    **dict.fromkeys(("dia", "pop2piano", "vibevoice"), _SOUNDS),
    **dict.fromkeys(("parakeet_rnnt", "parakeet_tdt"), _TRANSDUCER),
    **dict.fromkeys(("nemotron3_5_asr", "nemotron_asr_streaming"), _TRANSDUCER),
    "parakeet_ctc": "it writes a letter for each frame at once (CTC), so nothing is left to draft",
    "fsmt": "its forward cuts the text to the last token by itself",
}

#: Families that are decoders where their configuration says `is_decoder`, and encoders elsewhere.
_ENCODERS = frozenset(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert
    roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """.split()
)

#: Types that older versions of transformers had wrong: the first that is right, and what was not.
SINCE = {
    "git": ("5.18", "a call of one token counts its position twice"),
    "roformer": ("5.18", "tokens of its decoder look at those behind them, too"),
}

LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
LAYERS |= {"indexed_attention", "deepseek_sparse_attention"}  # the same, by version
ATTENTION = {"eager", "sdpa"}


#: Families whose decoder may stand alone and then attends to states that another model made.
READS_STATES = frozenset(
    """
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr
    whisper
    """.split()
)
#: Families that have cross attention where their configuration asks for it.
_MAY_CROSS = frozenset({"bert", "gpt2"})


def too_old(kind: str) -> str | None:
    """Why the installed transformers is too old for a type of model; None: it is not.

    >>> too_old("llama")
    """
    version, wrong = SINCE.get(kind, ("0.0", ""))
    installed = transformers.__version__
    here, needed = (tuple(map(int, v.split(".")[:2])) for v in (installed, version))
    return None if here >= needed else f"in transformers {installed} {wrong}"


def reads_states(config: PretrainedConfig) -> bool:
    """Whether it is a decoder alone whose layers attend to an encoder's states."""
    if pairs(config):
        return False
    crosses = read(config, "add_cross_attention", bool)
    return config.model_type in READS_STATES or bool(crosses)


def check_loaded(given: object, name: str, instead: str) -> None:
    """Raise ConfigurationError for what is no transformers model; `instead` ends the advice."""
    if read(given, "config", object) is not None and callable(given):
        return
    do = f"give {instead}"
    if (
        read(read(given, "module", object), "config", object) is not None
    ):  # DataParallel and its kin
        do = f"a wrapper for training splits batches: give the model inside, {name}.module"
    arguments.refuse(name, "a language model of transformers", given, do)


def check_config(config: PretrainedConfig, name: str | None = None) -> None:
    """Raise UnsupportedModel for an architecture that cannot be driven, before weights are read."""
    kind = read(config, "model_type", str) or name or type(config).__name__
    advice = _ATTENTION

    def refuse(reason: str, advice: str = advice) -> None:
        raise UnsupportedModel(
            f"{kind!r} models are not supported: {reason}; got {name or type(config).__name__}; "
            f"{advice}"
        )

    if pairs(config):
        advice = "use another family of docs/supported-models.md, such as T5, BART or Whisper"
        if kind not in seq2seq.SUPPORTED:
            refuse(REASONS.get(kind, "nobody has tried this kind of encoder-decoder"), advice)
        inner = decoder_of(config)
        if seq2seq.composed(config) and inner.model_type not in seq2seq.DECODERS:
            refuse(f"nobody has tried one with a decoder of {inner.model_type!r}", advice)
        hears = encoder_of(config).model_type if kind == "speech-encoder-decoder" else None
        if hears is not None and hears not in seq2seq.HEARING:
            refuse(f"nobody has tried one with an encoder of {hears!r}", advice)
    if kind in REASONS:
        refuse(REASONS[kind], _INSTEAD.get(REASONS[kind], _TABLE))
    if kind in _ENCODERS and not read(config, "is_decoder", bool):
        refuse(
            "it is an encoder, whose tokens look at those behind them, too; is_decoder=True in its "
            "configuration makes it a decoder, if it was trained as one",
            "use a decoder",
        )
    if (reason := too_old(kind)) is not None:
        refuse(reason, f"install transformers {SINCE[kind][0]} or newer")
    if reads_states(config) and kind not in READS_STATES | _MAY_CROSS:
        refuse(
            "its layers attend to an encoder's states, which nobody has tried for this family",
            "use a decoder of docs/supported-models.md, such as BART's or Whisper's",
        )
    layers: Sequence[str] = read(decoder_of(config), "layer_types", (list, tuple)) or ()
    others = sorted(set(layers) - LAYERS)
    if others and kind not in recurrent.FAMILIES:
        refuse(f"layers of type {', '.join(others)} carry a state that cannot be rolled back")


def check_pair(target: PretrainedConfig, drafts: Sequence[PretrainedConfig]) -> None:
    """Refuse models, and decoders that attend to states which nobody makes, by configuration alone.

    Raises UnsupportedModel.
    """
    for config in (target, *drafts):
        check_config(config)
    if reads_states(target):
        raise UnsupportedModel(
            f"a {target.model_type!r} decoder alone cannot be a target: its layers attend to an "
            "encoder's states, and it has no encoder to make them; give the whole model as the "
            "target (this one may be its draft)"
        )
    for draft in drafts:
        if not pairs(target) and (pairs(draft) or reads_states(draft)):
            raise UnsupportedModel(
                f"a {draft.model_type!r} draft model reads sources, which a {target.model_type!r} "
                "target has not; use a decoder-only draft model"
            )
        if reads_states(draft):
            check_widths(target, draft)


def check_cut(target: PretrainedConfig, apart: bool) -> None:
    """Refuse to cut what nobody has tried, and drafts that are not `apart` from their target.

    Raises UnsupportedModel.
    """
    if pairs(target) or reads_states(target):
        raise UnsupportedModel(
            f"a target that is cut for several processes reads text alone; got "
            f"{target.model_type!r}, which has an encoder; leave tensor_parallel out"
        )
    if target.model_type in recurrent.FAMILIES:
        raise UnsupportedModel(
            "a target that is cut for several processes has attention layers alone; got "
            f"{target.model_type!r}, whose layers keep states; leave tensor_parallel out"
        )
    if not apart:
        raise UnsupportedModel(
            "heads and drafts made of the target's layers are lent its weights, of which a process "
            "has only a part; got one with tensor_parallel; use a draft model of its own, or a "
            "drafter without a model"
        )


def check_widths(target: PretrainedConfig, draft: PretrainedConfig) -> None:
    """Refuse a draft model that cannot attend to the target's states: ConfigurationError."""
    made, wanted = states_width(target), states_width(draft)
    if made != wanted:
        raise ConfigurationError(
            f"the draft model attends to states of width {wanted}; got a target whose encoder "
            f"makes states of width {made}; use a draft model made for this encoder, or one with "
            "its own encoder and share_encoder=False"
        )


def check(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, naming the model and the reason, or return."""
    name = type(model).__name__
    check_config(model.config, name)
    config = decoder_of(model.config)
    if read(model, "_is_stateful", bool) and model.config.model_type not in recurrent.FAMILIES:
        raise UnsupportedModel(
            f"{model.config.model_type!r} models are not supported: {_RECURRENT}; got {name}; use "
            "a model whose layers are all attention"
        )
    back_end = read(config, "_attn_implementation", str) or "eager"
    if back_end not in ATTENTION:
        raise UnsupportedModel(
            f"attention back-end {back_end!r} takes no tree mask; got {name} with "
            f"attn_implementation={back_end!r}; load it with 'sdpa' or 'eager'"
        )
    placement.device_of(model)
    _output_layer(model, name)
    _quantisation(model, name)


def _output_layer(model: PreTrainedModel, name: str) -> None:
    """Refuse an output layer of another dtype than the states it is given: ConfigurationError."""
    head = model.get_output_embeddings()
    try:
        body = model.get_input_embeddings()
    except NotImplementedError:  # a class that does not say where it is
        return
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    if type(head) is not torch.nn.Linear or kept or read(body, "weight", Tensor) is None:
        return
    if head.weight.dtype != body.weight.dtype and head.weight.dtype.is_floating_point:
        raise ConfigurationError(
            f"the output layer's weights are in {head.weight.dtype} and its states in "
            f"{body.weight.dtype}, which its own forward cannot multiply either; got {name}; "
            f"convert the whole model, .to({body.weight.dtype})"
        )


def _quantisation(model: torch.nn.Module, name: str) -> None:
    """Weight-only quantisation is exact; rules that look at the whole call's activations are not.

    What is let through here still has to pass the tree check at load.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Linear8bitLt" and (read(module.state, "threshold", (int, float)) or 0) > 0:
            raise UnsupportedModel(
                "LLM.int8 picks its outlier columns from all tokens of a call, so a node's score "
                f"would depend on its siblings; got {name} with {kind} layers; load it with "
                "llm_int8_threshold=0.0, in 4 bits, or unquantised"
            )
        if rounded := _rounds_activations(module):
            raise UnsupportedModel(
                "dynamic activation quantisation rounds a token's states at each call, where the "
                "last bit of a sum decides, so a node's score would depend on the call; got "
                f"{name} with weights of torchao's {rounded}; quantise weights only"
            )


def _rounds_activations(module: torch.nn.Module) -> str | None:
    """The type of a layer's weight that rounds what it is multiplied with, if it is one."""
    weight = read(module, "weight", Tensor)
    if weight is None or type(weight) in (Tensor, torch.nn.Parameter):
        return None
    how = ("act_quant_kwargs", "activation_quantization", "input_quant_func")
    more = any(found(weight, field) is not None for field in how)
    return type(weight).__name__ if more else None


def check_numbers(weights: Mapping[str, Tensor], what: str) -> None:
    """Raise NumericalError for weights that are no numbers; `what` they are, with its path.

    >>> check_numbers({"up.weight": torch.tensor([1.0])}, "the head 'my-head'")
    """
    bad = [name for name, weight in weights.items() if not finite(weight)]
    if bad:
        raise NumericalError(
            f"the weights of {what} are no numbers; got NaN or infinity in {len(bad)} of "
            f"{len(weights)} tensors, first {bad[0]}; download it again, or save it once more"
        )


_CTRANSLATE2, _TORCH = "*vocabulary.*", "*.pt"
#: What folders hold that other programs read, and what to give in its place.
_ELSEWHERE = {
    "*.gguf": ("GGUF files", "name one of them: {file}"),
    "*.spm": (
        "Marian's own files",
        "translators with SSRU cells are converted by `python -m outrider.models.seq2seq."
        "marian_file {folder} INTO`; others come as transformers' folders (Helsinki-NLP/opus-mt-*)",
    ),
    _CTRANSLATE2: ("CTranslate2's files", "give the model that they were converted from"),
    "ggml-*.bin": ("whisper.cpp's files", "give a folder of transformers (openai/whisper-*)"),
    "consolidated*": (
        "weights in their author's own form",
        "give the folder that transformers has",
    ),
    "*.onnx": ("ONNX files", "give the model that they were exported from"),
    _TORCH: ("files of torch alone", "give a folder with config.json, as transformers saves it"),
}


def check_files(folder: Path, role: str) -> None:
    """Refuse a folder of another program's files, or of Marian's own, which says what it is."""
    for pattern, (what, do) in _ELSEWHERE.items() if folder.is_dir() else ():
        files = sorted(folder.glob(pattern))
        alone = not (folder / "config.json").is_file()  # else of a model that is broken
        if pattern == _CTRANSLATE2:  # has a config.json of its own
            alone = (folder / "model.bin").is_file()
        elif pattern == _TORCH and any(folder.glob("*.safetensors")):  # a trainer's state
            alone = False
        if files and alone:
            do = do.format(file=files[0], folder=folder)
            raise ConfigurationError(f"the {role} model is {what}; got {str(folder)!r}; {do}")
