"""The weights that outrider ships: `outrider.shipped` asks here where they are."""

from pathlib import Path

__all__ = ["folder"]
__version__ = "0.1.0"

#: Where a wheel has them.
_PACKED = Path(__file__).resolve().parent / "models"


def folder() -> Path:
    """The folder of `target`, `draft`, `corrector`, `whisper-base-draft`, `smollm2-head`,
    `ngram.safetensors` and `heldout_prompts.jsonl`.

    >>> sorted(path.name for path in folder().glob("*aft"))
    ['draft', 'whisper-base-draft']
    """
    if _PACKED.is_dir():
        return _PACKED
    return Path(__file__).resolve().parents[4] / "src" / "outrider" / "pair"  # a checkout
