"""Writing a safetensors file: whole or not at all, and readable as other new files are."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


def write(
    tensors: Mapping[str, Tensor], file: str | Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a file, in place of what is there; that stays until the new one is whole.

    safetensors' own function makes files that their owner alone may read, and its error for a full
    disk is no OSError.

    Raises OSError for a folder or a disk that does not take it.

    >>> write({"weight": torch.zeros(2, 3)}, "mine.safetensors")            # doctest: +SKIP
    """
    path = Path(file)
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("wb") as out:
            out.write(save(dict(tensors), metadata))
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write_folder(
    folder: str | Path, fields: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint: `fields` as its config.json, and its tensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    write({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
