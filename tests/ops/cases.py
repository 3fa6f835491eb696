"""Random drafts with every feature a kernel must honour, and their float64 twin."""

from dataclasses import dataclass

import torch

from outrider import noise, ops, verifiers
from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores

RULES = {
    "chain": "rejection",
    "tree": "rejection",
    "traversal": "traversal",
    "block": "block",
    "match": "match",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One verification."""

    counts: tuple[int, ...] = (1, 1, 1)
    vocab: int = 65
    batch: int = 2
    dtype: str = "fp32"
    temperature: float = 1.0
    floor: bool = False
    kept: bool = False
    spread: float = 0.8  #: how far the draft is from the target; 0: equal
    mask: bool = False
    ragged: bool = False
    hot: str = "none"
    kind: DrawKind = DrawKind.WITHOUT
    mixed: bool = False
    seed: int = 0

    @property
    def id(self) -> str:
        """Short name: what differs from the default."""
        plain = Case()
        names = [
            f"{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(plain, name)
        ]
        return "-".join(names).replace(" ", "") or "plain"


def build(case: Case):
    """Draft, scores, draws."""
    rng = torch.Generator().manual_seed(case.seed * 1009 + case.vocab)
    tree = branching(case.counts)
    rows, nodes, vocab = case.batch, tree.nodes, case.vocab
    dtype = DTYPES[case.dtype]

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    # a slice of a wider head: rows are not contiguous and are read in place
    wide = normal(rows, nodes, vocab + 3) * 2
    near = wide + case.spread * normal(rows, nodes, vocab + 3)
    target, drafted = wide.to(dtype)[..., :vocab], near.to(dtype)[..., :vocab]
    if case.mask:
        target[..., ::7] = -torch.inf
        drafted[..., 1::5] = -torch.inf
    inverse = torch.full((rows,), 1 / case.temperature)
    if case.hot != "none":
        inverse[0 if case.hot == "some" else slice(None)] = torch.inf
    laws, guess = (
        _laws(logits, inverse, case.floor, case.hot, kept)
        for logits, kept in ((target, False), (drafted, case.kept))
    )
    draws = children(case.counts).expand(rows, -1, -1).clone()
    kinds = torch.full_like(draws, int(case.kind))
    if case.mixed:
        kinds[:, ::2, 0] = int(DrawKind.FIXED)
    if case.hot == "some":
        kinds[0] = int(DrawKind.FIXED)
    tokens = _draw(draws, kinds, guess, rng)
    if case.ragged:
        draws[-1, 1:] = -1
    row = torch.where(
        (draws >= 0) & (kinds != DrawKind.FIXED), torch.arange(nodes)[None, :, None], -1
    )
    found = frozenset(DrawKind(k) for k in kinds[draws >= 0].tolist())
    no_laws = found == {DrawKind.FIXED}
    draft = Draft(tokens, tree, draws, kinds, row, None if no_laws else guess, found)
    keys = torch.arange(rows) * 7919 + case.seed
    return draft, Scores(laws), Draws(keys, torch.arange(rows) * 13 + 5)


def _laws(logits, inverse, floor, hot, kept):
    limits = None
    if floor:
        limits = logits.float().topk(9, -1).values[..., -1].contiguous()
    laws = Laws(logits, inverse, limits, greedy=hot)
    if kept:
        laws = laws._replace(lse_BR=ops.scaled(laws).logsumexp(-1))
    return laws


def _draw(draws, kinds, guess, rng):
    rows, nodes, _ = draws.shape
    probs = ops.probs(guess)
    tokens = torch.randint(0, probs.shape[-1], (rows, nodes), generator=rng)
    for b in range(rows):
        for n in range(nodes):
            kids = [k for k in draws[b, n].tolist() if k >= 0]
            if not kids:
                continue
            replace = kinds[b, n, -1] == DrawKind.WITH
            law = (
                probs[b, n] if not bool((probs[b, n] == 1).any()) else torch.ones_like(probs[b, n])
            )
            support = int((law > 0).sum())
            count = len(kids) if replace else min(len(kids), support)
            chosen = torch.multinomial(law, count, replacement=bool(replace), generator=rng)
            tokens[b, kids[:count]] = chosen
    return tokens


def twin(op, draft, scores, draws):
    """The rule's own PyTorch code in float64, with the same uniforms and the same race."""

    def double(laws):
        if laws is None:
            return None
        floor = None if laws.floor_BR is None else laws.floor_BR.double()
        return laws._replace(
            logits_BRV=laws.logits_BRV.double(),
            inverse_temperature_B=laws.inverse_temperature_B.double(),
            floor_BR=floor,
            lse_BR=None,
        )

    with ops.use("reference"):
        return verifiers.get(RULES[op])(
            draft._replace(laws=double(draft.laws)),
            Scores(double(scores.laws)),
            with_race(draws, scores),
        )


def with_race(draws, scores):
    """The residual race injected, so that every backend draws by the same algorithm."""
    if draws.race_BV is not None:
        return draws
    return draws._replace(race_BV=noise.residual_race(draws, scores.laws.logits_BRV.shape[-1]))


def same(ours, theirs):
    """Path, count and next token agree."""
    assert ours.count_B.tolist() == theirs.count_B.tolist()
    assert ours.path_BD.tolist() == theirs.path_BD.tolist()
    assert ours.next_B.tolist() == theirs.next_B.tolist()


def matrix():
    """(op, case) pairs: every feature with every operation that it touches."""
    found = []
    for dtype in DTYPES:
        for vocab in (31, 33, 97):
            for kept in (False, True):
                found.append(("chain", Case(dtype=dtype, vocab=vocab, kept=kept)))
    for op in ("chain", "block"):
        for seed in range(2):
            found.append((op, Case(seed=seed, counts=(1,) * 5, vocab=40, spread=0.4)))
        for change in (
            {"temperature": 0.7},
            {"floor": True},
            {"floor": True, "temperature": 1.3},
            {"mask": True},
            {"ragged": True},
            {"ragged": True, "kept": True},
            {"spread": 0.0},
            {"spread": 3.0},
            {"hot": "some"},
            {"mixed": True},
            {"kind": DrawKind.WITH},
            {"kind": DrawKind.FIXED},
            {"counts": (1,)},
            {"batch": 1},
            {"batch": 3, "counts": (1, 1)},
            {"floor": True, "kept": True, "dtype": "bf16"},
            {"vocab": 130, "counts": (1, 1)},
        ):
            found.append((op, Case(**change)))
    for dtype in DTYPES:
        found.append(("block", Case(dtype=dtype, counts=(1, 1, 1, 1))))
    for op in ("tree", "traversal"):
        for counts in ((2,), (2, 2), (3, 1), (1, 2)):
            for kind in (DrawKind.WITHOUT, DrawKind.WITH, DrawKind.FIXED):
                found.append((op, Case(counts=counts, kind=kind, batch=1, vocab=33)))
    for change in (
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"floor": True},
        {"mask": True},
        {"kept": True},
        {"temperature": 0.7},
        {"spread": 0.0},
        {"spread": 3.0},
        {"mixed": True},
        {"hot": "some"},
        {"ragged": True},
        {"batch": 2},
        {"counts": (4,)},
        {"counts": ()},
    ):
        for op in ("tree", "traversal"):
            found.append((op, Case(**({"counts": (2, 2), "batch": 1, "vocab": 33} | change))))
    for seed in range(6):
        near = {"batch": 2, "vocab": 33, "spread": 0.3, "seed": seed}
        found.append(("traversal", Case(counts=(2, 2, 1), mixed=seed % 2 == 1, **near)))
    for counts in ((1, 1, 1), (2, 2)):
        for hot in ("none", "some", "all"):
            for dtype in DTYPES:
                found.append(
                    ("match", Case(counts=counts, hot=hot, dtype=dtype, kind=DrawKind.FIXED))
                )
    for change in (
        {"floor": True}, {"mask": True}, {"ragged": True}, {"temperature": 0.5}, {"vocab": 33},
        {"vocab": 32}, {"kind": DrawKind.WITHOUT}, {"counts": ()}, {"counts": (3, 1)},
    ):  # fmt: skip
        found.append(("match", Case(**({"counts": (1, 1)} | change))))
    return found
