"""beta along texts of the target: its distribution, its autocorrelation, and what calls then give.

beta at a prefix is sum min(p, q), the chance that a token drafted there is accepted (Leviathan et
al. 2023, definition 3.1); alpha is its mean, and the paper's formulas take betas as independent.

Given the text x that was emitted, the token at place i was an accepted draft, if it was drafted,
with probability min(1, q(x_i) / p(x_i)), whatever came before: so from these numbers alone the
steps of a chain of gamma tokens are a renewal process, and `calls` adds up its law. It is exact for
the rejection rule; with betas in their place it is what a recorded sequence of betas would say.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider import SamplingParams, Speculator, ops
from outrider.types import LanguageModel
from outrider_lab.bench import intervals
from outrider_lab.certify.laws import score
from outrider_lab.papers import alpha_measure, record
from outrider_lab.papers.alpha_drafters import AlphaSource
from outrider_lab.papers.alpha_tasks import asked

LAGS = (1, 2, 3, 4, 8)


@torch.inference_mode()
def recorded(
    pair: Speculator,
    tasks: alpha_measure.Tasks,
    model: LanguageModel,
    law: SamplingParams,
    *,
    new_tokens: int,
    seed: int,
) -> record.Row:
    """beta and min(1, q / p) at every place of a text of the target for each task."""
    found: record.Row = {"beta": [], "kept": []}
    for first in range(0, len(tasks), alpha_measure.ROWS):
        part = tasks[first : first + alpha_measure.ROWS]
        batch = [
            asked(task, replace(law, seed=seed + first + n), pair, new_tokens)
            for n, task in enumerate(part)
        ]
        texts = alpha_measure._written(pair, batch)
        scored = score(pair.engine.target, texts, law)
        token = scored.token_BT[scored.valid_BT][:, None]
        target = ops.probs(scored.laws)[scored.valid_BT]
        draft = AlphaSource(model).laws(texts, law)
        beta = torch.minimum(target, draft).sum(-1).clamp(max=1)  # float32 may round above it
        kept = (draft.gather(1, token) / target.gather(1, token))[:, 0].clamp(max=1)
        sizes = [len(text.new) for text in texts]
        for name, values in (("beta", beta), ("kept", kept)):
            found[name] += [part.tolist() for part in torch.split(values.double(), sizes)]
    return found


def calls(kept: Sequence[float], gamma: int) -> float:
    """Expected target calls for a text whose drafted tokens are accepted with these chances.

    >>> calls([1.0] * 6, 2), calls([0.0] * 6, 2), calls([0.5, 0.5], 1)
    (2.0, 6.0, 1.5)
    """
    starts = np.zeros(len(kept) + gamma + 1)
    starts[0] = 1
    for at in range(len(kept)):
        reach = starts[at]
        for place in range(at, min(at + gamma, len(kept))):
            starts[place + 1] += reach * (1 - kept[place])
            reach *= kept[place]
        if at + gamma < len(kept):
            starts[at + gamma + 1] += reach
    return float(starts[: len(kept)].sum())


def tokens_per_call(texts: Sequence[Sequence[float]], gamma: int) -> intervals.Interval:
    """Predicted from recorded sequences, over prompts."""
    lengths = [float(len(text)) for text in texts]
    return intervals.quotient(lengths, [calls(text, gamma) for text in texts], intervals.LOG)


def autocorrelation(texts: Sequence[Sequence[float]], lag: int) -> intervals.Interval:
    """Of beta at places that are `lag` tokens apart in one text, about that text's mean.

    Sums over texts of covariance over variance. About the mean of all texts it would be a matter of
    the few prompts that lie apart, and no interval of twenty prompts would hold it (0.91 of 0.95 in
    `tests/bench/test_coverage.py`). Of independent betas it is a little below 0: `independent`.
    """
    above, below = [], []
    for text in texts:
        apart = np.asarray(text) - np.mean(text)
        above.append(float((apart[:-lag] * apart[lag:]).mean()) if len(text) > lag else 0.0)
        below.append(float((apart**2).mean()))
    if not any(below):
        return intervals.mean([0.0] * len(below))
    return intervals.quotient(above, below)


def independent(texts: Sequence[Sequence[float]]) -> float:
    """The autocorrelation of independent betas about the means of texts as long as these.

    >>> independent([[0.5] * 11] * 3)
    -0.1
    """
    return -1 / (float(np.mean([len(text) for text in texts])) - 1)


def distribution(texts: Sequence[Sequence[float]]) -> list[record.Row]:
    """Shares of places by tenths of beta, with intervals over prompts."""
    rows: list[record.Row] = []
    for tenth in range(10):
        low, high = tenth / 10, (tenth + 1) / 10
        inside = [float(sum(low <= b and (b < high or tenth == 9) for b in text)) for text in texts]
        share = intervals.quotient(inside, [float(len(t)) for t in texts], intervals.SHARE)
        row = {"beta": f"{low:.1f} to {high:.1f}", "share": share.value, "95 %": share.text()}
        rows.append(row)
    return rows
