"""A model made over another one: whatever it does not say itself is as the other has it."""

from typing import Any, Generic

from torch import Tensor
from typing_extensions import TypeVar

from outrider.models.config import read
from outrider.types import Inputs, LanguageModel, Nodes, Output, TargetStates

M = TypeVar("M", bound=LanguageModel)
C = TypeVar("C", default=Any)  #: what it keeps of rows: a `Cache`


def capturable(*models: object) -> bool:
    """Whether none of these models says that its work reads values on the host.

    >>> capturable(object())
    True
    """
    return all(getattr(model, "capturable", True) for model in models)


def rereads(model: LanguageModel) -> bool:
    """Whether it reads as text what it has drafted itself: heads are told more of it by then, and
    guesses that were made in parallel leave no entries."""
    return bool(model.aux_layers) or bool(read(model, "rereads", bool))


class ModelWrapper(Generic[M, C]):
    """A `LanguageModel` that hands everything on to `model`; classes of it change some of that.

    >>> class Doubled(ModelWrapper[LanguageModel]):
    ...     def forward(self, cache, nodes, *, last=None, aux_layers=()):
    ...         output = super().forward(cache, nodes, last=last, aux_layers=aux_layers)
    ...         return Output(2 * output.logits_BQV, output.hidden)
    """

    def __init__(self, model: M) -> None:
        self.model = model
        self.vocab_size, self.context = model.vocab_size, model.context
        self.device, self.dtype = model.device, model.dtype
        self.trees, self.reads = model.trees, model.reads
        self.aux_layers, self.follows = model.aux_layers, model.follows

    @property
    def trees_alike(self) -> bool:
        return self.model.trees_alike

    @property
    def capturable(self) -> bool:
        """Whether nothing is known against recording its work as a CUDA graph."""
        return capturable(self.model)

    def width(self, slots: int) -> int:
        return self.model.width(slots)

    def examine(self, inputs: Inputs) -> None:
        self.model.examine(inputs)

    def encode(self, inputs: Inputs) -> Inputs:
        return self.model.encode(inputs)

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> C:
        made: C = self.model.open(rows, capacity, inputs)
        return made

    def forward(
        self, cache: C, nodes: Nodes, *, last: int | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Output:
        return self.model.forward(cache, nodes, last=last, aux_layers=aux_layers)

    def keep(self, cache: C, first_B: Tensor, path_BD: Tensor) -> None:
        self.model.keep(cache, first_B, path_BD)

    def learn(self, cache: C, target: TargetStates) -> None:
        self.model.learn(cache, target)

    def probe(self, rows: int) -> Inputs | None:
        return self.model.probe(rows)
