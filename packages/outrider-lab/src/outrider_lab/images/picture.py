"""Pictures of both ways to decode side by side, and where drafted pixels were kept."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider_lab import drawing
from outrider_lab.images.digits import picture


def mosaic(texts: list[list[int]]) -> NDArray[np.float64]:
    """All pictures in a square, a line of background between them."""
    side = int(np.ceil(np.sqrt(len(texts))))
    whole = np.full((9 * side + 1, 9 * side + 1), 0.25)
    for number, text in enumerate(texts):
        y, x = (9 * place + 1 for place in divmod(number, side))
        whole[y : y + 8, x : x + 8] = picture(text)
    return whole


def draw(
    out: Path, plain: list[list[int]], speculative: list[list[int]], shares: NDArray[np.float64]
) -> list[Path]:
    """As `images.png` and `images.svg`."""
    plt = drawing.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(14, 5), width_ratios=(2, 2, 1.3))
    for axis, texts, name in ((axes[0], plain, "target"), (axes[1], speculative, "speculative")):
        axis.imshow(mosaic(texts), cmap="gray", vmin=0, vmax=1)
        axis.set(title=f"{name}: {len(texts)} pictures", xticks=(), yticks=())
    heat = axes[2].imshow(shares, cmap="viridis", vmin=0, vmax=1)
    axes[2].set(title="drafted pixels kept", xlabel="column", ylabel="row")
    figure.colorbar(heat, ax=axes[2], shrink=0.7)
    figure.tight_layout()
    paths = drawing.save(figure, out, "images")
    plt.close(figure)
    return paths
