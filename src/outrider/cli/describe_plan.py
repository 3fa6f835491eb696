"""What a planner goes by and what it chose, as lines for `--verbose`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.stats import Stats


def priced(engine: "Engine") -> list[str]:
    """The planner, and the costs that it weighs tokens against."""
    from outrider.engine.speculation_policy import FixedLength

    if isinstance(engine.planner, FixedLength):
        return [f"planner fixed: {engine.shapes[0].max_nodes - 1} drafted tokens in every step"]
    lines = [f"planner {type(engine.planner).__name__.lower()}"]
    if engine.costs is not None:
        for context, curve in sorted(engine.costs.times[1].items()):
            each = zip(*curve, strict=True)
            steps = ", ".join(
                f"{n - 1} drafted {ms:.1f}" if n > 1 else f"{ms:.1f}" for n, ms in each
            )
            lines.append(f"  ms of a step at {context} tokens: plain {steps}")
    return lines


def chosen(stats: "Stats") -> list[str]:
    """How often each size was drafted; why nothing was, if that was best."""
    each = [
        f"{steps} of {nodes - 1} drafted" if nodes > 1 else f"{steps} plain"
        for nodes, steps in sorted(stats.sizes.items())
    ]
    lines = [f"steps: {', '.join(each) or 'none'}"]
    if stats.predicted_ms:
        lines[0] += f"; predicted {stats.predicted_ms:.0f} ms, took {stats.measured_ms:.0f} ms"
    if stats.why_plain:
        lines.append(f"speculation is off because {stats.why_plain}")
    return lines


def searched(stats: "Stats") -> list[str]:
    """What a beam search took."""
    return [
        f"beam search: {stats.steps} calls of the target for {stats.new_tokens} tokens, took "
        f"{stats.measured_ms:.0f} ms"
    ]
