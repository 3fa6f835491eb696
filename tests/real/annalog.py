"""ANNalog (MIT), a pretrained encoder-decoder from molecules to similar ones, as a MarianMTModel.

Its wheel holds a checkpoint of a plain post-norm transformer with learned positions, which Marian's
position tables hold as well, and a pickled vocabulary, of which only the strings are read.
"""

import io
import pickletools
import re
import zipfile

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

START, END, PAD = 2, 3, 1
PIECES = re.compile(r"\[[^\]]*\]|%\d{2}|Br|Cl|.")
SIDES = {"encoder": {"self_attention": "self_attn"}}
SIDES["decoder"] = SIDES["encoder"] | {"encoder_attention": "encoder_attn"}
NORMS = {"self_attn": "self_attn_layer_norm", "encoder_attn": "enc_attn_layer_norm"}
PARTS = {"fc_q": "q_proj", "fc_k": "k_proj", "fc_v": "v_proj", "fc_o": "out_proj"}


def opened(folder):
    """The model, and the id of each piece of a molecule's text."""
    wheel = zipfile.ZipFile(next(folder.glob("annalog-*.whl")))
    names = []
    for _code, value, _ in pickletools.genops(
        wheel.read("annalog/ckpt_and_vocab/stereo_experiment_vocab_ttf.pkl")
    ):
        if value == "stoi":
            break
        if isinstance(value, str):
            names.append(value)
    ids = {name: i for i, name in enumerate(names[names.index("itos") + 1 :])}
    raw = io.BytesIO(wheel.read("annalog/ckpt_and_vocab/Lev_extended.pt"))
    weights = torch.load(raw, map_location="cpu", weights_only=True)
    return made(weights.get("model_state_dict", weights.get("state_dict", weights))), ids


def made(weights):
    """Marian with these weights."""
    known, wide = weights["encoder.tok_embedding.weight"].shape
    layers = {
        side: 1 + max(int(name.split(".")[2]) for name in weights if name.startswith(f"{side}.l"))
        for side in SIDES
    }
    inner = len(weights["encoder.layers.0.positionwise_feedforward.fc_1.weight"])
    places = len(weights["encoder.pos_embedding.weight"])
    config = MarianConfig(
        vocab_size=known,
        decoder_vocab_size=len(weights["decoder.tok_embedding.weight"]),
        d_model=wide,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        max_position_embeddings=places,
        activation_function="relu",
        scale_embedding=True,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    state = {
        "lm_head.weight": weights["decoder.fc_out.weight"],
        "final_logits_bias": weights["decoder.fc_out.bias"][None],
    }
    for side, attentions in SIDES.items():
        state[f"model.{side}.embed_tokens.weight"] = weights[f"{side}.tok_embedding.weight"]
        state[f"model.{side}.embed_positions.weight"] = weights[f"{side}.pos_embedding.weight"]
        for layer in range(layers[side]):
            ours, theirs = f"model.{side}.layers.{layer}", f"{side}.layers.{layer}"
            moved = {f"{theirs}.ff_layer_norm": f"{ours}.final_layer_norm"}
            for old, new in attentions.items():
                moved |= {f"{theirs}.{old}.{a}": f"{ours}.{new}.{b}" for a, b in PARTS.items()}
                moved[f"{theirs}.{NORMS[new]}"] = f"{ours}.{new}_layer_norm"
            for n in (1, 2):
                moved[f"{theirs}.positionwise_feedforward.fc_{n}"] = f"{ours}.fc{n}"
            for old, new in moved.items():
                for kind in ("weight", "bias"):
                    state[f"{new}.{kind}"] = weights[f"{old}.{kind}"]
    missing, strange = model.load_state_dict(state, strict=False)
    assert (missing, strange) == ([], []), (missing, strange)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START
    )
    return model
