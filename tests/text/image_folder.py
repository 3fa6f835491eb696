"""A folder of a tiny LLaVA with its processor, as on the hub, and pictures."""

import base64
import io

import media_models as tiny_images
import tiny_media
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    "<image> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}[assistant] "
)


def words():
    """A tokenizer of a few words; `<image>` is the placeholder of the tiny models."""
    known = [f"w{at}" for at in range(tiny_media.VOCAB)]
    known[0], known[1], known[2], known[3] = "<pad>", "<s>", "</s>", "<unk>"
    known[6:9] = ["[user]", "[assistant]", "[system]"]
    known[tiny_images.IMAGE] = "<image>"
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", additional_special_tokens=["<image>"],
    )  # fmt: skip


def processor():
    """A processor with a chat template."""
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


def saved(place):
    """The folder of that path, with a model in it."""
    tiny_images.made("llava").save_pretrained(place)
    processor().save_pretrained(place)
    return place


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
