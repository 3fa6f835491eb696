"""A tiny random Whisper with all that its `generate` and the pipeline ask for: windows of a second.

Its tokens are bytes, so that any text it makes can be read back.
"""

import copy
from functools import lru_cache

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

BYTES = 256
END, START, ENGLISH, FRENCH, TRANSLATE, TRANSCRIBE = range(BYTES, BYTES + 6)
START_LM, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(BYTES + 6, BYTES + 10)
FIRST_TIME = NO_TIMESTAMPS + 1
POSITIONS = 50  #: states of a window, 20 ms each
VOCAB = FIRST_TIME + POSITIONS + 1
FRAMES = 2 * POSITIONS
MELS = 80
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|fr|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]


def config(**changes):
    """The shape of the model."""
    return WhisperConfig(
        **{
            "vocab_size": VOCAB,
            "num_mel_bins": MELS,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": POSITIONS,
            "max_target_positions": 96,
            "pad_token_id": END,
            "bos_token_id": END,
            "eos_token_id": END,
            "decoder_start_token_id": START,
            "median_filter_width": 3,
            "init_std": 0.3,
        }
        | changes
    )


def settings():
    """The generation configuration, field by field as a checkpoint's."""
    return GenerationConfig(
        max_length=48,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        max_initial_timestamp_index=20,
        is_multilingual=True,
        lang_to_id={"<|en|>": ENGLISH, "<|fr|>": FRENCH},
        task_to_id={"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        suppress_tokens=[7, 8, 9, START, TRANSLATE, TRANSCRIBE, START_LM, PREVIOUS, NO_SPEECH],
        begin_suppress_tokens=[32, END],
        alignment_heads=[[0, 1], [1, 0], [1, 3]],
        return_timestamps=False,
    )


@lru_cache
def whisper(seed=0, attention="sdpa", **changes):
    """A model of its own for each seed and shape."""
    torch.manual_seed(seed)
    shape = config(**changes)
    shape._attn_implementation = attention
    model = WhisperForConditionalGeneration(shape).eval()
    with torch.no_grad():  # ends come now and then, times often enough to cut a window at
        model.proj_out.weight[END] *= 1.5
        model.proj_out.weight[FIRST_TIME:] *= 1.5
    model.generation_config = settings()
    return model


def perturbed(model, noise=0.05, seed=5):
    """Nearly the same model."""
    other = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter += (
                    noise * parameter.std() * torch.randn(parameter.shape, generator=random)
                )
    return other


def features(seconds, seed=0, mels=MELS):
    """Frames [B, mels, F] of sounds of these lengths, padded, and their mask [B, F]."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([int(100 * s) for s in seconds])
    frames = torch.randn(len(seconds), mels, int(lengths.max()), generator=random)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return frames * mask[:, None], mask.long()


def tokenizer():
    """Bytes, what a transcript is marked with, and times."""
    vocab = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    made = WhisperTokenizer(vocab=vocab, merges=[], pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(POSITIONS + 1)])
    return made


def extractor():
    """Windows of one second."""
    return WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
