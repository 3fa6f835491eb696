"""What speculation does to the quality of an encoder-decoder's texts: nothing, beyond chance.

BLEU by sacrebleu, ROUGE by rouge-score, on whole texts against the rows' `reference`; at
temperature 0 the texts themselves must be those of plain decoding. The paper prints no scores, for
the same reason.
"""

import statistics
from collections.abc import Sequence

from outrider import Engine, Request, Root, Sampling, Speculator
from outrider.errors import ConfigurationError
from outrider.lab.papers import record
from outrider.lab.papers.alpha_drafters import Copies, Source, Sources
from outrider.lab.papers.alpha_measure import ROWS, decoded, rule_at
from outrider.lab.papers.alpha_tasks import Rows, asked, longest
from outrider.types import Verifier

PLAIN = "plain decoding"


def table(
    pair: Speculator,
    rows: Rows,
    tasks: Sequence[Request],
    sources: Sources,
    store: record.Store,
    *,
    judged: int,
    new_tokens: int,
    seed: int,
) -> list[record.Row]:
    """Scores of every drafter's texts at T = 0 and T = 1; none if no row has a reference."""
    known = [n for n, row in enumerate(rows) if row.get("reference")][:judged]
    if not known:
        return []
    scorer()
    meant = [rows[n]["reference"] for n in known]
    read = [tasks[n] for n in known]
    found: list[record.Row] = []
    for t in (0.0, 1.0):
        rules = {name: _rule(source, t) for name, source in sources.items()}
        engines = {PLAIN: Engine(pair.engine.target, Root())} | {
            name: Engine(pair.engine.target, source.drafter(4), rules[name])
            for name, source in sources.items()
        }
        plain: list[str] = []
        for name, engine in engines.items():
            row = store.get(f"texts {name} {t}", _texts, pair, engine, read, t, seed)
            texts = row["texts"]
            plain = plain or texts
            same = sum(a == b for a, b in zip(texts, plain, strict=True)) / len(texts)
            found.append(
                {"drafter": name, "T": t, "texts": len(texts)}
                | scores(texts, meant)
                | {"as plain": same}
            )
    return found


def _rule(source: Source | Copies, temperature: float) -> Verifier | None:
    return rule_at(temperature, 1.0) if isinstance(source, Source) else None


def _texts(
    pair: Speculator, engine: Engine, tasks: Sequence[Request], temperature: float, seed: int
) -> record.Row:
    """Whole texts, side by side in groups."""
    texts: list[str] = []
    for first in range(0, len(tasks), ROWS):
        batch = [
            asked(task, Sampling(temperature, seed=seed + first + n), pair, longest(task))
            for n, task in enumerate(tasks[first : first + ROWS])
        ]
        ids, _ = decoded(engine, batch)
        texts += [pair.tokenizer.decode(line, skip_special_tokens=True) for line in ids]
    return {"texts": texts}


def scorer() -> None:
    """Say what is missing before anything is measured."""
    try:
        import rouge_score  # noqa: F401
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"scores against references need sacrebleu and rouge-score; {error.name} is not "
            "installed; install the extra with pip install 'outrider[bench]', or give rows without "
            "a reference"
        ) from error


def scores(texts: Sequence[str], meant: Sequence[str]) -> record.Row:
    """BLEU and ROUGE-2 and -L (F, means), all of 100, and the share of texts exactly as meant.

    >>> scores(["a b c d e"], ["a b c d e"])["ROUGE-L"]
    100.0
    """
    import sacrebleu
    from rouge_score import rouge_scorer

    kinds = ["rouge2", "rougeL"]
    rouge = rouge_scorer.RougeScorer(kinds)
    every = [rouge.score(right, text) for text, right in zip(texts, meant, strict=True)]
    mean = {kind: 100 * statistics.fmean(one[kind].fmeasure for one in every) for kind in kinds}
    exact = statistics.fmean(a == b for a, b in zip(texts, meant, strict=True))
    return {
        "BLEU": sacrebleu.corpus_bleu(list(texts), [list(meant)]).score,
        "ROUGE-2": mean["rouge2"],
        "ROUGE-L": mean["rougeL"],
        "exact": exact,
    }
