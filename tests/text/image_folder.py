"""Folders of tiny image-text models with their processors, as on the hub, and pictures."""

import base64
import contextlib
import io

import media_models as tiny_images
import pytest
import torch
import transformers
from packaging import version
from PIL import Image
from tiny_media import FIRST, IMAGE, LAST, VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    "<image> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}[assistant] "
)
SIZE = {"height": 8, "width": 8}


def words(image="<image>", at=IMAGE, **named):
    """A tokenizer of a few words; `image` is the placeholder of the tiny models."""
    known = [f"w{number}" for number in range(max(VOCAB, at + 1))]
    known[0], known[1], known[2], known[3] = "<pad>", "<s>", "</s>", "<unk>"
    known[6:9] = ["[user]", "[assistant]", "[system]"]
    known[at] = image
    places = {"boi_token": FIRST, "eoi_token": LAST}
    for place, (name, word) in enumerate(named.items(), LAST + 1):
        known[places.get(name, place)] = word
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", additional_special_tokens=[image, *named.values()],
        extra_special_tokens={"image_token": image, **named},
    )  # fmt: skip


def processor():
    """LLaVA's, with a chat template."""
    return LlavaProcessor(
        CLIPImageProcessor(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, do_convert_rgb=True
        ),
        words(),
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def gemma3():
    """Whose images are blocks that see each other."""
    tokenizer = words(
        "<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
    )
    return transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size=SIZE),
        tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("<image>", "<start_of_image>"),
    )


def idefics3():
    """Whose images are compressed."""
    around = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    edge = {"longest_edge": 8}
    return transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(
            size=edge, max_image_size=edge, do_image_splitting=False
        ),
        words(**around, end_of_utterance="<end_of_utterance>"),
        image_seq_len=1,
        chat_template=TEMPLATE,
    )


def mllama():
    """Whose layers of cross attention look at images."""
    return transformers.MllamaProcessor(
        transformers.MllamaImageProcessor(size=SIZE, max_image_tiles=2),
        words("<|image|>", VOCAB),
        chat_template=TEMPLATE.replace("<image>", "<|image|>"),
    )


def paligemma():
    """Whose prompts are one block."""
    images = transformers.SiglipImageProcessor(size=SIZE)
    images.image_seq_length = 4
    return transformers.PaliGemmaProcessor(images, words())


def git():
    """Whose images stand ahead of the text."""
    crop = {"size": {"shortest_edge": 8}, "crop_size": SIZE, "do_convert_rgb": True}
    return transformers.GitProcessor(CLIPImageProcessor(**crop), words())


def paddleocr_vl():
    """With positions of several axes."""
    return transformers.PaddleOCRVLProcessor(
        transformers.PaddleOCRVLImageProcessor(
            patch_size=4, merge_size=2, min_pixels=64, max_pixels=256
        ),
        words(),
        chat_template=TEMPLATE,
    )


PROCESSORS = {
    "gemma3": gemma3,
    "git": git,
    "idefics3": idefics3,
    "llava": processor,
    "mllama": mllama,
    "paddleocr_vl": paddleocr_vl,
    "paligemma": paligemma,
}


def saved(place, kind="llava"):
    """The folder of that path, with a model in it."""
    with torchvision():
        processor = PROCESSORS[kind]()
    tiny_images.made(kind).save_pretrained(place)
    kept(processor, place, AutoProcessor)
    return place


def kept(processor, place, opens):
    """Save what reads images into a folder, from which that class of transformers can open it."""
    processor.save_pretrained(place)
    with torchvision():
        opens.from_pretrained(place)


@contextlib.contextmanager
def torchvision():
    """Skips where transformers before 5.20 wants it for a class that 5.20 has without it."""
    try:
        yield
    except ImportError as error:
        mended = version.parse(transformers.__version__) >= version.parse("5.20")
        if mended or "Torchvision" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} wants torchvision: {error}")


def picture(seed, size=(12, 9)):
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=random)
    return Image.fromarray(pixels.numpy())


def png(image):
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()
