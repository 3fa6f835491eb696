"""Encoder-decoders that read images, from folders with their own processors."""

import pytest
import torch
import transformers
from image_folder import kept, picture, words
from seq2seq_families import FAMILIES, build

import outrider
from outrider import PromptError, SamplingParams, Stop
from outrider.costs import Costs

GREEDY, SHORT = SamplingParams(0, repetition_penalty=3.0), Stop(10)


def florence():
    images = transformers.CLIPImageProcessor(
        size={"height": 16, "width": 16}, do_center_crop=False, do_convert_rgb=True
    )
    images.image_seq_length = 5
    return transformers.Florence2Processor(images, words("<image>", 50))


def pix2struct():
    images = transformers.Pix2StructImageProcessor(
        patch_size={"height": 4, "width": 4}, max_patches=12, is_vqa=False
    )
    return transformers.Pix2StructProcessor(images, words("<image>", 50))


def opened(place, name, processor):
    """The model of a folder, with drafts that copy, and the processor."""
    model = build(FAMILIES[name](), seed=3)
    for part, weight in model.named_parameters():
        if "encoder_attn" in part and weight.dim() > 1:
            weight.data.mul_(4.0)  # so that a text depends on its image
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(place)
    kept(processor, place, transformers.AutoImageProcessor)
    return outrider.load(
        str(place),
        drafter="prompt_lookup",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
    ), model


@torch.inference_mode()
def generated(model, **given):
    """What transformers writes."""
    found = model.generate(
        **given,
        max_new_tokens=10,
        min_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
        repetition_penalty=3.0,
    )
    return found[0, -10:].tolist()


def test_florence_2_reads_an_image_and_a_task(tmp_path):
    processor = florence()
    loaded, model = opened(tmp_path, "Florence-2", processor)
    tasks = [(picture(1), "w20 w21 w22"), (picture(2, (9, 14)), "w5")]
    right = [
        generated(model, **processor(text=[task], images=[image], return_tensors="pt"))
        for image, task in tasks
    ]
    assert right[0] != right[1]
    asked = [{"prompt": task, "multi_modal_data": {"image": image}} for image, task in tasks]
    found = loaded.generate(asked, GREEDY, SHORT).completions
    assert [one.token_ids for one in found] == right
    ready = processor(text=["w5"], images=[tasks[1][0]], return_tensors="pt")
    assert loaded.generate(ready, GREEDY, SHORT).completions[0].token_ids == right[1]
    with pytest.raises(PromptError, match="without an image"):
        loaded.generate("w20 w21", GREEDY, SHORT)


def test_pix2struct_reads_an_image(tmp_path):
    processor = pix2struct()
    loaded, model = opened(tmp_path, "Pix2Struct", processor)
    images = [picture(1), picture(2, (30, 8)), picture(3)]
    right = [
        generated(model, **processor.image_processor(images=image, return_tensors="pt"))
        for image in images
    ]
    assert len(set(map(tuple, right))) == 3
    found = loaded.generate(images, GREEDY, SHORT).completions
    assert [one.token_ids for one in found] == right
