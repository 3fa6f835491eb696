"""What beam search costs on a CPU: transformers, a tree on the same forward, the lean decoder.

    OUTRIDER_MODELS=models python -m benchmarks.beams [--only whisper] [--repeats 3]

The folder holds `whisper-base` and `speech` (`training.whisper_recordings`), `smollm2`, and the
wheel of ANNalog in `annalog`; what is missing is left out. One thread, its CPU time, every input by
every arm in turn, `--repeats` times, after one call of each that is not timed. Encoders are not
timed: their states are given to all arms. Arms that score ahead share what they learn of its worth
over all inputs, as one long recording does.

    transformers       its own beam search, float32
    tree               beams as one tree, the same float32 forward
    tree, ahead        with copies: of the greedy transcript (Whisper), the source (ANNalog), the
                       text (SmolLM2)
    lean ...           the lean decoder in float32 and bfloat16; greedy is plain decoding with it

Then what `LookaheadDepth` expects of each depth, from the calls of the deepest, against what was
measured (Whisper: the lean decoder in bfloat16). "of tree" is the speed beside the same arm without
copies.

"same" counts best texts that equal transformers'; "slots" are the most that a search had in use at
once, beside those of one greedy text.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "real"))

import annalog
import torch
import transformers
from training.whisper_recordings import asterisk, joined
from training.whisper_speech import RATE
from transformers import GenerationMixin

from outrider import (
    Beams,
    Engine,
    PromptLookup,
    ReferenceLookup,
    Request,
    Root,
    SamplingParams,
    StopConditions,
)
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.search import search
from outrider.engine.engine_run import EngineRun
from outrider.models import adapt
from outrider.models.calibrate import Setting
from outrider.models.sources import ModelSource
from outrider.types import Drafter, Inputs, LanguageModel

FIRST, END = (50258, 50259, 50359, 50363), 50257  # English, transcribe, no timestamps
DEPTHS = (1, 2, 3, 4, 6)
AHEAD = ", ahead"  #: what arms that score ahead are called beside the same without
CPU = torch.device("cpu")
PROMPTS = (
    "The three primary colours are",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: What is the capital of France?\nA:",
    "One, two, three, four, five, six,",
)


class Made(NamedTuple):
    """The best text of an input, and what it took."""

    tokens: list[int]
    steps: int
    calls: int
    nodes: int
    slots: int = 0


Arm = Callable[[int], Made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=os.environ.get("OUTRIDER_MODELS"))
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("--expected", action="store_true", help="calls alone, nothing timed")
    parser.add_argument("--only", choices=CASES, action="append")
    asked = parser.parse_args()
    if asked.models is None:
        parser.error("say where the models are: --models or OUTRIDER_MODELS")
    asked.models = Path(asked.models)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name in asked.only or CASES:
            CASES[name](asked)


def measure(arms: dict[str, Arm], count: int, repeats: int, states: int = 0) -> None:
    """Every input by every arm in turn; a table. `states` are slots of the encoder's."""
    made: dict[str, list[Made]] = {name: [] for name in arms}
    took = dict.fromkeys(arms, 0.0)
    for arm in arms.values():
        arm(0)
    for number in [*range(count)] * repeats:
        for name, arm in arms.items():
            started = time.thread_time()
            made[name].append(arm(number))
            took[name] += time.thread_time() - started
    first = next(iter(arms))
    for name, texts in made.items():
        steps, calls = sum(m.steps for m in texts), sum(m.calls for m in texts)
        same = sum(a.tokens == b.tokens for a, b in zip(texts, made[first], strict=True))
        line = f"  {name:30s} {1e3 * took[name] / max(steps, 1):8.2f} ms a step"
        line += f" {took[first] / took[name]:6.2f}x, same {same} of {len(texts)}"
        alone = name.removesuffix(AHEAD)
        if alone != name:
            line += f", {took[alone] / took[name]:.3f} of {alone}"
        if calls:
            line += f", {calls / steps:.2f} calls a step"
            line += f", {sum(m.nodes for m in texts) / calls:.1f} texts a call"
        slots = max(m.slots for m in texts)
        if slots:
            one = max(len(m.tokens) + len(FIRST) for m in texts)
            line += (
                f", {slots + states} slots ({(slots + states) / (one + states):.2f} of one row's)"
            )
        print(line, flush=True)


def expected(
    target: LanguageModel, drafters: Sequence[Drafter], requests: Sequence[Request], beams: Beams
) -> None:
    """Calls a step as `LookaheadDepth` expects them from the last drafter's calls, and as they
    are."""
    found: dict[int, tuple[float, LookaheadDepth]] = {}
    for drafter in drafters:
        depth, calls, steps = drafter.shapes[0].max_depth, 0, 0
        whole = LookaheadDepth(depth, adapts=False)
        for request in requests:
            pace = LookaheadDepth(depth, adapts=False)
            counts = search(target, drafter, [request], beams, False, pace).counts
            calls, steps = calls + counts.calls, steps + counts.steps
            whole.answered += pace.answered
        found[depth] = calls / steps, whole
    deepest = found[max(found)][1]
    for depth, (measured, _) in found.items():
        told = 1 / deepest.expected(depth)
        print(
            f"  {depth} ahead: {measured:.3f} calls a step, {told:.3f} expected "
            f"({100 * (told / measured - 1):+.0f} %)",
            flush=True,
        )


def beamed(
    target: LanguageModel,
    drafter: Drafter,
    requests: Sequence[Request],
    beams: Beams,
) -> Arm:
    """A search of each request; what is learned of scoring ahead is kept."""
    pace = LookaheadDepth(drafter.shapes[0].max_depth)

    def run(number: int) -> Made:
        found = search(target, drafter, [requests[number]], beams, pace=pace)
        counts = found.counts
        best = found.hypotheses[0][0].token_ids
        return Made(best, counts.steps, counts.calls, counts.nodes, counts.slots)

    return run


def greedy(target: LanguageModel, requests: Sequence[Request]) -> Arm:
    engine = Engine(target, Root())

    def run(number: int) -> Made:
        one, tokens = EngineRun(engine, 1), []
        one.submit(requests[number])
        for block in one:
            tokens += block.token_ids
        return Made(tokens, len(tokens), 0, 0)

    return run


def plain(generate: Callable[[int], Any], start: int, end: int | None) -> Arm:
    """transformers' own search. It writes into the encoder output it is given: give it a copy."""

    def run(number: int) -> Made:
        out = generate(number)
        tokens = out[0, start:].tolist()
        if end in tokens:
            tokens = tokens[: tokens.index(end) + 1]
        return Made(tokens, len(tokens), 0, 0)

    return run


def whisper(asked: Any) -> None:
    folder = asked.models / "whisper-base"
    if not folder.is_dir() or not (asked.models / "speech").is_dir():
        return
    source = ModelSource(folder, "target")
    network: Any = source.model("float32", CPU)
    rules = network.generation_config
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    windows = [one.samples for one in joined(asterisk(asked.models / "speech", "en"))]
    bans = dict.fromkeys(rules.suppress_tokens, -float("inf"))
    how = SamplingParams(
        0, logit_bias=bans, begin_suppress_tokens=tuple(rules.begin_suppress_tokens)
    )
    states, inputs = [], []
    for samples in windows[: asked.windows]:
        columns = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        frames = columns.transpose(1, 2)
        states.append(network.get_encoder()(columns))
        inputs.append(Inputs(None, frames, torch.ones(frames.shape[:2], dtype=torch.bool)))

    def theirs(number: int) -> Any:
        return GenerationMixin.generate(
            network,
            encoder_outputs=copy(states[number]),
            decoder_input_ids=torch.tensor([FIRST]),
            max_new_tokens=220,
            num_beams=asked.beams,
            do_sample=False,
        )

    def requests(target: LanguageModel) -> list[Request]:
        limits = StopConditions(220, (END,))
        return [Request(FIRST, how, limits, target.encode(one)) for one in inputs]

    beams, ahead = Beams(asked.beams), ReferenceLookup(asked.ahead)
    target: LanguageModel = adapt(network)
    own = requests(target)
    texts = [greedy(target, own)(number).tokens[:-1] for number in range(len(own))]

    def copied(each: Sequence[Request]) -> list[Request]:
        return [replace(one, reference=text) for one, text in zip(each, texts, strict=True)]

    arms = {
        "transformers": plain(theirs, len(FIRST), END),
        "tree": beamed(target, Root(), own, beams),
        f"tree{AHEAD}": beamed(target, ahead, copied(own), beams),
    }
    for dtype in ("float32", "bfloat16"):
        lean = source.driven(Setting(1, dtype, True), CPU, network.config.vocab_size)
        each = requests(lean)
        arms[f"lean {dtype} greedy"] = greedy(lean, each)
        arms[f"lean {dtype}"] = beamed(lean, Root(), each, beams)
        arms[f"lean {dtype}{AHEAD}"] = beamed(lean, ahead, copied(each), beams)
    print(f"Whisper base, {asked.beams} beams, {len(own)} windows")
    if not asked.expected:
        measure(arms, len(own), asked.repeats, int(network.config.max_source_positions))
    expected(lean, [ReferenceLookup(depth) for depth in DEPTHS], copied(each), beams)


def molecules(asked: Any) -> None:
    path = annalog.wheel(asked.models)
    if path is None:
        return
    from test_annalog import MOLECULES

    network, tokens = annalog.model(path), annalog.vocabulary(path)
    ids = [torch.tensor([annalog.source(tokens, one)]) for one in MOLECULES]
    target: LanguageModel = adapt(network)
    requests = [
        Request(
            (annalog.START,),
            SamplingParams(0),
            StopConditions(98, (annalog.END,)),
            target.encode(Inputs(one, None, torch.ones_like(one).bool())),
        )
        for one in ids
    ]
    states = [network.get_encoder()(input_ids=one) for one in ids]

    def theirs(number: int) -> Any:
        return network.generate(
            encoder_outputs=copy(states[number]), max_new_tokens=98, num_beams=asked.beams
        )

    beams = Beams(asked.beams)
    arms = {
        "transformers": plain(theirs, 1, annalog.END),
        "tree": beamed(target, Root(), requests, beams),
        f"tree{AHEAD}": beamed(target, ReferenceLookup(asked.ahead), requests, beams),
    }
    print(f"ANNalog, {asked.beams} beams, {len(ids)} molecules")
    if not asked.expected:
        measure(arms, len(ids), asked.repeats)
    expected(target, [ReferenceLookup(depth) for depth in DEPTHS], requests, beams)


def chat(asked: Any) -> None:
    folder = asked.models / "smollm2"
    if not folder.is_dir():
        return
    network: Any = ModelSource(folder, "target").model("float32", CPU)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]
    end, target = network.generation_config.eos_token_id, adapt(network)
    requests = [
        Request(one[0].tolist(), SamplingParams(0), StopConditions(48, (end,))) for one in ids
    ]

    def theirs(number: int) -> Any:
        out = network.generate(
            ids[number],
            attention_mask=torch.ones_like(ids[number]),
            max_new_tokens=48,
            num_beams=asked.beams,
            do_sample=False,
        )
        return out[:, ids[number].shape[1] :]

    beams = Beams(asked.beams)
    arms = {
        "transformers": plain(theirs, 0, end),
        "tree": beamed(target, Root(), requests, beams),
        f"tree{AHEAD}": beamed(target, PromptLookup(asked.ahead), requests, beams),
    }
    print(f"SmolLM2, {asked.beams} beams, {len(ids)} prompts of 48 tokens")
    if not asked.expected:
        measure(arms, len(ids), asked.repeats)
    expected(target, [PromptLookup(depth) for depth in DEPTHS], requests, beams)


CASES: dict[str, Callable[[Any], None]] = {
    "whisper": whisper,
    "molecules": molecules,
    "chat": chat,
}

if __name__ == "__main__":
    main()
