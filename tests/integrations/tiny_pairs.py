"""Tiny random encoder-decoders of text, a draft for each, and sources of three lengths."""

import copy
from functools import lru_cache

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB, PAD, START, EOS = 48, 0, 2, 1
LENGTHS = (9, 5, 7)


def _bart_like(kind, made, **changes):
    return made(
        kind(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            init_std=0.3,
            pad_token_id=PAD,
            bos_token_id=START,
            eos_token_id=EOS,
            decoder_start_token_id=START,
            tie_word_embeddings=False,
            **changes,
        )
    )


def _t5():
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            initializer_factor=1.0,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=PAD,
            tie_word_embeddings=False,
        )
    )


FAMILIES = {
    "t5": _t5,
    "bart": lambda: _bart_like(BartConfig, BartForConditionalGeneration, forced_eos_token_id=EOS),
    "marian": lambda: _bart_like(MarianConfig, MarianMTModel),
}


@lru_cache
def pair(family):
    """A target and a draft that agrees often: the same weights, perturbed."""
    torch.manual_seed(3)
    target = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():  # averages are not all that counts
            if "attn.out_proj" in name:
                parameter *= 0.2
        head = torch.randn(VOCAB, 32)  # apart from the input's: no token is its own successor
        target.get_output_embeddings().weight = torch.nn.Parameter(head)
        scale = 3 / target(**batch(), decoder_input_ids=torch.ones(3, 6).long()).logits.std()
        head *= scale
    return target, perturbed(target, 0.05)


def perturbed(model, noise, seed=5):
    """Nearly the same model."""
    other = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                spread = noise * parameter.std()
                parameter += spread * torch.randn(parameter.shape, generator=random)
    return other


def batch(lengths=LENGTHS, seed=1):
    """Padded sources of these lengths and their mask, as a tokenizer gives them."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=random)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
