"""The models that outrider ships, where they are installed: a target with its draft, a corrector,
drafts of other targets."""

import math
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from safetensors import safe_open

from outrider.errors import ConfigurationError

#: The shipped encoder-decoder: it reads damaged Python and writes what was meant.
CORRECTOR = "corrector"

#: The shipped draft folder for openai/whisper-base.
WHISPER_DRAFT = "whisper-base-draft"

#: The shipped head for HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2_HEAD = "smollm2-head"

#: Shipped drafts of targets that are not shipped.
DRAFTS = (WHISPER_DRAFT, SMOLLM2_HEAD)

#: Where they are in a checkout; wheels of outrider have no weights.
_CHECKOUT = Path(str(files("outrider"))) / "pair"


def shipped(part: str) -> Path:
    """Where a part of what is shipped is: "target", "draft", "corrector", "whisper-base-draft",
    "smollm2-head" (folders), "ngram.safetensors" or "heldout_prompts.jsonl".

    Raises ConfigurationError where neither a checkout nor `outrider-pair` has them.
    """
    folder = _folder()
    if folder is None:
        raise ConfigurationError(
            f"the shipped models are not installed; got no folder to take {part!r} from; "
            "pip install 'outrider[pair]', or give models and prompts of your own"
        )
    return folder / part


def is_shipped(path: object, part: str) -> bool:
    """Whether a path is that of a shipped part; no path is, where nothing shipped is installed.

    >>> is_shipped(shipped("target"), "target"), is_shipped("target", "target")
    (True, False)
    """
    folder = _folder()
    return folder is not None and str(path) == str(folder / part)


def parameters(which: str) -> int:
    """How many parameters a shipped model ("target", say) has, read from its weights' header.

    >>> parameters("target")
    20328704
    """
    with safe_open(shipped(which) / "model.safetensors", "pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())


def _folder() -> Path | None:
    """The folder of all parts: the checkout's, else that of `outrider-pair`, else none."""
    if _CHECKOUT.is_dir():
        return _CHECKOUT
    try:
        found: Path = import_module("outrider_pair").folder()
    except ModuleNotFoundError as error:
        if error.name != "outrider_pair":
            raise
        return None
    return found
