"""What the sweep found, read: which types there are, which of them are right, and why not."""

import json
from pathlib import Path

from transformers.models.auto import modeling_auto

from outrider.models.unsupported import REASONS

RECORD = Path(__file__).parent / "types.json"
#: What is asked of a model that loads, in the order of the table; `examine.py` says what each is.
ARMS = ("folder", "plain", "chain", "tree", "batch", "seeded")

_SOUND = "it writes several codebooks of sound at once, not a text"
_TIMM = "its images need the package timm, which was not there"
_DRAFT = "a draft of Gemma 4's: it reads its target's keys and values"
#: Why a line is not all equal, where no refusal says it: found out by hand.
NOTES = {
    "blt": "its patches come of a model of bytes that reads the whole text at every call",
    **dict.fromkeys(("fast_vlm", "perception_lm"), _TIMM),
    "gemma3n": f"{_TIMM}; its text model, `gemma3n_text`, is right",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "musicgen": _SOUND,
    "musicgen_melody": _SOUND,
    "openai-gpt": "transformers' class keeps no keys and values: each call reads the whole text",
    "xlm": "an encoder: transformers' class has no causal form",
}
#: The same of the arms with pictures.
IMAGE_ARMS = ("plain", "chain", "tree", "batch", "seeded")
_NO_FORM = "no tiny picture was found that transformers' own class reads; not looked into further"
IMAGE_NOTES = {
    "evolla": "it reads proteins, not pictures",
    "mistral4": "transformers opens it as a model of text",
    "pi0": "it writes movements of a robot, not text",
    "shieldgemma2": "it writes two probabilities, not text",
}


def read_record(path=RECORD):
    """The findings by type, and the version of transformers that they are of."""
    record = json.loads(path.read_text("utf-8"))
    return record["types"], record["transformers"]


def causal():
    """Types with a class of AutoModelForCausalLM."""
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def others():
    """Types that read images or sounds, and encoder-decoders, where they are no causal ones."""
    names = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    tables = (getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in names)
    return sorted({kind for table in tables for kind in table} - {*causal()})


def image_text():
    """Types that transformers opens as models of images and text to text."""
    return sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def right_with_images(found):
    """Whether all is equal behind pictures, with trees or with chains alone."""
    images = found.get("images", {})
    return all(
        images.get(arm) is True or (arm == "tree" and images.get(arm) == "chains only")
        for arm in IMAGE_ARMS
    )


def reason_with_images(kind, found):
    """Why a type is not right with pictures; None where it is, or where nobody has said."""
    if right_with_images(found):
        return None
    if kind in IMAGE_NOTES or kind in REASONS:
        return IMAGE_NOTES.get(kind) or REASONS[kind]
    images = found.get("images", {})
    if "prompt" in images:
        said = reason(kind, found) if not right(found) else None
        return said if said is not None else _NO_FORM
    said = next(said for arm in IMAGE_ARMS if (said := images.get(arm, True)) is not True)
    if isinstance(said, str) and said.startswith("UnsupportedModel: "):
        return said.removeprefix("UnsupportedModel: ").split("; got ")[0].split("; use ")[0]
    return None


def right(found):
    """Whether a model loads and everything of it is equal, with trees or with chains alone."""
    return found.get("loads") is True and all(
        found.get(arm) is True or (arm == "tree" and found.get(arm) == "chains only")
        for arm in ARMS
    )


def reason(kind, found):
    """Why a line is not right: what somebody has found out, or what it says of itself.

    None for a causal type of which neither is known.
    """
    if kind in NOTES or kind in REASONS:
        return NOTES.get(kind) or REASONS[kind]
    said = found.get("loads", found.get("built"))
    if isinstance(said, str) and said.startswith("UnsupportedModel: "):
        # of a causal type somebody has to find out why a check has failed
        failed = "relative difference" in said or "cannot be driven" in said
        if not (failed and found["causal"]):
            said = said.removeprefix("UnsupportedModel: ").split("; got ")[0].split("; give ")[0]
            return said.split(" models are not supported: ")[-1]
    if found.get("causal", True):
        return None
    return first_words(found)


def first_words(found):
    """What the first arm that is not right says."""
    said = (found[arm] for arm in ("built", "loads", *ARMS) if found.get(arm, True) is not True)
    return next(said)[:200].replace("|", "/")
