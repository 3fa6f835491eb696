"""Prompts with images: files, messages and processors; what cannot be read is refused."""

import struct
import sys
import zlib

import pytest
import seq2seq_families
import torch
import transformers
from image_folder import kept, picture, png, saved, torchvision, url, words
from installed import params

import outrider
from outrider import ConfigurationError, ImageError, PromptError, SamplingParams, Stop
from outrider.costs import Costs
from outrider.text import images
from outrider.text.images import open_image

LOADED = {
    "drafter": "prompt_lookup",
    "dtype": "float32",
    "threads": 1,
    "pack_weights": False,
    "device": "cpu",
    "step_costs": Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
}
GREEDY, SHORT = SamplingParams(0), Stop(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def seeing(folder):
    return outrider.load(str(folder), **LOADED)


def question(image, text="w20 w21"):
    part = {"type": "image", "image": image}
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def test_a_picture_is_one_however_it_is_given(seeing, tmp_path):
    image = picture(1)
    path = tmp_path / "a picture.png"
    path.write_bytes(png(image))
    ways = [image, str(path), path, png(image), url(png(image)), path.as_uri().replace("%20", " ")]
    openai = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url(png(image)), "detail": "low"}},
                {"type": "text", "text": "w20 w21"},
            ],
        }
    ]
    plain = {"prompt": "[user] <image> w20 w21 [assistant]", "multi_modal_data": {"image": image}}
    prompts = [*(question(way) for way in ways), openai, plain]
    texts = [seeing.generate(prompt, GREEDY, SHORT).completions[0].token_ids for prompt in prompts]
    assert len(texts[0]) == 8
    assert texts == [texts[0]] * len(prompts)
    together = seeing.generate([question(image), question(picture(2))], GREEDY, SHORT).completions
    assert together[0].token_ids == texts[0] != together[1].token_ids


def test_the_text_is_that_of_transformers(seeing, folder):
    made = seeing.media.processor.apply_chat_template(
        question(picture(1)),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = seeing.engine.target.runner.model
    with torch.inference_mode():
        found = model.generate(**made, max_new_tokens=8, do_sample=False, pad_token_id=0)
    right = found[0, made["input_ids"].shape[1] :].tolist()
    assert seeing.generate(question(picture(1)), GREEDY, SHORT).completions[0].token_ids == right
    assert seeing.generate(made, GREEDY, SHORT).completions[0].token_ids == right
    mixed = seeing.generate([made, "w20 w21"], GREEDY, SHORT).completions
    alone = seeing.generate("w20 w21", GREEDY, SHORT).completions
    assert [one.token_ids for one in mixed] == [right, alone[0].token_ids]
    beams = seeing.generate(made, stop=SHORT, beams=outrider.Beams(2)).completions
    with torch.inference_mode():
        best = model.generate(**made, max_new_tokens=8, num_beams=2, pad_token_id=0)
    assert beams[0].token_ids == best[0, made["input_ids"].shape[1] :].tolist()


def test_a_processor_is_given_with_a_model_object(seeing):
    model = seeing.engine.target.runner.model
    again = outrider.load(model, tokenizer=seeing.media.processor, **LOADED)
    pictures = [question(picture(1)), question(picture(3))]
    right = seeing.generate(pictures, GREEDY, SHORT).texts
    assert again.generate(pictures, GREEDY, SHORT).texts == right
    without = outrider.load(model, tokenizer=words(), **LOADED)
    with pytest.raises(ConfigurationError, match=r"without one.*tokenizer=processor"):
        without.generate(question(picture(1)))


def refused(error, *parts):
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


def test_what_is_no_picture_is_refused(seeing, tmp_path, monkeypatch):
    whole = png(picture(1))
    for given, said in [
        ("https://example.org/a.png", "remote images are not fetched"),
        (str(tmp_path / "none.png"), "no image that can be read"),
        (b"not a picture", "no picture that can be read"),
        (whole[: len(whole) // 2], "no picture that can be read"),
        (b"", "no picture that can be read"),
        ("data:image/png,abc", "in base64"),
        ("data:image/png;base64,???", "in base64"),
        (7, "a path, bytes, a data URL"),
    ]:
        with refused(ImageError, said):
            open_image(given)
        with refused(ImageError, said):
            seeing.generate(question(given))
    with refused(ImageError, "12 x 9 pixels; at most 100"):
        open_image(whole, most_pixels=100)
    monkeypatch.setattr(images, "MOST_BYTES", 10)
    for given in (whole, url(whole)):
        with refused(ImageError, "at most 10 are read"):
            open_image(given)
    path = tmp_path / "a.png"
    path.write_bytes(whole)
    with refused(ImageError, "at most 10 are read"):
        open_image(path)


def bomb():
    """A PNG of some bytes that says it has 50,000 x 50,000 pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    lines = chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + lines + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_not_opened():
    with refused(ImageError, "50000 x 50000 pixels|no picture"):
        open_image(bomb())


def test_conversations_that_cannot_be_read_are_refused(seeing):
    image = picture(1)
    with refused(PromptError, "at most 64 are read"):
        seeing.generate([{"role": "user", "content": [{"type": "image", "image": image}] * 65}])
    with refused(PromptError, "videos in messages are not read", "'video'"):
        seeing.generate(
            [{"role": "user", "content": [{"type": "video"}, {"type": "image", "image": image}]}]
        )
    with refused(PromptError, "has no image"):
        seeing.generate([{"role": "user", "content": [{"type": "image"}]}])
    data = {"image": [image, image]}
    with refused(PromptError, "prompt 0|places for"):  # more images than placeholders
        seeing.generate({"prompt": "[user] <image> w20", "multi_modal_data": data})
    with refused(PromptError, "image and audio; got video"):
        seeing.generate({"prompt": "<image>", "multi_modal_data": {"video": image}})
    sound = {"audio": torch.zeros(1600)}
    with refused(PromptError, "does not take|left the images or sound"):
        seeing.generate({"prompt": "[user] w20", "multi_modal_data": sound})


def test_a_model_of_text_reads_no_pictures():
    from tiny import llama

    text = outrider.load(llama(0), tokenizer=words(), **LOADED)
    with refused(ConfigurationError, "reads text alone", "images or sound"):
        text.generate(question(picture(1)))


def test_an_encoder_of_images_takes_the_image_itself(tmp_path):
    """A captioner: a ViT's states, read by a GPT-2."""
    from transformers import AutoImageProcessor, ViTImageProcessor

    model = seq2seq_families.build(seq2seq_families.FAMILIES["ViT to GPT-2"]())
    size = model.config.encoder.image_size
    reader = ViTImageProcessor(size={"height": size, "width": size})
    model.save_pretrained(tmp_path)
    kept(reader, tmp_path, AutoImageProcessor)
    captioner = outrider.load(str(tmp_path), **LOADED | {"drafter": "prompt_lookup"})
    first, second = picture(1), picture(2)
    pixels = [reader(images=one, return_tensors="pt")["pixel_values"][0] for one in (first, second)]
    right = [one.token_ids for one in captioner.generate(pixels, GREEDY, SHORT).completions]
    assert right[0] != right[1]
    path = tmp_path / "line.png"
    path.write_bytes(png(first))
    for way in (first, path, str(path), png(first), url(png(first))):
        assert captioner.generate(way, GREEDY, SHORT).completions[0].token_ids == right[0]
    both = captioner.generate([str(path), second], GREEDY, SHORT).completions
    assert [one.token_ids for one in both] == right
    with refused(ImageError, "remote images are not fetched"):
        captioner.generate("https://example.org/a.png", GREEDY, SHORT)


def test_without_pillow_one_sentence_says_so(seeing, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refused(ConfigurationError, "Pillow, which is not installed", r"outrider\[images\]"):
        seeing.generate(question(b"some bytes"))


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of transformers' own PaliGemma
@pytest.mark.parametrize("kind", params(["git", "paligemma"]))
def test_processors_whose_pictures_have_a_form_of_their_own(kind, tmp_path):
    """GIT has no token for a picture, and its text is to go on; a PaliGemma prompt is one block."""
    place = saved(tmp_path / kind, kind)
    loaded = outrider.load(str(place), **LOADED)
    model, processor = loaded.engine.target.runner.model, loaded.media.processor
    text = "w20 w21" if kind == "git" else "<image> w20 w21"
    found = []
    for seed in (1, 2):
        asked = {"prompt": text, "multi_modal_data": {"image": picture(seed)}}
        made = processor(text=[text], images=[picture(seed)], return_tensors="pt")
        made = {name: value for name, value in made.items() if name != "labels"}
        with torch.inference_mode():
            right = model.generate(**made, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        right = right[0, made["input_ids"].shape[1] :].tolist()
        found.append(loaded.generate(asked, GREEDY, SHORT).completions[0].token_ids)
        assert found[-1] == right
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", ["video", "video_url"])
def test_a_video_in_a_message_is_refused_in_words(seeing, kind):
    part = {"type": kind, kind: "clip.mp4"}
    with pytest.raises(PromptError, match="videos in messages are not read"):
        seeing.generate([{"role": "user", "content": [part]}], GREEDY, SHORT)


@pytest.mark.parametrize(
    ("told", "message", "skipped"),
    [
        ("5.19.4", "CLIPImageProcessor requires the Torchvision library", True),
        ("5.20.0", "CLIPImageProcessor requires the Torchvision library", False),
        ("5.19.4", "cannot import name 'CLIPImageProcessor'", False),
    ],
)
def test_tests_are_skipped_where_transformers_wants_torchvision(
    monkeypatch, told, message, skipped
):
    """Before 5.20 alone: since then it is an error."""
    monkeypatch.setattr(transformers, "__version__", told)
    with pytest.raises((pytest.skip.Exception, ImportError)) as raised, torchvision():
        raise ImportError(message)
    assert raised.type is (pytest.skip.Exception if skipped else ImportError)
