"""One step of a beam search with patience (Kasai et al. 2022), as openai-whisper counts it.

Candidates are ranked together; those that end before num_beams that go on have been met are
finished, and the search ends once round(num_beams * patience) are. Running beams fill what is
missing at the limit.
"""

from torch import Tensor

from outrider.engine.beam_search.prefix import Prefix
from outrider.engine.beam_search.step import DEAD, FinishedBeam, Rules, State, ranked


def patient_step(state: State, logs_WV: Tensor, rules: Rules) -> State:
    """The next state, from log-probabilities float32 [W, V] of the running beams."""
    width, wanted = rules.beams.num_beams, most(rules)
    best_C, texts, trails, _, close = ranked(state, logs_WV, rules)
    scores = best_C.tolist()
    running: list[int] = []
    ended: list[FinishedBeam] = []
    for at, text in enumerate(texts):
        if len(running) == width:
            break
        if text.token in rules.stops or (rules.ends is not None and rules.ends(text)):
            ended.append(FinishedBeam(_final(scores[at], text, rules, 1), text, trails[at]))
        else:
            running.append(at)
    room = max(wanted - len(state.finished), 0)
    finished = [*state.finished, *ended[:room]]
    over = len(finished) >= wanted or texts[0].length >= rules.limit
    if over and len(finished) < width:
        alive = [at for at in running if scores[at] > DEAD / 2]
        fill = [
            FinishedBeam(_final(scores[at], texts[at], rules, 0), texts[at], trails[at])
            for at in alive
        ]
        finished += fill[: width - len(finished)]
    if over:
        finished.sort(key=lambda one: -one.score)
    places = running + running[-1:] * (width - len(running))
    scores_W = best_C.new_full((width,), DEAD)
    scores_W[: len(running)] = best_C[running]
    return State(
        tuple(texts[at] for at in places),
        scores_W,
        tuple(trails[at] for at in places),
        tuple(finished),
        True,
        over,
        close,
    )


def most(rules: Rules) -> int:
    """Finished beams at which the search ends."""
    assert rules.beams.patience is not None
    return round(rules.beams.num_beams * rules.beams.patience)


def _final(score: float, text: Prefix, rules: Rules, stops: int) -> float:
    """The score of a text of which `stops` tokens count in no length."""
    length = max(text.length - rules.prompt - stops, 1)
    return float(score / length**rules.beams.length_penalty)
