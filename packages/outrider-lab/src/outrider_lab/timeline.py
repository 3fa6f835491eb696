"""When each model was called: the trace diagram of Leviathan et al. 2023, figure 5, as measured."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.drafters import DraftModel
from outrider.engine import Engine
from outrider.models.model_wrapper import ModelWrapper
from outrider.text.output_text import Generation
from outrider.text.speculator import Speculator
from outrider.types import Inputs, LanguageModel, Nodes, Output
from outrider_lab import drawing

#: What is called -> its colour, the figure's own.
COLOURS = {
    "encoder": "gold",
    "draft's encoder": "darkorange",
    "draft": "cornflowerblue",
    "target": "rebeccapurple",
}


class Span(NamedTuple):
    """When a model was called and when it answered, by `time.perf_counter`."""

    start: float
    end: float
    encodes: bool = False  #: its encoder
    tokens: int = 0  #: that it read


class Timed(ModelWrapper[LanguageModel]):
    """A model whose calls are counted and timed: what is spent in a draft model alone.

    On CUDA every call waits for the device, before and after.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.spans: list[Span] = []  #: of all calls

    def encode(self, inputs: Inputs) -> Inputs:
        """The model's own, timed."""
        self._wait()
        started = time.perf_counter()
        encoded = self.model.encode(inputs)
        self._wait()
        self.spans.append(Span(started, time.perf_counter(), encodes=True))
        return encoded

    def forward(
        self,
        cache: object,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """The model's own answer, timed."""
        self._wait()
        started = time.perf_counter()
        output = self.model.forward(cache, nodes, last=last, aux_layers=aux_layers)
        self._wait()
        self.spans.append(Span(started, time.perf_counter(), tokens=nodes.tokens_BQ.numel()))
        return output

    @property
    def calls(self) -> int:
        """Forward calls so far."""
        return sum(not span.encodes for span in self.spans)

    @property
    def seconds(self) -> float:
        """Spent in them."""
        return sum(span.end - span.start for span in self.spans if not span.encodes)

    def _wait(self) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()


class TimelineLine(NamedTuple):
    """The calls of one text, from its start on; what no call fills is drafter, rule and host."""

    name: str
    calls: list[tuple[str, Span]]  #: what was called, when
    tokens: int

    @property
    def seconds(self) -> float:
        """From the first call's start to the last one's end."""
        spans = [span for _, span in self.calls]
        return max(s.end for s in spans) - min(s.start for s in spans)


def watched(pair: Speculator, name: str, run: Callable[[Speculator], Generation]) -> TimelineLine:
    """`run` on a pair whose models' calls are timed, after a first run that warms up.

    Drafters without a model of their own have no calls but the target's.
    """
    target = Timed(pair.engine.target)
    models = {"target": target}
    drafter = pair.engine.drafter
    if isinstance(drafter, DraftModel):
        models["draft"] = Timed(drafter.model)
        drafter = replace(drafter, model=models["draft"])
    engine = Engine(target, drafter, pair.engine.rule, pair.engine.planner, pair.engine.costs)
    more = (pair.tokenizer, pair.eos_ids, pair.notes, pair.opening, pair.hearing, pair.defaults)
    timed = Speculator(engine, *more)
    run(timed)
    for model in models.values():
        model.spans.clear()
    done = run(timed)
    encoders = {"target": "encoder", "draft": "draft's encoder"}
    calls = [
        (encoders[name] if span.encodes else name, span)
        for name, model in models.items()
        for span in model.spans
    ]
    return TimelineLine(name, sorted(calls, key=lambda call: call[1].start), done.stats.new_tokens)


def lines(pair: Speculator, run: Callable[[Speculator], Generation]) -> list[TimelineLine]:
    """As asked, and standard decoding below it."""
    name = f"{pair.engine.drafter.name}, up to {pair.engine.drafter.shapes[0].max_depth} ahead"
    return [watched(pair, name, run), watched(pair.plain(), "standard decoding", run)]


def check(path: Path) -> None:
    """Raise ConfigurationError where no picture can be drawn, or not there."""
    drawing.pyplot()
    drawing.file(path)


def compare(speculator: Speculator, run: Callable[[Speculator], Generation], path: Path) -> None:
    """`run` and standard decoding, drawn: `outrider generate --timeline`."""
    draw(lines(speculator, run), path)


def draw(made: Sequence[TimelineLine], path: Path) -> None:
    """One row a line, a block a call, in milliseconds."""
    figure, grid = drawing.panels(1, 1, (14, 1.2 + 0.9 * len(made)))
    axis = grid[0][0]
    for row, line in enumerate(made):
        start = line.calls[0][1].start
        for part, colour in COLOURS.items():
            spans = [
                (1e3 * (s.start - start), 1e3 * (s.end - s.start))
                for called, s in line.calls
                if called == part
            ]
            axis.broken_barh(
                spans,
                (row - 0.35, 0.7),
                facecolors=colour,
                edgecolors="white",
                linewidth=0.4,
                label=part if spans else None,
            )
    axis.set_yticks(
        range(len(made)),
        [f"{line.name}\n{line.tokens} tokens, {1e3 * line.seconds:.0f} ms" for line in made],
    )
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    drawing.legend(figure, [axis], len(COLOURS))
    drawing.write(figure, [path])
