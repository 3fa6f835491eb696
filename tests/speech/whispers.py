"""A tiny random Whisper with a tokenizer of bytes: windows of two seconds, in milliseconds."""

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import outrider

SECONDS = 2
STATES = 50 * SECONDS
LANGUAGES = ("en", "fr", "de")
NAMES = ["<|endoftext|>", "<|startoftranscript|>"]
MULTILINGUAL = [f"<|{code}|>" for code in LANGUAGES] + ["<|translate|>", "<|transcribe|>"]
LAST = ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]


def specials(english, timed=True):
    """Special tokens in Whisper's order, timestamps behind them."""
    stamps = [f"<|{0.02 * step:.2f}|>" for step in range(STATES + 1)]
    return NAMES + ([] if english else MULTILINGUAL) + LAST + (stamps if timed else [])


def tokenizer(english=False, timed=True):
    """Every byte is a token, in front of the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(specials(english, timed))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=NAMES[0], pad_token=NAMES[0])


def whisper(seed=0, english=False, layers=2, width=32, mels=80):
    """Random weights, large enough that texts are no constants."""
    words = tokenizer(english)
    ids = words.get_vocab()
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=len(words),
        num_mel_bins=mels,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        d_model=width,
        max_source_positions=STATES,
        max_target_positions=96,
        pad_token_id=ids[NAMES[0]],
        bos_token_id=ids[NAMES[0]],
        eos_token_id=ids[NAMES[0]],
        decoder_start_token_id=ids[NAMES[1]],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
        for layer in model.get_decoder().layers:  # it listens to more than to itself
            layer.encoder_attn.q_proj.weight.mul_(2.0)
            layer.encoder_attn.k_proj.weight.mul_(2.0)
            layer.encoder_attn.v_proj.weight.mul_(3.0)
            layer.encoder_attn.out_proj.weight.mul_(3.0)
    blank = [at for at in range(256) if not words.decode([at]).strip()]
    model.generation_config = GenerationConfig(**settings(ids, english, blank))
    return model


def settings(ids, english=False, blank=()):
    """What a checkpoint's generation configuration says; nothing that is heard is blank."""
    said = {
        "decoder_start_token_id": ids[NAMES[1]],
        "eos_token_id": ids[NAMES[0]],
        "pad_token_id": ids[NAMES[0]],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "is_multilingual": not english,
        "max_initial_timestamp_index": 10,
        "suppress_tokens": [
            *(ids[name] for name in specials(english)[1:] if ids[name] < ids[LAST[-1]]),
            5,
            *blank,
        ],
        "begin_suppress_tokens": [220, ids[NAMES[0]]],
        "alignment_heads": [[0, 1], [1, 0]],
        "return_timestamps": False,
        "max_length": 96,
    }
    if not english:
        said["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        said["task_to_id"] = {name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")}
    return said


def extractor(mels=80):
    return WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)


def sound(seconds, seed=0):
    """Noise whose loudness and colour change: something to listen to."""
    random = np.random.default_rng(seed)
    count = int(seconds * 16000)
    slow = np.repeat(random.uniform(0.05, 1, count // 1600 + 1), 1600)[:count]
    at = np.arange(count) / 16000
    pitch = np.repeat(random.uniform(80, 900, count // 3200 + 1), 3200)[:count]
    return (0.2 * slow * np.sin(2 * np.pi * pitch * at) + 0.02 * random.normal(size=count)).astype(
        np.float32
    )


def loaded(**changes):
    """A speculator of a tiny Whisper in float32, nothing measured."""
    english, timed = changes.pop("english", False), changes.pop("timed", True)
    model = whisper(english=english)
    return outrider.load(
        model,
        tokenizer=tokenizer(english, timed),
        threads=1,
        pack_weights=False,
        **{"dtype": "float32", "drafter": "none"} | changes,
    )
