"""Tiny configurations of every supported encoder-decoder, and of decoders on another's states."""

import copy

import torch
import transformers
from seq2seq_sizes import (
    AUDIO,
    BART,
    BERT,
    CONVOLVED,
    CROSSING,
    GEMMA,
    GEMMA_LAYERS,
    GPT2,
    HEARING,
    IDS,
    MIMI,
    PARAKEET,
    SEAMLESS,
    SMALL,
    T5,
    TROCR,
    VIT,
    VOCAB,
)
from transformers import AutoConfig

from outrider.models.auto_classes import auto_class
from outrider.models.seq2seq import marian_ssru as marian_ssru  # registers itself


def own(kind, **sizes):
    return AutoConfig.for_model(kind, **sizes)


def composite(encoder, decoder, kind="encoder-decoder"):
    """An encoder and a decoder of two models."""
    given = {"encoder": {**encoder}, "decoder": {**decoder, **CROSSING}}  # which 5.17 empties
    return own(kind, **given, decoder_start_token_id=5, pad_token_id=0)


def vision(decoder):
    return composite(VIT, decoder, "vision-encoder-decoder")


#: name -> configuration
FAMILIES = {
    "T5": lambda: own("t5", **T5),
    "T5 (gated, untied)": lambda: own(
        "t5", **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mT5": lambda: own("mt5", **T5),
    "UMT5": lambda: own("umt5", **T5),
    "LongT5": lambda: own("longt5", **T5, local_radius=4),
    "T5Gemma": lambda: own(
        "t5gemma",
        encoder=dict(GEMMA),
        decoder={**GEMMA, "cross_attention_hidden_size": 32},
        vocab_size=VOCAB,
    ),
    "BART": lambda: own("bart", **BART),
    "mBART": lambda: own("mbart", **BART),
    "Blenderbot": lambda: own("blenderbot", **BART),
    "Blenderbot-small": lambda: own("blenderbot-small", **BART),
    "Marian": lambda: own("marian", **BART),
    "Marian, SSRU": lambda: own("marian-ssru", **BART),
    "Pegasus": lambda: own("pegasus", **BART),
    "PEGASUS-X": lambda: own("pegasus_x", **BART, num_global_tokens=4, block_size=8),
    "BigBird-Pegasus": lambda: own("bigbird_pegasus", **BART, block_size=2, num_random_blocks=1),
    "PLBart": lambda: own("plbart", **BART),
    "MVP": lambda: own("mvp", **BART),
    "M2M-100, NLLB": lambda: own("m2m_100", **BART),
    "LED": lambda: own(
        "led",
        **{name: value for name, value in BART.items() if name != "max_position_embeddings"},
        max_encoder_position_embeddings=128,
        max_decoder_position_embeddings=128,
        attention_window=4,
    ),
    "Whisper": lambda: own(
        "whisper",
        **AUDIO,
        max_source_positions=6,
        max_target_positions=64,
        num_mel_bins=8,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "Speech2Text": lambda: own(
        "speech_to_text",
        **AUDIO,
        max_source_positions=200,
        max_target_positions=128,
        input_feat_per_channel=8,
        conv_channels=16,
    ),
    "Moonshine": lambda: own(
        "moonshine",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "Moonshine (streaming)": lambda: own(
        "moonshine_streaming",
        **SMALL,
        num_key_value_heads=4,
        encoder_config={
            "hidden_size": 24,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "sliding_windows": [[6, 2]],
            "max_position_embeddings": 128,
        },
        decoder_start_token_id=1,
    ),
    "Canary": lambda: own(
        "canary",
        vocab_size=VOCAB,
        encoder_config=PARAKEET,
        decoder_config={**SMALL, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "Cohere ASR": lambda: own(
        "cohere_asr", **SMALL, encoder_config=PARAKEET, decoder_start_token_id=1
    ),
    "wav2vec 2.0 to BART": lambda: composite(
        HEARING,
        # its cache has as many layers as BART's encoder has
        {"model_type": "bart", **BART, "encoder_layers": 2, "is_encoder_decoder": False},
        "speech-encoder-decoder",
    ),
    "SpeechT5": lambda: own(
        "speecht5",
        **{name: value for name, value in HEARING.items() if name in CONVOLVED},
        **{name: value for name, value in AUDIO.items() if name != "d_model"},
        hidden_size=32,
        max_text_positions=128,
    ),
    "Kyutai STT": lambda: own(
        "kyutai_speech_to_text",
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        sliding_window=8,
        num_codebooks=3,
        codebook_vocab_size=17,
        audio_bos_token_id=16,
        audio_pad_token_id=VOCAB + 3 * 17,
        bos_token_id=1,
        pad_token_id=3,
        codec_config=MIMI,
    ),
    "Voxtral Realtime": lambda: own(
        "voxtral_realtime",
        text_config={
            **GEMMA,
            "sliding_window": 8,
            "bos_token_id": 1,
            "tie_word_embeddings": False,
        },
        audio_config={
            **SMALL,
            "head_dim": 8,
            "num_mel_bins": 8,
            "sliding_window": 8,
        },
        tie_word_embeddings=False,
    ),
    "SeamlessM4T (speech)": lambda: own(
        "seamless_m4t", **SEAMLESS, architectures=["SeamlessM4TForSpeechToText"]
    ),
    "SeamlessM4T (text)": lambda: own("seamless_m4t", **SEAMLESS),
    "SeamlessM4T v2 (speech)": lambda: own(
        "seamless_m4t_v2", **SEAMLESS, architectures=["SeamlessM4Tv2ForSpeechToText"]
    ),
    "SeamlessM4T v2 (text)": lambda: own("seamless_m4t_v2", **SEAMLESS),
    "BERT to BERT": lambda: composite(
        {"model_type": "bert", **BERT}, {"model_type": "bert", **BERT}
    ),
    "BERT to GPT-2": lambda: composite(
        {"model_type": "bert", **BERT, "hidden_size": 24}, {"model_type": "gpt2", **GPT2}
    ),
    "BERT to BART": lambda: composite(
        {"model_type": "bert", **BERT}, {"model_type": "bart", **BART}
    ),
    "BERT to BERT (generation)": lambda: composite(
        {"model_type": "bert-generation", **BERT}, {"model_type": "bert-generation", **BERT}
    ),
    "RoBERTa to RoBERTa": lambda: composite(
        {"model_type": "roberta", **BERT}, {"model_type": "roberta", **BERT}
    ),
    "XLM-R to XLM-R": lambda: composite(
        {"model_type": "xlm-roberta", **BERT}, {"model_type": "xlm-roberta", **BERT}
    ),
    "TrOCR (ViT to TrOCR)": lambda: vision({"model_type": "trocr", **TROCR}),
    "Donut (image to mBART)": lambda: vision(
        {
            "model_type": "mbart",
            **BART,
            "is_encoder_decoder": False,
            "cross_attention_hidden_size": 32,
        }
    ),
    "Pix2Struct": lambda: own(
        "pix2struct",
        is_encoder_decoder=True,
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "is_decoder": True,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        vision_config={
            "hidden_size": 32,
            "patch_embed_hidden_size": 48,
            "d_ff": 48,
            "d_kv": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "seq_len": 64,
        },
    ),
    "PP-FormulaNet": lambda: own(
        "pp_formulanet",
        text_config={
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 128,
        },
        vision_config={
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 24,
            "post_conv_in_channels": 8,
            "post_conv_mid_channels": 12,
            "post_conv_out_channels": 16,
            "decoder_hidden_size": 32,
        },
        is_encoder_decoder=True,
        decoder_start_token_id=2,
    ),
    "Florence-2": lambda: own(
        "florence2",
        text_config={"model_type": "bart", **BART},
        vision_config={
            "embed_dim": [8, 16],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "depths": [1, 1],
            "patch_size": [4, 2],
            "patch_stride": [4, 2],
            "patch_padding": [0, 0],
            "patch_prenorm": [False, True],
            "window_size": 2,
            "projection_dim": 32,
        },
        image_token_id=50,
        is_encoder_decoder=True,
    ),
    "T5Gemma 2": lambda: own(
        "t5gemma2",
        encoder={
            "text_config": {**GEMMA, "layer_types": GEMMA_LAYERS},
            "vision_config": {**VIT, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "eoi_token_index": 51,
        },
        decoder={**GEMMA, "layer_types": GEMMA_LAYERS},
        image_token_index=50,
    ),
    "BLIP": lambda: own(
        "blip",
        text_config={**SMALL, "encoder_hidden_size": 24, **IDS, "sep_token_id": 2},
        vision_config={
            **{name: value for name, value in VIT.items() if name != "model_type"},
            "hidden_size": 24,
        },
    ),
    "ViT to GPT-2": lambda: vision({"model_type": "gpt2", **GPT2}),
}
#: Families that transformers runs with eager attention alone.
EAGER_ONLY = {
    "BLIP",
    "BigBird-Pegasus",
    "LED",
    "LongT5",
    "MVP",
    "PEGASUS-X",
    "Speech2Text",
    "SpeechT5",
    "T5Gemma",
    "TrOCR (ViT to TrOCR)",
}

#: class of a decoder alone -> configuration; its encoder would have three layers
ALONE = {**BART, "encoder_layers": 3, "decoder_layers": 1}
DECODERS = {
    "BartForCausalLM": lambda: own("bart", **ALONE),
    "BigBirdPegasusForCausalLM": lambda: own("bigbird_pegasus", **ALONE),
    "BlenderbotForCausalLM": lambda: own("blenderbot", **ALONE),
    "BlenderbotSmallForCausalLM": lambda: own("blenderbot-small", **ALONE),
    "MarianForCausalLM": lambda: own("marian", **ALONE),
    "MBartForCausalLM": lambda: own("mbart", **ALONE),
    "MvpForCausalLM": lambda: own("mvp", **ALONE),
    "PegasusForCausalLM": lambda: own("pegasus", **ALONE),
    "PLBartForCausalLM": lambda: own("plbart", **ALONE),
    "TrOCRForCausalLM": lambda: own("trocr", **TROCR),
    "WhisperForCausalLM": lambda: own(
        "whisper",
        **{**ALONE, "max_position_embeddings": None},
        max_source_positions=6,
        max_target_positions=64,
        num_mel_bins=8,
    ),
    "GPT2LMHeadModel": lambda: own("gpt2", **GPT2, **CROSSING),
    "BertLMHeadModel": lambda: own("bert", **BERT, **CROSSING),
}


def attentions(name):
    return ("eager",) if name in EAGER_ONLY else ("eager", "sdpa")


def build(config, attention="eager", seed=0, kind=None):
    """A random float32 model with logits far from uniform. The configuration is copied.

    `kind` is the class of a decoder alone.
    """
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    maker = (
        auto_class(config).from_config if kind is None else getattr(transformers, kind)._from_config
    )
    model = maker(config, attn_implementation=attention).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return model.eval()
