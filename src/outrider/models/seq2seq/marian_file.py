"""Marian's binary model files, as its small translators come in: read, and made a folder of.

    python -m outrider.models.seq2seq.marian_file FOLDER INTO

FOLDER holds a model (`*.bin` with the configuration in it), and a `tokenizer.json` of its
vocabulary; INTO becomes a folder that `outrider.load` and transformers' AutoModelForSeq2SeqLM
(behind `import outrider.models.seq2seq.marian_ssru`) open. Read are float32 and 8-bit weights of
the kind that is the same on every processor (`intgemm8`), which become float32.

The layout, after Marian's `src/common/binary.cpp`: version and number of items, then for each item
four lengths (name, type, shape, bytes), then all names, all shapes, a gap, all data.
"""

import argparse
import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.errors import ConfigurationError, first_line

if TYPE_CHECKING:
    from outrider.models.seq2seq.marian_ssru import MarianSsruModel

_FLOAT32, _INT8, _TEXT = 0x0404, 0x4101, 0x0101
_SETTINGS = "special:model.yml"
_END, _UNKNOWN = 0, 1  #: of Marian's vocabularies: the text's end, and what no piece stands for
_NEVER = -1e4  #: added to the logit of a token that is never written
#: What a tokenizer does behind the last piece of a source: it ends with the text's end.
_PIECES = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
_ENDED = {
    "type": "TemplateProcessing",
    "single": _PIECES,
    "pair": _PIECES,
    "special_tokens": {"</s>": {"id": "</s>", "ids": [_END], "tokens": ["</s>"]}},
}
#: Parts of a layer: what Marian calls them -> transformers.
_PARTS = {
    "self_Wq": "self_attn.q_proj.weight",
    "self_Wk": "self_attn.k_proj.weight",
    "self_Wv": "self_attn.v_proj.weight",
    "self_Wo": "self_attn.out_proj.weight",
    "self_bq": "self_attn.q_proj.bias",
    "self_bk": "self_attn.k_proj.bias",
    "self_bv": "self_attn.v_proj.bias",
    "self_bo": "self_attn.out_proj.bias",
    "self_Wo_ln_scale": "self_attn_layer_norm.weight",
    "self_Wo_ln_bias": "self_attn_layer_norm.bias",
    "rnn_W": "self_attn.input.weight",
    "rnn_Wf": "self_attn.forget.weight",
    "rnn_bf": "self_attn.forget.bias",
    "rnn_ffn_ln_scale": "self_attn_layer_norm.weight",
    "rnn_ffn_ln_bias": "self_attn_layer_norm.bias",
    "ffn_W1": "fc1.weight",
    "ffn_b1": "fc1.bias",
    "ffn_W2": "fc2.weight",
    "ffn_b2": "fc2.bias",
    "ffn_ffn_ln_scale": "final_layer_norm.weight",
    "ffn_ffn_ln_bias": "final_layer_norm.bias",
}
_PARTS |= {
    name.replace("self_", "context_"): to.replace("self_attn", "encoder_attn")
    for name, to in _PARTS.items()
    if name.startswith("self_")
}
#: What this architecture is, among all that Marian can be told to make.
_EXPECTED = {
    "type": "transformer",
    "transformer-decoder-autoreg": "rnn",
    "dec-cell": "ssru",
    "transformer-preprocess": '""',
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-ffn-activation": "relu",
    "transformer-ffn-depth": "2",
    "transformer-train-position-embeddings": "false",
    "tied-embeddings-all": "true",
}


def read_items(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's weights as float32 by Marian's names, and its settings of one line each.

    Raises ConfigurationError for what is no such file, or holds weights of another type.
    """
    data = path.read_bytes()
    try:
        return _items(data)
    except (struct.error, UnicodeDecodeError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"Marian's binary models begin with a version and a table of items; got {path}, which "
            f"ends or differs in it ({error}); give the *.bin file of a model"
        ) from error


def _items(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    version, count = struct.unpack_from("<QQ", data)
    if version != 1 or count > len(data) // 32:
        raise ValueError(f"version {version}, {count} items")
    headers = [struct.unpack_from("<QQQQ", data, 16 + 32 * n) for n in range(count)]
    at, names, shapes = 16 + 32 * count, [], []
    for length, *_ in headers:
        names.append(data[at : at + length - 1].decode())
        at += length
    for _, _, dims, _ in headers:
        shapes.append(struct.unpack_from(f"<{dims}i", data, at))
        at += 4 * dims
    at += 8 + struct.unpack_from("<Q", data, at)[0]
    weights, settings = dict[str, Tensor](), dict[str, str]()
    for (_, kind, _, size), name, shape in zip(headers, names, shapes, strict=True):
        stored, at = data[at : at + size], at + size
        if name == _SETTINGS:
            text = stored.rstrip(b"\0").decode()
            settings = dict(re.findall(r"^([\w-]+): *(\S+)$", text, re.MULTILINE))
        elif not name.endswith("_QuantMultA"):  # how activations are cut, of whoever does so
            weights[name] = _tensor(stored, kind, shape, name)
    return weights, settings


def _tensor(stored: bytes, kind: int, shape: tuple[int, ...], name: str) -> Tensor:
    """One item's numbers; a matrix of integers lies transposed, its scale behind it."""
    numbers = torch.Size(shape).numel()
    if kind == _FLOAT32:
        return torch.frombuffer(bytearray(stored), dtype=torch.float32)[:numbers].reshape(shape)
    if kind != _INT8:
        raise ValueError(f"{name} has numbers of type {kind:#x}, not float32 or intgemm8")
    (scale,) = struct.unpack_from("<f", stored, numbers)
    whole = torch.frombuffer(bytearray(stored[:numbers]), dtype=torch.int8).float() / scale
    # embeddings are a matrix that is read by row, and multiplied with as it lies
    matrix: Tensor = whole.view(shape) if name == "Wemb" else whole.view(shape[::-1]).T
    return matrix


def model_of(path: Path) -> "MarianSsruModel":
    """The model of a Marian binary file, in float32.

    Raises ConfigurationError for another architecture than a Transformer with an SSRU decoder, and
    for weights that are missing, too many or of other sizes than its settings say.
    """
    weights, settings = read_items(path)
    for name, wanted in _EXPECTED.items():
        if settings.get(name) != wanted:
            raise ConfigurationError(
                f"a translator with an SSRU decoder has {name}: {wanted}; got {path} with "
                f"{settings.get(name)}; other models of Marian come as transformers' folders"
            )
    try:
        return _filled(weights, settings)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"a translator's weights are those that its settings name; got {path}, in which "
            f"{first_line(error)} is missing or differs; download it again"
        ) from error


def _filled(weights: dict[str, Tensor], settings: dict[str, str]) -> "MarianSsruModel":
    from outrider.models.seq2seq.marian_ssru import MarianSsruConfig, MarianSsruModel

    embedded, wide = weights["Wemb"], int(settings["dim-emb"])
    pad = len(embedded)  # a text begins with an embedding of zeros, which no token has
    config = MarianSsruConfig(
        vocab_size=pad + 1,
        decoder_vocab_size=pad + 1,
        d_model=wide,
        encoder_layers=int(settings["enc-depth"]),
        decoder_layers=int(settings["dec-depth"]),
        encoder_attention_heads=int(settings["transformer-heads"]),
        decoder_attention_heads=int(settings["transformer-heads"]),
        encoder_ffn_dim=int(settings["transformer-dim-ffn"]),
        decoder_ffn_dim=int(settings["transformer-dim-ffn"]),
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=1024,
        pad_token_id=pad,
        eos_token_id=_END,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
    )
    model: MarianSsruModel = MarianSsruModel(config).eval()
    made = {"model.shared.weight": torch.cat([embedded, embedded.new_zeros(1, wide)])}
    bias = torch.cat([weights["decoder_ff_logit_out_b"], embedded.new_zeros(1, 1)], 1)
    bias[0, [_UNKNOWN, pad]] += _NEVER
    made["final_logits_bias"] = bias
    for name, tensor in weights.items():
        if (to := _renamed(name)) is not None:
            matrix = to.endswith("weight") and "norm" not in to
            made[to] = tensor.T.contiguous() if matrix else tensor.flatten()
    missing, unknown = model.load_state_dict(made, strict=False)
    left = [name for name in missing if "embed" not in name and name != "lm_head.weight"]
    if left or unknown:
        raise ValueError(", ".join([*left, *unknown]))
    model.tie_weights()
    return model


def _renamed(name: str) -> str | None:
    """A layer's weight as transformers calls it; None for what is no layer's."""
    found = re.fullmatch(r"(encoder|decoder)_l(\d+)_(\w+)", name)
    if found is None or found[3] not in _PARTS:
        return None
    return f"model.{found[1]}.layers.{int(found[2]) - 1}.{_PARTS[found[3]]}"


def convert(folder: Path, into: Path) -> None:
    """Write the model of a folder, and its tokenizer, as transformers reads them."""
    from transformers import PreTrainedTokenizerFast

    found = sorted(folder.glob("model*.bin"))
    tokens = folder / "tokenizer.json"
    if len(found) != 1 or not tokens.is_file():
        raise ConfigurationError(
            "a folder of Marian's has one model*.bin and a tokenizer.json of its vocabulary; got "
            f"{folder} with {len(found)} of the first, and {tokens.is_file():d} of the second; "
            "give a folder with both"
        )
    model = model_of(found[0])
    into.mkdir(parents=True, exist_ok=True)
    whole = json.loads(tokens.read_text("utf-8"))
    whole["post_processor"] = _ENDED
    kept = into / "tokenizer.json"
    kept.write_text(json.dumps(whole, ensure_ascii=False), "utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(kept), eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def main() -> None:
    """The command of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("into", type=Path)
    asked = parser.parse_args()
    convert(asked.folder, asked.into)


if __name__ == "__main__":
    main()
