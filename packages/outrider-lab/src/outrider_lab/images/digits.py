"""8x8 digits in 16 grey levels as texts of 65 tokens: the class, then the pixels row by row."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ConfigurationError

SIDE, GREYS, CLASSES = 8, 16, 10
PIXELS = SIDE * SIDE
NULL = GREYS + CLASSES  #: the class of pictures of which nothing is said
VOCAB = NULL + 1


def class_token(label: int) -> int:
    """The token of a digit's class.

    >>> class_token(0)
    16
    """
    return GREYS + label


def texts() -> Tensor:
    """scikit-learn's 1,797 digits, int64 [1797, 65]. Levels 0 .. 16 become 0 .. 15."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the digits are scikit-learn's, and {error.name} is not installed; pip install "
            "'outrider[bench]'"
        ) from None
    data: Any = load_digits()
    pixels = np.minimum(data.data, GREYS - 1).astype(np.int64)
    return torch.from_numpy(np.concatenate([class_token(0) + data.target[:, None], pixels], 1))


def picture(tokens: list[int]) -> NDArray[np.float64]:
    """A text's pixels [8, 8], 0 .. 1; a class that a model wrote among them is black.

    >>> float(picture([15] * 64).min())
    1.0
    """
    levels = np.array(tokens, np.float64).reshape(SIDE, SIDE)
    return np.where(levels < GREYS, levels, 0) / (GREYS - 1)
