"""Pictures of printed lines, and encoder-decoders of transformers that learn to read them.

Lines are those of receipts, drawn by Pillow in fonts of one width that come with matplotlib, at
one margin, on uneven heights and with noise. The reader is a ViT with a TrOCR decoder, character by
character. It is trained with a second loss, CTC on the ViT's states (Watanabe et al. 2017), without
which it learns to write lines long before it looks at the picture. Its draft is a smaller decoder
on the same ViT's states. Both are trained on one core in seven minutes and kept as folders of
transformers in the cache; nothing is fetched.
"""

import random
import shutil
import string
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy, ctc_loss
from transformers import (
    PreTrainedTokenizerFast,
    TrOCRConfig,
    TrOCRForCausalLM,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
)

from outrider.models.calibrate import cache_dir

HIGH, WIDE, STRIPE = 20, 192, 4  #: pixels of a picture, and of one patch's width
LONGEST = 32  #: characters of a line
PAD, BOS, EOS = 0, 1, 2
CHARACTERS = string.ascii_letters + string.digits + " .,:;-/#%&"
VOCAB = 3 + len(CHARACTERS)
FONTS = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique")
ITEMS = (
    "apples bread butter candles cheese chicken coffee cookies cucumber eggs flour garlic honey "
    "juice lemons lettuce milk mushrooms noodles olives onions oranges pasta pepper potatoes rice "
    "salad salmon salt sausages soap spinach sugar tea tomatoes vinegar water yoghurt"
).split()
KINDS = "organic fresh frozen dried large small whole sliced".split()
STREETS = "Station Church Mill Garden Bridge Market School Park".split()
CITIES = "Ashford Bridgeport Camden Dunmore Easton Fairview Granton Hillside".split()


def line(chance: random.Random) -> str:
    """A line of a receipt or a letter: some of it can be guessed, its numbers cannot."""
    price = f"{chance.randrange(100)}.{chance.randrange(100):02d}"
    item = chance.choice(ITEMS)
    day = f"{chance.randint(1, 28)}.{chance.randint(1, 12)}.{chance.randint(2015, 2029)}"
    return chance.choice(
        (
            f"{chance.randint(1, 9)} {chance.choice(KINDS)} {item}",
            f"{item} {price} EUR",
            f"Invoice #{chance.randrange(10**6):06d}",
            f"Purchase: {day}",
            f"Total amount: {price}",
            f"{chance.randint(1, 99)} {chance.choice(STREETS)} St, {chance.choice(CITIES)}",
            f"{chance.randint(1, 50)}% off {item}",
            f"Best before {day}",
        )
    )


@lru_cache(maxsize=64)
def _font(name: str, size: int) -> Any:
    place = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(place / f"{name}.ttf"), size)


def picture(text: str, chance: random.Random) -> Image.Image:
    """A line as it is printed: a font, a height, a grey and noise of its own."""
    name, size = chance.choice(FONTS), 13
    while _font(name, size).getlength(text) > WIDE - 8:
        size -= 1
    paper = Image.new("L", (WIDE, HIGH), chance.randint(215, 255))
    place = 2, chance.randint(0, 3)
    ImageDraw.Draw(paper).text(place, text, chance.randint(0, 70), _font(name, size))
    noise = np.random.default_rng(chance.randrange(2**32)).normal(0, 8, (HIGH, WIDE))
    grey = np.clip(np.asarray(paper, float) + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def pictures(count: int, seed: int) -> tuple[list[str], list[Image.Image]]:
    """Lines, and a picture of each."""
    chance = random.Random(seed)
    texts = [line(chance) for _ in range(count)]
    return texts, [picture(text, chance) for text in texts]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    known = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    known |= {character: 3 + at for at, character in enumerate(CHARACTERS)}
    inner = Tokenizer(models.WordLevel(known, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def reader() -> ViTImageProcessor:
    """What makes pixels of a picture."""
    return ViTImageProcessor(size={"height": HIGH, "width": WIDE})


def labels(texts: list[str]) -> torch.Tensor:
    """Token ids [B, L], begun, ended and padded."""
    rows = [[BOS, *(3 + CHARACTERS.index(one) for one in text), EOS] for text in texts]
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


@dataclass(frozen=True)
class ReaderSize:
    """How large the reader and its draft are, and how long they are trained."""

    width: int = 128
    encoder_layers: int = 2
    decoder_layers: int = 3
    draft_width: int = 64
    steps: int = 2000
    draft_steps: int = 800
    batch: int = 32


def _decoder(width: int, layers: int, states: int) -> TrOCRConfig:
    return TrOCRConfig(
        vocab_size=VOCAB,
        d_model=width,
        decoder_layers=layers,
        decoder_attention_heads=4,
        decoder_ffn_dim=3 * width,
        max_position_embeddings=2 * LONGEST,
        cross_attention_hidden_size=states,
        dropout=0.0,
        is_decoder=True,
        add_cross_attention=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )


def _untrained(size: ReaderSize) -> VisionEncoderDecoderModel:
    eyes = ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.encoder_layers,
        num_attention_heads=4,
        intermediate_size=3 * size.width,
        image_size=(HIGH, WIDE),
        patch_size=(HIGH, STRIPE),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    decoder = _decoder(size.width, size.decoder_layers, size.width)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        eyes, decoder, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=BOS
    )
    model = VisionEncoderDecoderModel(config)
    with torch.no_grad():  # places that are told apart from the first step on
        table = model.encoder.embeddings.position_embeddings
        place = torch.arange(table.shape[1])[:, None]
        turn = place / 100 ** (torch.arange(0, size.width, 2) / size.width)
        table.copy_(0.3 * torch.cat([turn.sin(), turn.cos()], 1)[None])
    for settings in (model.generation_config, model.decoder.generation_config):
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = PAD, BOS, EOS
        settings.decoder_start_token_id, settings.max_length = BOS, LONGEST + 2
    return model


def _train(model: Any, loss: Any, steps: int, batch: int, seed: int, name: str) -> None:
    """Fit a model to new lines at every step."""
    chance, prepare = random.Random(seed), reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    model.train()
    for step in range(1, steps + 1):
        texts = [line(chance) for _ in range(batch)]
        images = [picture(text, chance) for text in texts]
        pixels = prepare(images=images, return_tensors="pt")["pixel_values"]
        found = loss(pixels, labels(texts))
        optimizer.zero_grad()
        sum(found).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            told = ", ".join(f"{one.item():.3f}" for one in found)
            print(f"{name}: step {step}/{steps}, {told} nats a character", flush=True)
    model.eval()


def _written(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Nats a character of what a decoder says of lines."""
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


class _Seen(torch.nn.Module):
    """A reader while it is trained: what its decoder writes, and what its ViT sees by itself."""

    def __init__(self, model: VisionEncoderDecoderModel) -> None:
        super().__init__()
        self.model = model
        self.characters = torch.nn.Linear(model.config.encoder.hidden_size, VOCAB)

    def loss(self, pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(pixel_values=pixels, decoder_input_ids=ids[:, :-1])
        said = self.characters(found.encoder_last_hidden_state[:, 1:]).log_softmax(-1)
        lengths = (ids > EOS).sum(1)
        seen = ctc_loss(
            said.transpose(0, 1),
            ids[:, 1:],
            torch.full_like(lengths, said.shape[1]),
            lengths,
            blank=PAD,
            zero_infinity=True,
        )
        return _written(found.logits, ids), seen


def trained(size: ReaderSize, place: Path | None = None) -> tuple[Path, Path]:
    """Folders of the reader and of its draft: from the cache, or trained now and kept there."""
    name = "-".join(str(value) for value in vars(size).values())
    place = (place or cache_dir() / "text-lines") / name
    target, draft = place / "reader", place / "draft"
    if draft.is_dir():
        return target, draft
    torch.manual_seed(0)
    model = _untrained(size)
    both = _Seen(model)
    _train(both, both.loss, size.steps, size.batch, 1, "reader")
    _keep(model, target)
    small = TrOCRForCausalLM(_decoder(size.draft_width, 1, size.width))

    def drafted(pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.no_grad():
            states = model.encoder(pixel_values=pixels).last_hidden_state
        return (_written(small(input_ids=ids[:, :-1], encoder_hidden_states=states).logits, ids),)

    _train(small, drafted, size.draft_steps, size.batch, 2, "draft")
    _keep(small, draft)
    return target, draft


def _keep(model: Any, place: Path) -> None:
    """A folder as on the hub, whole or not there."""
    half = place.with_name(f"{place.name}-unfinished")
    shutil.rmtree(half, ignore_errors=True)
    model.save_pretrained(half)
    tokenizer().save_pretrained(half)
    reader().save_pretrained(half)
    half.replace(place)
