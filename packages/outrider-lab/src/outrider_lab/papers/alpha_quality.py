"""What speculation does to the quality of an encoder-decoder's texts: nothing, beyond chance.

BLEU by sacrebleu, ROUGE by rouge-score, on whole texts against the rows' `reference`; at
temperature 0 the texts themselves must be those of plain decoding. Above it they are other texts of
the same law, so ROUGE-L is compared text by text with plain decoding's by two one-sided tests
(`lab.equivalence`). The paper prints no scores, for the same reason.
"""

from collections.abc import Sequence
from dataclasses import replace

from outrider import Engine, Request, Root, SamplingParams, Speculator
from outrider.types import Verifier
from outrider_lab.bench import intervals
from outrider_lab.equivalence import MARGIN, equivalence
from outrider_lab.papers import record, score
from outrider_lab.papers.alpha_drafters import AlphaCopies, AlphaSource, Sources
from outrider_lab.papers.alpha_measure import ROWS, decoded, rule_at
from outrider_lab.papers.alpha_tasks import Rows, asked, longest

PLAIN = "plain decoding"


def tables(
    pair: Speculator,
    rows: Rows,
    tasks: Sequence[Request],
    sources: Sources,
    store: record.Store,
    *,
    scored: int,
    new_tokens: int,
    seed: int,
    top_p: float = 1.0,
) -> record.Tables:
    """Every drafter's texts at T = 0 and T = 1; none if no row has a reference.

    quality        their scores
    quality-equal  whether they are worth what plain decoding's are
    """
    known = [n for n, row in enumerate(rows) if row.get("reference")][:scored]
    if not known:
        return {}
    score.ready()
    meant = [rows[n]["reference"] for n in known]
    read = [tasks[n] for n in known]
    found: record.Tables = {"quality": [], "quality-equal": []}
    for t in (0.0, 1.0):
        rules = {name: _rule(source, t) for name, source in sources.items()}
        engines = {PLAIN: Engine(pair.engine.target, Root())} | {
            name: Engine(pair.engine.target, source.drafter(4), rules[name])
            for name, source in sources.items()
        }
        plain: list[str] = []
        for name, engine in engines.items():
            how = SamplingParams(t, top_p=top_p, seed=seed)
            row = store.get(f"texts {name} {t}", _texts, pair, engine, read, how)
            texts = row["texts"]
            plain = plain or texts
            same = sum(a == b for a, b in zip(texts, plain, strict=True)) / len(texts)
            arm = {"drafter": name, "T": t}
            row = arm | {"texts": len(texts)} | scores(texts, meant)
            found["quality"].append(row | {"as plain": same})
            if name != PLAIN:
                found["quality-equal"].append(arm | equal(texts, plain, meant))
    return found


def equal(texts: Sequence[str], plain: Sequence[str], meant: Sequence[str]) -> record.Row:
    """Whether `texts` are worth what `plain` decoding's are: ROUGE-L (of 1), within MARGIN.

    >>> same = ["a b"] * 20
    >>> equal(same, same, same)["within 0.1"]
    'equal'
    """
    each = score.ROUGE_L.each
    assert each is not None, "it is a mean over texts"
    triples = zip(texts, plain, meant, strict=True)
    gaps = [each(text, right) - each(other, right) for text, other, right in triples]
    return equivalence(gaps, MARGIN).row()


def _rule(source: AlphaSource | AlphaCopies, temperature: float) -> Verifier | None:
    return rule_at(temperature, 1.0) if isinstance(source, AlphaSource) else None


def _texts(
    pair: Speculator, engine: Engine, tasks: Sequence[Request], how: SamplingParams
) -> record.Row:
    """Whole texts, side by side in groups."""
    texts: list[str] = []
    for first in range(0, len(tasks), ROWS):
        batch = [
            asked(task, replace(how, seed=(how.seed or 0) + first + n), pair, longest(task))
            for n, task in enumerate(tasks[first : first + ROWS])
        ]
        ids, _ = decoded(engine, batch)
        texts += [pair.tokenizer.decode(line, skip_special_tokens=True) for line in ids]
    return {"texts": texts}


def scores(texts: Sequence[str], meant: Sequence[str]) -> record.Row:
    """BLEU and ROUGE-2 and -L, all of 100 and with intervals, and the share exactly as meant.

    >>> scores(["a b c d e"], ["a b c d e"])["ROUGE-L"]
    100.0
    """
    found: record.Row = {}
    for kind, most in ((score.BLEU, 1), (score.ROUGE_2, 100), (score.ROUGE_L, 100)):
        reached = kind.interval(texts, meant)
        found[kind.name] = most * reached.value
        if len(texts) > 1:
            found[f"{kind.name} 95 %"] = f"[{most * reached.low:.1f}, {most * reached.high:.1f}]"
    same = [float(a == b) for a, b in zip(texts, meant, strict=True)]
    exact = intervals.mean(same, intervals.SHARE)
    return found | {"exact": exact.value, "exact 95 %": exact.text(2)}
