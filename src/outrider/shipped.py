"""What the package brings: a target with its draft, a corrector, drafts of other targets."""

import math
from importlib.resources import files
from pathlib import Path

from safetensors import safe_open

#: The shipped encoder-decoder: it reads damaged Python and writes what was meant.
CORRECTOR = "corrector"

#: The shipped draft folder for openai/whisper-base.
WHISPER_DRAFT = "whisper-base-draft"

#: The shipped head for HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2_HEAD = "smollm2-head"

#: Shipped drafts of targets that are not shipped.
DRAFTS = (WHISPER_DRAFT, SMOLLM2_HEAD)


def shipped(part: str) -> Path:
    """What the package brings: "target", "draft", "corrector", "whisper-base-draft",
    "smollm2-head" (folders), or "ngram.safetensors"."""
    return Path(str(files("outrider") / "pair" / part))


def parameters(which: str) -> int:
    """How many parameters a shipped model ("target", say) has, read from its weights' header.

    >>> parameters("target")
    20328704
    """
    with safe_open(shipped(which) / "model.safetensors", "pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
