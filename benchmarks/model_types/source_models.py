"""Tiny encoder-decoders of images or sound, their sources, and what transformers writes of each."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests" / "models"))

import seq2seq_families

from outrider.models import adapt
from outrider.models.config import decoder_of, encoder_of
from outrider.models.seq2seq.input_modality import there
from outrider.models.seq2seq.reader import EncoderReader
from outrider.types import Inputs

#: Types that read an image as a source -> their tiny families.
IMAGE_FAMILIES = {
    "blip": "BLIP",
    "florence2": "Florence-2",
    "pix2struct": "Pix2Struct",
    "pp_formulanet": "PP-FormulaNet",
    "t5gemma2": "T5Gemma 2",
    "vision-encoder-decoder": "ViT to GPT-2",
}


#: Types that hear a moment with each token: a recording has to be as long as its text.
TIMED = ("kyutai_speech_to_text", "voxtral_realtime")


def recordings(kind):
    """Three of unequal lengths, of 20 moments at least."""
    lengths = [kind.step * moments for moments in (20, 23, 21)]
    shape = (3, max(lengths)) if kind.channels is None else (3, max(lengths), kind.channels)
    sound = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return Inputs(None, sound, there(lengths))


def tiny(family):
    """A tiny random model, whose vocabulary is that of all tiny models here."""
    config = seq2seq_families.FAMILIES[family]()
    for part in (config, decoder_of(config), encoder_of(config)):
        if hasattr(part, "vocab_size"):
            part.vocab_size = 128
    return seq2seq_families.build(config)


def called(model, reader, start, source):
    """What transformers generates with, and the arguments: BLIP's `generate` asks its decoder."""
    ids = torch.tensor([start])
    if model.config.model_type in TIMED:
        ((name, sound),) = reader.kind.asked(source, torch.float32).items()
        sound = sound[:, None] if sound.dim() == 2 else sound.transpose(1, 2)
        return model, {"input_ids": ids, name: sound}
    if model.config.model_type != "blip":
        return model, {"decoder_input_ids": ids, **reader.asked(source)}
    states, seen = reader.states(source), torch.ones_like(ids)
    given = {"input_ids": ids, "attention_mask": seen, "encoder_hidden_states": states}
    return model.text_decoder, given


def read_as_sources(family, generated, own_reader=False):
    """A model, the beginnings of its texts, unequal sources, and the texts by `generated`."""
    model = tiny(family)
    target = adapt(model)
    rows = target.probe(3)._replace(encoded=None)
    if model.config.model_type in TIMED:
        rows = recordings(target.runner.reader.kind)
    each = [rows.take([row]) for row in range(3)]
    settings = model.generation_config
    settings.forced_eos_token_id = None
    first = settings.decoder_start_token_id
    first = decoder_of(model.config).bos_token_id if first is None else first
    starts = [[first], [first, 9, 8], [first, 7]]
    reader = EncoderReader(model, None, 0) if own_reader else target.runner.reader
    texts = []
    for start, source in zip(starts, each, strict=True):
        asked, given = called(model, reader, start, source)
        texts.append(generated(asked, **given))
    return model, starts, each, texts
