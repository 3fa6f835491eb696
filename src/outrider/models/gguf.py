"""Checkpoints in one GGUF file: weights, configuration, tokenizer and chat template.

transformers reads configuration and tokenizer. Weights stay in the file's blocks (`gguf_weights`),
on a CPU with our kernels; else transformers unpacks them to the dtype that the model runs in. The
law is that of the file's weights either way.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models.gguf_file import GgufFile
from outrider.models.gguf_weights import BlockWeights, block_weights

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
) -> BlockWeights | str:
    """The model in the blocks of the file that `located` names; or why it has to be unpacked.

    `kind` is its class of transformers. Raises ConfigurationError for a damaged file.
    """
    from transformers.utils import cached_file

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
