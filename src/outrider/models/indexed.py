"""Attention that an indexer makes sparse: DeepSeek V3.2, GLM with DSA and their kin.

Each token attends to the `index_topk` tokens of its prefix that the indexer scores highest. The
indexer is the model's own and adds the mask that it is given before it chooses, so a tree's node
chooses among its own ancestors; its keys lie in the slots of the cache, beside keys and values.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from outrider.models.config import read
from outrider.models.hf import TransformersRunner
from outrider.models.model_lock import alone, instead
from outrider.models.multi_modal import MultiModalRunner


class IndexedRunner(TransformersRunner):
    """Runs a model whose layers choose what they attend to; a check narrows the choice as well."""

    @contextmanager
    def narrowed(self, size: int) -> Iterator[None]:
        """Windows, chunks and choices of `size`, so that a short text reaches past them.

        Choices stay in half precision, where the last bit of a score may turn one.
        """
        with super().narrowed(size), ExitStack() as swaps:
            for module in self._parts.modules if self.dtype.itemsize >= 4 else ():
                if read(module, "index_topk", int):
                    swaps.enter_context(_choosing(self.model, module, size))
            yield


class IndexedMultiModalRunner(MultiModalRunner, IndexedRunner):
    """The same, of a model whose prompts may hold images: Mistral Large 4."""


@contextmanager
def _choosing(model: torch.nn.Module, indexer: torch.nn.Module, size: int) -> Iterator[None]:
    """An indexer that chooses `size` tokens, in this thread alone."""
    other = copy.copy(indexer)  # with the same weights
    vars(other)["index_topk"] = min(size, int(vars(indexer)["index_topk"]))
    with instead(alone(model), indexer, "forward", type(indexer).forward.__get__(other)):
        yield
