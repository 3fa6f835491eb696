"""Pictures of experiments: matplotlib without a display, laid out so that texts do not overlap."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from outrider.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def pyplot() -> ModuleType:
    """matplotlib.pyplot without a display, or ConfigurationError."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed; install the extra with "
            "pip install 'outrider[bench]', or ask for no picture (--no-pictures)"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    module: ModuleType = plt
    return module


def file(path: Path) -> Path:
    """A file that can be written, said before anything is measured; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigurationError(
            f"the document needs a file; got {str(path)!r}: {error.strerror}; name one that can be "
            "written"
        ) from error
    return path


def panels(
    rows: int, columns: int, size: tuple[float, float]
) -> tuple["Figure", list[list["Axes"]]]:
    """A figure of that size in inches and its axes [rows, columns]."""
    figure, axes = pyplot().subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    return figure, axes.tolist()


def legend(figure: "Figure", axes: Iterable["Axes"], columns: int) -> None:
    """One legend below all panels, a label once, whatever panels it is in."""
    found: dict[str, Artist] = {}
    for axis in axes:
        lines, names = axis.get_legend_handles_labels()
        found |= dict(zip(names, lines, strict=True))
    where = "outside lower center"
    figure.legend(list(found.values()), list(found), loc=where, ncols=columns, fontsize=8)


def below(axis: "Axes", columns: int = 6) -> None:
    """A panel's own legend, below it and not on its lines."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, fontsize=8)


def whisker(axis: "Axes", at: float, ends: str, colour: str = "black") -> None:
    """An upright line from end to end of an interval as tables print it; none of "" is drawn."""
    if ends:
        low, high = map(float, ends.strip("[]").split(","))
        axis.plot([at, at], [low, high], color=colour, linewidth=1)


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """The picture as PNG and SVG."""
    return write(figure, [folder / f"{name}.png", folder / f"{name}.svg"])


def write(figure: "Figure", paths: Sequence[Path]) -> list[Path]:
    """The picture as files, by their suffixes; the figure is closed.

    Raises ConfigurationError for a suffix that is no picture's.
    """
    for path in paths:
        try:
            figure.savefig(path, dpi=130, bbox_inches="tight")
        except ValueError as error:
            raise ConfigurationError(
                f"a picture's suffix says what it is; got {path.name!r}: {error}; "
                "name it .png or .svg"
            ) from error
    pyplot().close(figure)
    return list(paths)
