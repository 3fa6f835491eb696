"""Rows with sources in one cache, each against the model's own forward."""

import torch

from outrider.models.prefill import causal, of_tree
from outrider.tree import branching

TREE = branching((2, 2))
PATHS = [TREE.ancestors_BNN[0, leaf].nonzero()[:, 0] for leaf in range(3, 7)]


class Rows:
    """Rows that come and go; every step scores a tree in each and keeps the path 1, 3.

    `own` runs the model's own forward; None: the model does.
    """

    def __init__(self, model, rows, capacity=128, own=None):
        self.model, self.capacity, self.own = model, capacity, own or model
        self.cache = model.open(rows, capacity).narrow(0)
        self.texts, self.sources = [], []

    def join(self, seat, source, prompt):
        """A row that was read alone takes a seat, all but its last token in the cache."""
        own = self.model.open(1, self.capacity, source)
        at = torch.arange(len(prompt) - 1)[None]
        if len(prompt) > 1:
            text = torch.tensor([prompt[:-1]])
            self.model.forward(own, causal(text, at, self.capacity), last=1)
        self.cache = self.cache.put([seat], own)
        self.texts[seat : seat + 1] = [list(prompt)]
        self.sources[seat : seat + 1] = [source]

    def leave(self, hole):
        """The last row takes the place of one that goes."""
        last = len(self.texts) - 1
        self.cache = self.cache.put([hole], self.cache.take([last])).narrow(last)
        for rows in (self.texts, self.sources):
            rows[hole] = rows[last]
            rows.pop()

    def step(self, last=None):
        """The largest error of a tree's logits, relative to the largest logit."""
        rows, first = len(self.texts), 5 if self.model.vocab_size > 40 else 0
        drafted = (torch.arange(rows * TREE.nodes) * 5 + 2).view(rows, -1)
        drafted = first + drafted % (self.model.vocab_size - first)
        drafted[:, 0] = torch.tensor([text[-1] for text in self.texts])
        start = torch.tensor([len(text) - 1 for text in self.texts])
        nodes = of_tree(drafted, TREE, start, self.capacity)
        logits = self.model.forward(self.cache, nodes, last=last).logits_BQV
        assert logits.shape[1] == (last or TREE.nodes)
        shown = range(TREE.nodes - logits.shape[1], TREE.nodes)
        worst = 0.0
        for row, (text, source) in enumerate(zip(self.texts, self.sources, strict=True)):
            own = self._own(text, drafted[row], source)
            for path, expected in zip(PATHS, own, strict=True):
                for node, wanted in zip(path.tolist(), expected, strict=True):
                    if node in shown:
                        gap = (logits[row, node - shown.start] - wanted).abs().max()
                        worst = max(worst, float(gap / expected.abs().max()))
            text += drafted[row, [1, 3]].tolist()
        # the last of the two is pending: it is written by the next call
        self.model.keep(self.cache, start, torch.tensor([[1, 3]] * rows))
        return worst

    def _own(self, text, drafted, source):
        """The model's own logits [4, 3, V] of the paths, each as a text of its own."""
        before = torch.tensor(text[:-1], dtype=torch.int64).expand(len(PATHS), -1)
        whole = torch.cat([before, torch.stack([drafted[path] for path in PATHS])], 1)
        logits = self.own.runner.plain(whole, source.take([0] * len(PATHS)))
        return logits[:, len(text) - 1 :]


def played(model, sources, first=0, own=None):
    """Four sources of different lengths in three rows join, leave and are replaced.

    The largest error of all. `first` begins every text.
    """
    rows, worst = Rows(model, 3, own=own), 0.0
    for seat in range(3):
        rows.join(seat, sources.take([seat]), [first] + [9, 7] * (3 * seat))
        worst = max(worst, rows.step())
    rows.leave(0)
    worst = max(worst, rows.step(last=3))
    rows.join(1, sources.take([3]), [first, 8, 9, 7])
    worst = max(worst, rows.step())
    rows.leave(1)
    return max(worst, rows.step())
