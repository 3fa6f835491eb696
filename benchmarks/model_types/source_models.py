"""Tiny encoder-decoders of images or sound, their sources, and what transformers writes of each."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests" / "models"))

import seq2seq_families

from outrider.models import adapt
from outrider.models.config import decoder_of
from outrider.models.seq2seq.reader import EncoderReader

#: Types that read an image as a source -> their tiny families.
IMAGE_FAMILIES = {
    "florence2": "Florence-2",
    "pix2struct": "Pix2Struct",
    "pp_formulanet": "PP-FormulaNet",
    "vision-encoder-decoder": "ViT to GPT-2",
}


def tiny(family):
    """A tiny random model, whose vocabulary is that of all tiny models here."""
    config = seq2seq_families.FAMILIES[family]()
    for part in (config, decoder_of(config)):
        part.vocab_size = 128
    return seq2seq_families.build(config)


def read_as_sources(family, generated, own_reader=False):
    """A model, the beginnings of its texts, unequal sources, and the texts by `generated`."""
    model = tiny(family)
    target = adapt(model)
    rows = target.probe(3)._replace(encoded=None)
    each = [rows.take([row]) for row in range(3)]
    first = model.generation_config.decoder_start_token_id
    starts = [[first], [first, 9, 8], [first, 7]]
    reader = EncoderReader(model, None, 0) if own_reader else target.runner.reader
    texts = [
        generated(model, decoder_input_ids=torch.tensor([start]), **reader.asked(source))
        for start, source in zip(starts, each, strict=True)
    ]
    return model, starts, each, texts
