"""Many law rows at once as urns of probabilities: the draws of a whole tree level, rank by rank.

    draw: x ~ p by inverse transform from one 53-bit uniform a row;  take: x leaves its urn

One softmax serves all rows. Sums of blocks are kept and made again from what is left, never by
subtraction, so that small probabilities behind a large one keep their digits; a draw adds up these
sums in float64, then the tokens of one block.
"""

import math

import numpy as np
import torch

from outrider.models.cpu_kernels import build
from outrider.ops.cpu import compiled, keys
from outrider.ops.cpu.host_tables import Array
from outrider.ops.cpu.law_slices import block_of, find, running, upto
from outrider.types import Laws

LITTLE = 1e-3  #: an urn with less left is made again from its logits


class DrawsWithoutReplacement:
    """The laws of B * R rows, [B, R, V] read row by row. `p` [B * R, V] is theirs to change.

    A row that is NaN, or that masks every token, is an empty urn; greedy ones have temperature 1.
    """

    def __init__(self, laws: Laws) -> None:
        z = laws.logits_BRV.detach()
        if z.dtype not in (torch.float32, torch.float64):
            z = z.float()
        if laws.floor_BR is not None:
            z = z.masked_fill(z < laws.floor_BR[..., None], -torch.inf)
        batch, count, vocab = z.shape
        inverse = laws.inverse_temperature_B.tolist()
        if laws.greedy != "none":
            inverse = [1.0 if math.isinf(x) else x for x in inverse]
        if batch == 1:  # one operation instead of four, each as dear as the softmax after a model
            z = z if inverse[0] == 1 else z * inverse[0]
        elif inverse.count(1.0) < batch:
            z = z * z.new_tensor(inverse)[:, None, None]
        self.rows = batch * count
        self._z = z
        law = z.softmax(-1)
        block = self._block = block_of(vocab)
        if vocab % block:
            law = torch.nn.functional.pad(law, (0, -vocab % block))
        cells = law.view(self.rows, -1, block)
        self._cells, self._blocks = cells.numpy(), cells.sum(2).numpy()
        self._wide = law.numpy().reshape(self.rows, -1)
        self.p = self._wide[:, :vocab]
        self._all = upto(self.rows)
        self.fault = (
            False  #: whether a logit is NaN or +inf; a law that masks every token is just empty
        )
        self.sums: list[float] = []
        self._sum()

    def _sum(self) -> None:
        self.sums = self._blocks.sum(1).tolist()
        if not all(value > 0.5 for value in self.sums):
            self.fault = bool((self._z.isnan() | (self._z == torch.inf)).any())
            self._blocks[~(self._blocks >= 0)] = 0
            np.nan_to_num(self._wide, copy=False)
            self.sums = self._blocks.sum(1).tolist()

    def renew(self, gone: list[Array], which: list[Array]) -> None:
        """Make urns again from their logits, without the tokens [K, B * R] that left those at
        `which`: when these had nearly all of it, what the others had is lost to rounding."""
        self.sums = self._blocks.sum(1).tolist()
        for row in [r for r, left in enumerate(self.sums) if left < LITTLE]:
            z = self._z.reshape(self.rows, -1)[row].clone()
            z[
                [int(token[row]) for token, out in zip(gone, which, strict=True) if out[row]]
            ] = -torch.inf
            if not bool((z > -torch.inf).any()):
                continue
            self.p[row] = z.softmax(-1).numpy()
            self._blocks[row] = np.add.reduce(self._cells[row], 1)
            self.sums[row] = float(self._blocks[row].sum())

    def draw(self, names: Array, index: int) -> tuple[Array, Array]:
        """A token of each row and its probability mass, 0 if none is left. It stays in.

        The uniforms are word `index` of the streams with these names.
        """
        if build.unbuilt() is None:
            return compiled.draw(self._wide, self._blocks, self._block, names, index)
        uniforms = (keys.fine_uniform(name, index) for name in names.tolist())
        found = [self.draw_one(row, u) for row, u in enumerate(uniforms)]
        return np.array([token for token, _ in found]), np.array([mass for _, mass in found])

    def draw_one(self, row: int, uniform: float) -> tuple[int, float]:
        """A token of one row and its mass, 0 if none is left. It stays in."""
        return find(self._wide[row], running(self._blocks[row]), uniform, self._block)

    def best(self) -> tuple[Array, Array]:
        """The likeliest token of each row and its mass."""
        token = self._wide.argmax(1)
        return token, self._wide[self._all, token]

    def take(self, token: Array, which: Array | None = None) -> None:
        """Take one token out of every urn, or of those at `which`."""
        rows = self._all if which is None else which
        tokens = token if which is None else token[which]
        block = tokens // self._block
        self._wide[rows, tokens] = 0
        self._blocks[rows, block] = np.add.reduce(self._cells[rows, block], 1)

    def snapshot(self) -> tuple[Array, list[float]]:
        """What is in the urns, to be put back by `restore`."""
        return self._wide.copy(), self.sums

    def restore(self, saved: tuple[Array, list[float]]) -> None:
        """Put it back: the declared laws are those of the first draw."""
        np.copyto(self._wide, saved[0])
        self.sums = saved[1]
