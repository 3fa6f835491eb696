"""Acceptance, cost and speed of drafters: what Leviathan's formulas need, and what they predict."""

import time
from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider import (
    DraftModel,
    Engine,
    Request,
    RequestStats,
    Root,
    SamplingParams,
    Speculator,
    ops,
    verifiers,
)
from outrider.drafters.ngram_table import Table
from outrider.engine.engine_run import EngineRun, Observer
from outrider.types import Draft, LanguageModel, Scores, StepTensors, Verdict, Verifier
from outrider_lab import timeline
from outrider_lab.bench import intervals, measure
from outrider_lab.certify.laws import CertifiedText, score
from outrider_lab.papers import record
from outrider_lab.papers.alpha_drafters import AlphaCopies, AlphaSource, Sources
from outrider_lab.papers.alpha_tasks import asked, length
from outrider_lab.papers.toy import METHODS

LENIENCES = (1.0, 0.5, 0.3, 0.1)
ROWS = 16  #: texts that are written side by side
TEXTS = 32  #: that laws are recorded on, for two drafts at a node
Tasks = Sequence[Request]


class Tally:
    """What is accepted of drafts at the places of texts: sums by prompt and lenience."""

    def __init__(self, prompts: int) -> None:
        self.kept = np.zeros((prompts, len(LENIENCES)))
        self.places = np.zeros(prompts)

    def add(self, prompt: int, kept_PL: Tensor) -> None:
        """Shares accepted at P places of a text of this prompt."""
        self.kept[prompt] += kept_PL.sum(0).cpu().numpy()
        self.places[prompt] += len(kept_PL)

    def row(self) -> record.Row:
        """Lists over the prompts that have texts."""
        read = self.places > 0
        return {
            "prompts": np.flatnonzero(read).tolist(),
            "kept": self.kept[read].tolist(),
            "places": self.places[read].tolist(),
        }


def alpha_of(tally: record.Row, level: int = 0) -> intervals.Interval:
    """alpha at one lenience, by its number: all that was accepted over all places."""
    kept = [each[level] for each in tally["kept"]]
    return intervals.quotient(kept, tally["places"], intervals.SHARE)


def part_of(tally: record.Row, prompts: Container[int]) -> record.Row:
    """The tally of these prompts alone."""
    read = [at for at, prompt in enumerate(tally["prompts"]) if prompt in prompts]
    return {name: [tally[name][at] for at in read] for name in ("prompts", "kept", "places")}


@torch.inference_mode()
def alphas(
    pair: Speculator,
    tasks: Tasks,
    sources: Sources,
    temperature: float,
    *,
    tokens: int,
    new_tokens: int,
    seed: int,
    top_p: float = 1.0,
) -> record.Row:
    """What every drafter accepts at every lenience, on text that the target wrote, by prompt.

    Above temperature 0: sums of sum min(p / l, q). At temperature 0: how often the drafter's argmax
    x has p(x) >= l max p, with p at temperature 1; at l = 1 the agreement of the argmaxes. A
    drafter that copies has no law: its p(x) is that of the one token it proposes, 0 if it does not,
    at the steps of a run that drafts single tokens.

    Texts go on until there are `tokens`. Greedy text of a prompt is always the same, so there the
    texts are as long as that takes; where prompts have no more to say there are fewer tokens.
    """
    levels = torch.tensor(LENIENCES, dtype=torch.float64, device="cpu")
    laws = {name: source for name, source in sources.items() if isinstance(source, AlphaSource)}
    tallies = {name: Tally(len(tasks)) for name in sources}
    copies = {
        name: _Seen(levels, temperature, tallies[name]) for name in sources if name not in laws
    }
    seen = first = 0
    while seen < tokens and not (temperature == 0 and first >= len(tasks)):
        batch, prompts = [], []
        for number in range(first, first + ROWS):
            if temperature == 0 and number >= len(tasks):
                break  # greedy text repeats itself from here on
            prompts.append(number % len(tasks))
            task, most = tasks[prompts[-1]], new_tokens
            if temperature == 0:
                most = length(pair, task, new_tokens, -(-tokens // len(tasks)))
            batch.append(
                asked(
                    task, SamplingParams(temperature, top_p=top_p, seed=seed + number), pair, most
                )
            )
        first += len(batch)
        texts = _written(pair, batch)
        sizes = [len(text.new) for text in texts]
        scored = score(
            pair.engine.target,
            texts,
            SamplingParams(temperature, top_p=top_p) if temperature else SamplingParams(1.0),
        )
        law = ops.probs(scored.laws)[scored.valid_BT]
        seen += len(law)
        for name, source in laws.items():
            guess = source.laws(texts, SamplingParams(temperature, top_p=top_p))
            kept = _kept(law, guess, levels, greedy=temperature == 0)
            for prompt, part in zip(prompts, torch.split(kept, sizes), strict=True):
                tallies[name].add(prompt, part)
        for name, watch in copies.items():
            watch.prompts = prompts
            drafter = sources[name].drafter(1)
            decoded(Engine(pair.engine.target, drafter, "match"), batch, watch)
    return {"tallies": {name: tally.row() for name, tally in tallies.items()}, "tokens": seen}


def decoded(
    engine: Engine, batch: Sequence[Request], observe: Observer | None = None
) -> tuple[list[list[int]], EngineRun]:
    """The texts of these requests, all side by side, and the run that wrote them."""
    longest = max(request.end(engine.target.context)[0] for request in batch)
    run = EngineRun(
        engine, len(batch), longest + engine.drafter.shapes[0].max_nodes, observe=observe
    )
    run.submit_all(batch)
    run.close()
    texts: list[list[int]] = [[] for _ in batch]
    for block in run:
        texts[block.request_id] += block.token_ids
    return texts, run


def _written(pair: Speculator, batch: Sequence[Request]) -> list[CertifiedText]:
    plain = Engine(pair.engine.target, Root(), verifiers.get("match"))
    texts, _ = decoded(plain, batch)
    return [
        CertifiedText(
            tuple(request.prompt), tuple(text), request.sampling.seed or 0, request.source
        )
        for request, text in zip(batch, texts, strict=True)
    ]


def _kept(law: Tensor, guess: Tensor, levels: Tensor, *, greedy: bool) -> Tensor:
    """[positions, leniences]: what is accepted of a draft there."""
    if greedy:
        token = guess.argmax(-1, keepdim=True)
        share = (law.gather(1, token)[:, 0] / law.amax(-1)).double()
        return (share[:, None] >= levels).double()
    each = (torch.minimum(law / level, guess).sum(-1).double() for level in levels)
    return torch.stack(list(each), -1).clamp(max=1)  # sums of float32 may be a little above it


class _Seen:
    """Watches a run of single drafted tokens: what the target thinks of each of them."""

    def __init__(self, levels: Tensor, temperature: float, tally: Tally) -> None:
        self._levels, self._temperature, self._tally = levels, temperature, tally
        self.prompts: list[int] = []  #: of the run's requests

    def __call__(
        self, draft: Draft, scores: Scores, verdict: Verdict, block: StepTensors, rows: list[int]
    ) -> None:
        """One step of the run; a row without a proposal accepts nothing."""
        laws = scores.laws
        if self._temperature == 0:  # p is the law at temperature 1
            laws = laws._replace(
                inverse_temperature_B=torch.ones_like(laws.inverse_temperature_B), greedy="none"
            )
        law_BV = ops.probs(laws)[:, 0]
        kept_BL = torch.zeros(len(law_BV), len(self._levels), dtype=torch.float64, device="cpu")
        if draft.tokens_BN.shape[1] > 1:
            token_B1 = draft.tokens_BN[:, 1:2].clamp(min=0)
            guess_BV = torch.zeros_like(law_BV).scatter_(1, token_B1, 1.0)
            proposed_B = (draft.draws_BNK[:, 0, 0] > 0).expand(len(law_BV))
            kept_BL = _kept(law_BV, guess_BV, self._levels, greedy=self._temperature == 0)
            kept_BL = torch.where(proposed_B[:, None], kept_BL, 0.0)
        for row, request in enumerate(rows):
            self._tally.add(self.prompts[request], kept_BL[row : row + 1])


@torch.inference_mode()
def two_drafts(
    pair: Speculator,
    tasks: Tasks,
    model: LanguageModel,
    temperature: float,
    *,
    laws: int,
    seed: int,
    top_p: float = 1.0,
) -> record.Row:
    """Acceptance of two drafts at one node under each rule, and the bound, on recorded laws."""
    batch = [
        asked(
            tasks[i % len(tasks)],
            SamplingParams(temperature, top_p=top_p, seed=seed + i),
            pair,
            -(-laws // TEXTS),
        )
        for i in range(TEXTS)
    ]
    texts = _written(pair, batch)
    how = SamplingParams(temperature, top_p=top_p)
    sides = [
        source.laws(texts, how).double().numpy()
        for source in (AlphaSource(pair.engine.target), AlphaSource(model))
    ]
    p, q = (side / side.sum(-1, keepdims=True) for side in sides)
    places = np.zeros(len(tasks))
    which = np.repeat([i % len(tasks) for i in range(TEXTS)], [len(text.new) for text in texts])
    np.add.at(places, which, 1)
    found: record.Row = {}
    for name, rule in METHODS.items():
        if name == "one: coupled":  # V^2 at V = 4,096
            continue
        kept = np.zeros(len(tasks))
        np.add.at(kept, which, np.asarray(rule(p, q)))
        read = places > 0
        found[name] = intervals.quotient(
            kept[read].tolist(), places[read].tolist(), intervals.SHARE
        ).row()
    return found


def costs(pair: Speculator, tasks: Tasks, sources: Sources) -> record.Row:
    """c of each drafter: its time per drafted token over the target's time per plain step."""
    task = asked(tasks[0], SamplingParams(1.0, seed=0), pair, 48)
    plain = Engine(pair.engine.target, Root(), verifiers.get("match"))
    decoded(plain, [task])
    stats = decoded(plain, [task])[1].stats
    step = stats.score_ms / stats.engine_steps
    found: record.Row = {}
    for name, source in sources.items():
        if isinstance(source, AlphaCopies):
            engine = Engine(pair.engine.target, source.drafter(4))
            decoded(engine, [task])
            stats = decoded(engine, [task])[1].stats
            found[name] = stats.propose_ms / stats.engine_steps / 4 / step
            continue
        if isinstance(source.of, Table):
            context = torch.tensor([task.prompt[-8:]], device="cpu")
            started = time.perf_counter()
            for _ in range(50):
                source.of.probs(context)
            found[name] = 1e3 * (time.perf_counter() - started) / 50 / step
            continue
        timed = timeline.Timed(source.of)
        chained = Engine(pair.engine.target, DraftModel(timed, (1,) * 4))
        decoded(chained, [task])
        before = timed.seconds
        steps = decoded(chained, [task])[1].stats.engine_steps
        found[name] = 1e3 * (timed.seconds - before) / steps / 4 / step
    return found


def speed(
    pair: Speculator,
    fast: Engine,
    tasks: Tasks,
    temperature: float,
    *,
    repeats: int,
    new_tokens: int,
    seed: int,
    top_p: float = 1.0,
) -> record.Row:
    """Plain over speculative time per token, interleaved; times are without prefill."""
    plain = Engine(pair.engine.target, Root())
    arms = {"plain": plain, "fast": fast}
    for engine in arms.values():
        decoded(
            engine, [asked(tasks[0], SamplingParams(temperature, top_p=top_p, seed=seed), pair, 8)]
        )
    trials: list[measure.Trial[RequestStats]] = []
    for repeat, number, name in measure.turns(list(arms), len(tasks), repeats):
        task = asked(
            tasks[number],
            SamplingParams(temperature, top_p=top_p, seed=seed + number),
            pair,
            new_tokens,
        )
        stats = decoded(arms[name], [task])[1].stats
        trials.append(measure.Trial(name, number, repeat, stats.seconds, stats.new_tokens, stats))
    ratio = measure.ratio(trials, "fast", "plain")
    done = [trial.result for trial in trials if trial.arm == "fast"]
    tokens = sum(stats.new_tokens for stats in done) / sum(stats.steps for stats in done)
    return {"ratio": ratio.row(), "tokens a step": tokens}


def rule_at(temperature: float, lenience: float) -> Verifier:
    """The rule of A.5; at lenience 1 the exact one that it becomes."""
    if lenience == 1:
        return verifiers.get("match" if temperature == 0 else "rejection")
    from outrider_lab.verifiers.lossy import Lenience, LenienceArgmax

    return LenienceArgmax(lenience) if temperature == 0 else Lenience(lenience)
