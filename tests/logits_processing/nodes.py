"""Random trees below random texts, shaped by our rules and by functions of (input_ids, scores)."""

import itertools
from dataclasses import dataclass

import torch

from outrider.row_params import Shaping
from outrider.sampling import logits_processors
from outrider.types import Context, Tree

WIDE = 9  #: committed tokens at most


@dataclass
class Case:
    """Rows with prompts and made tokens of various lengths, and a tree of its own below each."""

    prompts: list[list[int]]
    texts: list[list[int]]  #: prompt and what was made
    context: Context
    nodes: torch.Tensor
    tree: Tree
    logits: torch.Tensor

    def take(self, rows):
        """These rows, in this order."""
        context, tree = self.context, self.tree
        return Case(
            [self.prompts[row] for row in rows],
            [self.texts[row] for row in rows],
            context._replace(tokens_BL=context.tokens_BL[rows], length_B=context.length_B[rows]),
            self.nodes[rows],
            tree._replace(
                parent_BN=tree.parent_BN[rows],
                depth_BN=tree.depth_BN[rows],
                ancestors_BNN=tree.ancestors_BNN[rows],
            ),
            self.logits[rows],
        )

    def text(self, row, node):
        """The whole text that ends in a node."""
        path = self.tree.ancestors_BNN[row, node].nonzero()[:, 0]
        return self.texts[row][:-1] + self.nodes[row, path].tolist()

    def shaped(self, settings, stops=(), ends=(), sources=(), tree=None):
        """Logits of all nodes under one setting a row."""
        return self.by(self.built(settings, stops, ends, sources), tree)

    def built(self, settings, stops=(), ends=(), sources=()):
        """The settings as a `Shaping`."""
        vocab, stops = self.logits.shape[-1], [stops] * len(settings)
        return logits_processors.build(
            settings, self.prompts, stops, vocab, "cpu", ends=ends, sources=sources
        )

    def by(self, built, tree=None):
        """Logits of all nodes by a `Shaping`: what came in stays as it is."""
        if built is None:
            return self.logits
        before = self.logits.clone()
        shaped = logits_processors.apply(
            self.logits, built, self.context, self.nodes, tree or self.tree
        )
        assert torch.equal(before, self.logits)
        return shaped

    def level_by_level(self, built):
        """The same as drafters ask for it: the nodes of one depth, when those below are unknown."""
        parts = []
        for start, stop in itertools.pairwise(self.tree.levels):
            logits, nodes = self.logits[:, start:stop], self.nodes[:, :stop]
            parts.append(
                logits_processors.apply(logits, built, self.context, nodes, self.tree, start)
            )
        return torch.cat(parts, 1)

    def reference(self, process):
        """Logits by `process(row, input_ids, scores)`, called on texts of one row and length."""
        want = self.logits.clone()
        for row, levels in itertools.product(range(len(self.texts)), [self.tree.levels]):
            for start, stop in itertools.pairwise(levels):
                texts = torch.tensor([self.text(row, node) for node in range(start, stop)])
                want[row, start:stop] = process(row, texts, want[row, start:stop].clone())
        return want


def joined(case, settings, **more):
    """The rows of a case as a `Shaping` of rows that came one after another and moved about.

    `more` are lists with an item for each row, for `built`. The last row arrives first, and a row
    that asks for nothing leaves from the middle.
    """

    def part(rows):
        given = {name: [each[row] for row in rows] for name, each in more.items()}
        return case.take(rows).built([settings[row] for row in rows], **given)

    last, stranger = len(settings) - 1, Shaping.neutral(1, torch.device("cpu"))
    found = None
    for row in [last, *range(last)]:
        alone = part([row]) or Shaping.neutral(1, torch.device("cpu"))
        alone = alone._replace(prompt_B=torch.tensor([len(case.prompts[row])]))
        if found is None:
            found = alone.put([1], stranger)
        else:
            found = found.put([len(found.processors)], alone)
    # places: last, the stranger, 0, 1, ..., last - 1
    places = [*range(2, last + 2), 0]
    moved = found.put([1], found.take([last + 1])).narrow(last + 1)
    places[last - 1] = 1
    return moved.take(places)


def random_case(vocab, seed, rows=8, levels=(0, 1, 5, 12, 20), draw=None, least_prompt=1, spread=3):
    """Parents are drawn among the level above; `draw(shape, generator)` gives the tokens."""
    random = torch.Generator().manual_seed(seed)

    def integers(least, beyond, *shape):
        return torch.randint(least, beyond, shape, generator=random)

    draw = draw or (lambda shape, generator: integers(0, vocab, *shape))
    prompts = [draw((least_prompt + row % spread,), random).tolist() for row in range(rows)]
    made = [draw(((row + seed) % 5,), random).tolist() for row in range(rows)]
    texts = [prompt + new for prompt, new in zip(prompts, made, strict=True)]
    tokens = draw((rows, WIDE + 20), random)  # what lies beyond the length must not matter
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    length = torch.tensor([len(text) for text in texts])
    count = levels[-1]
    nodes = draw((rows, count), random)
    nodes[:, 0] = torch.tensor([text[-1] for text in texts])
    parent = torch.full((rows, count), -1)
    depth = torch.zeros(rows, count, dtype=torch.int64)
    seen = torch.eye(count, dtype=torch.bool).repeat(rows, 1, 1)
    for level, (start, stop) in enumerate(itertools.pairwise(levels)):
        depth[:, start:stop] = level
        if level:
            parent[:, start:stop] = integers(levels[level - 1], start, rows, stop - start)
            for node, row in itertools.product(range(start, stop), range(rows)):
                seen[row, node] |= seen[row, parent[row, node]]
    tree = Tree(parent, depth, seen, len(levels) - 2, count, tuple(levels), False, nodes.shape[1])
    context = Context(tokens, length, int(length.max()), torch.zeros(rows), None)
    logits = torch.randn(rows, count, vocab, generator=random) * 2
    return Case(prompts, texts, context, nodes, tree, logits)
