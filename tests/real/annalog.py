"""ANNalog, a pretrained translator of molecules, as a Marian model of transformers.

The wheel `annalog` 1.0.6 (MIT) holds an encoder-decoder of 4 million parameters that reads a
molecule as SMILES and writes similar ones. Marian has its layers: normed after each sum, embeddings
times the root of their width; its table of positions, learned here, takes the place of sinusoids.
"""

import io
import pickletools
import re
import zipfile
from pathlib import Path

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

PAD, START, END = 1, 2, 3
PIECES = re.compile(r"\[[^\]]*\]|%\d{2}|Br|Cl|.")
_FOLDER = "annalog/ckpt_and_vocab"
#: what a part of a layer is called there -> in Marian
_ATTENTION = {"fc_q": "q_proj", "fc_k": "k_proj", "fc_v": "v_proj", "fc_o": "out_proj"}
_NORMS = {
    "self_attn_layer_norm": "self_attn_layer_norm",
    "enc_attn_layer_norm": "encoder_attn_layer_norm",
    "ff_layer_norm": "final_layer_norm",
}


def wheel(models_directory):
    """The wheel among the reader's models, or None."""
    return next(iter(sorted(Path(models_directory).glob("annalog/annalog-*.whl"))), None)


def vocabulary(path):
    """The tokens in order: the strings of a pickle, of which nothing is executed."""
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(f"{_FOLDER}/stereo_experiment_vocab_ttf.pkl")
    strings = [value for _, value, _ in pickletools.genops(pickled) if isinstance(value, str)]
    ends = strings.index("stoi") if "stoi" in strings else len(strings)
    return strings[strings.index("itos") + 1 : ends]


def source(tokens, smiles):
    """Token ids of a molecule."""
    ids = {token: number for number, token in enumerate(tokens)}
    return [START, *(ids[piece] for piece in PIECES.findall(smiles)), END]


def model(path):
    """The weights in a MarianMTModel. It cannot be saved: Marian makes its positions anew."""
    with zipfile.ZipFile(path) as archive:
        stored = io.BytesIO(archive.read(f"{_FOLDER}/Lev_extended.pt"))
    weights = torch.load(stored, map_location="cpu", weights_only=True)
    weights = weights.get("model_state_dict", weights)
    renamed = {}
    for name, tensor in weights.items():
        if (known := _renamed(name)) is not None:
            renamed[known] = tensor
    renamed["final_logits_bias"] = weights["decoder.fc_out.bias"][None]
    size, width = weights["encoder.tok_embedding.weight"].shape
    wide = len(weights["encoder.layers.0.positionwise_feedforward.fc_1.bias"])
    most = len(weights["encoder.pos_embedding.weight"])
    both = {"attention_heads": 8, "ffn_dim": wide}
    sides = {
        f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in both.items()
    }
    for side in ("encoder", "decoder"):
        numbers = [int(n.split(".")[2]) for n in weights if n.startswith(f"{side}.layers.")]
        sides[f"{side}_layers"] = max(numbers) + 1
    config = MarianConfig(
        vocab_size=size,
        decoder_vocab_size=len(weights["decoder.tok_embedding.weight"]),
        d_model=width,
        max_position_embeddings=most,
        activation_function="relu",
        scale_embedding=True,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        **sides,
    )
    made = MarianMTModel(config).eval()
    missing, unknown = made.load_state_dict(renamed, strict=False)
    assert not unknown, unknown
    assert all("shared" in name for name in missing), missing
    made.generation_config = GenerationConfig(
        max_length=most, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=START
    )
    return made


def _renamed(name):
    """The name of a weight in Marian, or None for what it makes of other parts."""
    side, *rest = name.split(".")
    tops = {"tok_embedding": "embed_tokens", "pos_embedding": "embed_positions"}
    if rest[0] in tops:
        return f"model.{side}.{tops[rest[0]]}.{rest[1]}"
    if rest[0] == "fc_out":
        return "lm_head.weight" if rest[1] == "weight" else None
    if rest[0] != "layers":
        return None
    start, part, last = f"model.{side}.layers.{rest[1]}", rest[2], rest[-1]
    if part in _NORMS:
        return f"{start}.{_NORMS[part]}.{last}"
    if part == "positionwise_feedforward":
        return f"{start}.{rest[3].replace('_', '')}.{last}"
    own = {"self_attention": "self_attn", "encoder_attention": "encoder_attn"}[part]
    return f"{start}.{own}.{_ATTENTION[rest[3]]}.{last}" if rest[3] in _ATTENTION else None
