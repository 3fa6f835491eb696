"""Speed over plain decoding by kind of prompt, every drafter a mark with its interval."""

from pathlib import Path

from outrider_lab import drawing
from outrider_lab.bench.intervals import Interval
from outrider_lab.tasks.prompts import KINDS

MARKS = "osD^v<>PXph*"


def draw(out: Path, found: dict[tuple[float, str], dict[str, Interval]]) -> list[Path]:
    """One panel for each temperature, as `tasks.png` and `tasks.svg`."""
    plt = drawing.pyplot()
    temperatures = list(dict.fromkeys(t for t, _ in found))
    arms = list(dict.fromkeys(arm for _, arm in found))
    figure, axes = plt.subplots(
        len(temperatures), 1, figsize=(9, 3.4 * len(temperatures)), sharex=True, squeeze=False
    )
    colours = plt.get_cmap("tab10" if len(arms) <= 10 else "tab20")
    for panel, t in zip(axes[:, 0], temperatures, strict=True):
        for n, arm in enumerate(arms):
            for place, kind in enumerate(KINDS):
                one = found.get((t, arm), {}).get(kind)
                if one is None:
                    continue
                ends = [[one.value - one.low], [one.high - one.value]] if one.prompts > 1 else None
                panel.errorbar(
                    place + 0.8 * ((n + 0.5) / len(arms) - 0.5),
                    one.value,
                    yerr=ends,
                    fmt=MARKS[n % len(MARKS)],
                    color=colours(n % colours.N),
                    markersize=4,
                    linewidth=1,
                    label=arm if place == 0 else None,
                )
        panel.axhline(1, color="0.5", linewidth=0.8)
        panel.set_ylabel(f"times plain, T = {t:g}")
        panel.set_xticks(range(len(KINDS)), KINDS)
        panel.set_yscale("log")
        panel.set_yticks([0.5, 1, 1.5, 2, 3, 4], ["0.5", "1", "1.5", "2", "3", "4"])
        panel.minorticks_off()
    axes[0, 0].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    paths = drawing.save(figure, out, "tasks")
    plt.close(figure)
    return paths
