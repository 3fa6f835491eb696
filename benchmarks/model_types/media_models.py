"""Tiny random models of types whose prompts hold images or sound, and prompts for them."""

import torch
from image_models import TYPES
from sound_models import AUDIO, NOISY
from tiny_media import FIRST, IMAGE, LAST

from outrider.models.auto_classes import auto_class

EVERY = {**TYPES, **AUDIO}


def made(kind, seed=0):
    """A tiny random model of this type."""
    torch.manual_seed(seed)
    config = {**EVERY, **NOISY}[kind].config()
    model = auto_class(config).from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.3)
            elif not bool(weight.isfinite().all()) or "norm" not in name.lower():
                weight.fill_(0.5 if "gate" in name else 0.01)
        if kind == "phi4_multimodal":  # where it writes a placeholder transformers' own fails
            model.get_output_embeddings().weight[IMAGE] = 0
    return model.float().eval()


@torch.inference_mode()
def prompt(kind, model, seed, ahead=3, behind=5, size=0):
    """Token ids [L] of a prompt with a picture in it, and what stands beside them."""
    random, made_of = torch.Generator().manual_seed(seed), {**EVERY, **NOISY}[kind]
    kwargs = made_of.picture(random, size)
    told = made_of.count
    count = features(model, kwargs) if told is None else told(size)
    words = torch.randint(6, 90, (ahead + behind,), generator=random).tolist()
    before, behind = [*words[:ahead], FIRST], [LAST, *words[ahead:]]
    if made_of.first:
        before, behind = [], [*before, *behind]
    ids = [*before, *[made_of.image] * count, *behind]
    typed = made_of.typed
    if typed is not None:
        kwargs[typed] = torch.tensor([[int(token == IMAGE) for token in ids]])
    if made_of.beside is not None:
        kwargs |= made_of.beside(ids, kwargs)
    return ids, kwargs


def features(model, kwargs):
    """How many tokens a picture takes."""
    names = ("get_image_features", "get_audio_features")
    parts = (model, getattr(model, "model", model))
    each = (getattr(part, name, None) for name in names for part in parts)
    reads = next(function for function in each if function is not None)
    found = reads(**kwargs)
    pooled = getattr(found, "pooler_output", found)
    if pooled is None and (layers := getattr(found, "deepstack_features", None)):
        pooled = layers[0][1]  # of a type that has no others
    found = found.last_hidden_state if pooled is None else pooled
    if isinstance(found, (tuple, list)):
        return sum(one.shape[0] for one in found)
    return found.shape[:-1].numel()
