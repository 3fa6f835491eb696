"""Checkpoints in one GGUF file: weights, configuration, tokenizer and chat template.

transformers reads configuration and tokenizer. Weights stay in the file's blocks (`gguf_weights`),
on a CPU with our kernels; else transformers unpacks them to the dtype that the model runs in. The
law is that of the file's weights either way.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import calibrate

if TYPE_CHECKING:
    from outrider.models.gguf_weights import BlockWeights

_NEEDS = ("gguf", "accelerate")  #: packages that transformers reads such files with


def is_file(given: object) -> bool:
    """Whether a path or a name means a GGUF file.

    >>> is_file("models/SmolLM2-135M-Instruct.Q4_1.gguf"), is_file("models/smollm2")
    (True, False)
    """
    return isinstance(given, (str, Path)) and str(given).lower().endswith(".gguf")


def located(given: str | Path) -> tuple[str, dict[str, Any]]:
    """Where transformers finds it, and what it has to be told besides: for any path or hub name.

    A file on the hub is named as org/name/file.gguf. Raises ConfigurationError where packages for
    such files are missing.

    >>> located("org/name")
    ('org/name', {})
    """
    if not is_file(given):
        return str(given), {}
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"a GGUF file is read with the packages {' and '.join(_NEEDS)}; got {str(given)!r} "
            f"without {' and '.join(missing)}; pip install 'outrider[gguf]'"
        )
    where = Path(given)
    return str(where.parent), {"gguf_file": where.name}


def kept(
    where: str, how: dict[str, Any], config: PretrainedConfig, kind: Any
) -> "BlockWeights | str":
    """The model in the blocks of the file that `located` names; or why it has to be unpacked.

    `kind` is its class of transformers. Raises ConfigurationError for a damaged file.
    """
    from transformers.utils import cached_file

    from outrider.models.gguf_file import GgufFile
    from outrider.models.gguf_weights import block_weights

    name = how["gguf_file"]
    path: Path | str | None = Path(where, name)
    if not Path(where, name).is_file():
        path = cached_file(where, name)
    if path is None:
        raise ConfigurationError(f"no such file; got {where}/{name}; check the path")
    try:
        return block_weights(GgufFile(path), config, kind)
    except UnsupportedModel as error:
        return str(error)


def described(given: object) -> Path | None:
    """Where configuration and tokenizer of a local file are kept once they were read.

    transformers takes up to half a minute for them, in Python. A file that has changed since is
    read anew.
    """
    if not is_file(given):
        return None
    path = Path(str(given))
    try:
        about = path.stat()
    except OSError:
        return None
    name = repr((str(path.resolve()), about.st_size, about.st_mtime_ns, transformers.__version__))
    return calibrate.cache_dir() / f"gguf-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def remember(given: object, part: PretrainedConfig | PreTrainedTokenizerBase, name: str) -> None:
    """Keep a configuration or a tokenizer of a local file; a read-only home is no error."""
    folder = described(given)
    if folder is None:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            part.save_pretrained(Path(scratch, name))
            folder.mkdir(exist_ok=True)
            Path(scratch, name).rename(folder / name)
    except OSError:
        return


def unpacked() -> dict[str, Any]:
    """What asks transformers for weights as numbers; older versions know nothing else."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model without the mark that its weights were packed: they are numbers now."""
    vars(model.config).pop("quantization_config", None)
    return model
