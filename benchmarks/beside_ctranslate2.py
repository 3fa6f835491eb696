"""A Marian kind of encoder-decoder beside CTranslate2: ANNalog's molecules, greedy and five beams.

    python benchmarks/beside_ctranslate2.py --wheels models/annalog [--rounds 5] [--beams 5]
    python benchmarks/beside_ctranslate2.py --random [--texts 4]
    python benchmarks/beside_ctranslate2.py --wheels models/annalog --where   # ours alone, by part

The folder holds ANNalog's wheel; `pip install ctranslate2`. The model is converted here.
`--random`: random weights of the shape of opus-mt's translators (six layers each, width 512, 32,000
tokens), 48 tokens a text: what steps take where a model is not tiny; drafts find nothing in such
texts. All in one process on one thread each, engines in turn, one text at a time: processor time of
the whole process, the least of the rounds. OUTRIDER_ISA and CT2_FORCE_CPU_ISA cap either side.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "real"))

import annalog
import torch
from test_annalog import MOLECULES
from transformers import GenerationConfig, MarianConfig, MarianMTModel

import outrider
from outrider import Beams, SamplingParams, Stop
from outrider.models.bart import BartRunner
from outrider.models.bart_encoder import TextEncoder
from outrider.models.cpu_kernels.decoder_layers import DecoderLayers
from outrider.models.cpu_kernels.packed_linear import PackedLinear

#: a source -> the best text's tokens, without their ends
Arm = Callable[[list[int]], list[int]]


class Case(NamedTuple):
    """A model, and what it reads."""

    model: Callable[[], Any]  #: makes it anew
    tokens: Sequence[str]
    sources: list[list[int]]
    most: int  #: tokens of a text
    start: int
    end: int


def molecules(wheels: Path) -> Case:
    """ANNalog."""
    wheel = next(iter(sorted(wheels.glob("annalog-*.whl"))), None)
    if wheel is None:
        sys.exit(f"no wheel of ANNalog; pip download --no-deps --dest {wheels} annalog")
    tokens = annalog.vocabulary(wheel)
    sources = [annalog.source(tokens, one) for one in MOLECULES]
    return Case(lambda: annalog.model(wheel), tokens, sources, 98, annalog.START, annalog.END)


def random_weights(texts: int) -> Case:
    """A translator's shape, and sources of 16 to 40 tokens."""
    sizes = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}
    sides = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}
    special = {"pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
    config = MarianConfig(
        vocab_size=32000,
        d_model=512,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        forced_eos_token_id=None,
        **special,
        **sides,
    )

    def model() -> Any:
        torch.manual_seed(0)
        made = MarianMTModel(config).eval()
        made.generation_config = GenerationConfig(**special)
        return made

    random = torch.Generator().manual_seed(1)
    lengths = [16 + 24 * number // max(texts - 1, 1) for number in range(texts)]
    sources = [torch.randint(2, 32000, (n,), generator=random).tolist() for n in lengths]
    return Case(model, [f"<{number}>" for number in range(32000)], sources, 48, 1, 0)


def converted(model: Any, case: Case, folder: str) -> None:
    """The model in CTranslate2's format; its decoder begins with a token, as Bart's does."""
    from ctranslate2.converters.transformers import BartLoader

    model.config.normalize_before = model.config.normalize_embedding = False
    spec = BartLoader().get_model_spec(model)
    tokens = case.tokens
    names = [*tokens, *(f"<unused {at}>" for at in range(len(tokens), model.config.vocab_size))]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.bos_token = spec.config.decoder_start_token = names[case.start]
    unknown = next(number for number in range(4) if number not in (case.start, case.end))
    spec.config.eos_token, spec.config.unk_token = names[case.end], names[unknown]
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)


def theirs(folder: str, case: Case, kind: str, beams: int) -> Arm:
    """CTranslate2's translator."""
    import ctranslate2

    translator = ctranslate2.Translator(folder, compute_type=kind, inter_threads=1, intra_threads=1)
    numbers = {token: number for number, token in enumerate(case.tokens)}

    def run(source: list[int]) -> list[int]:
        text = [[case.tokens[number] for number in source]]
        done = translator.translate_batch(text, beam_size=beams, max_decoding_length=case.most)
        return [numbers[token] for token in done[0].hypotheses[0]]

    return run


def ours(speculator: Any, case: Case, beams: int) -> Arm:
    """With nothing set, or plain decoding."""
    more = {} if beams == 1 else {"beams": Beams(beams)}

    def run(source: list[int]) -> list[int]:
        made = speculator.generate([source], SamplingParams(0), Stop(case.most), **more)
        return [t for t in made.completions[0].token_ids if t != case.end]

    return run


def transformers_own(model: Any, case: Case, beams: int) -> Arm:
    """transformers' `generate`."""

    def run(source: list[int]) -> list[int]:
        ids = model.generate(
            torch.tensor([source]), max_new_tokens=case.most, do_sample=False, num_beams=beams
        )[0, 1:].tolist()
        return ids[: ids.index(case.end)] if case.end in ids else ids

    return run


#: What takes time of a call, and what is part of another.
PARTS = {
    "encoder": TextEncoder,
    "decoder": BartRunner,
    "all layers in one call": DecoderLayers,
    "products that are called one by one": PackedLinear,
}


@contextmanager
def timed(spent: Counter[str]) -> Iterator[None]:
    """Processor seconds of each part, added up."""

    def of(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            started = time.process_time()
            try:
                return call(*given)
            finally:
                spent[part] += time.process_time() - started

        return run

    with ExitStack() as stack:
        for part, kind in PARTS.items():
            call = of(part, kind.__call__)
            stack.enter_context(mock.patch.object(kind, "__call__", call))
        yield


def where(arm: Arm, sources: Sequence[list[int]], rounds: int) -> str:
    """Milliseconds a token of the round that took least, and of its parts."""
    best: Counter[str] = Counter(all=float("inf"))
    for _ in range(rounds + 1):
        spent: Counter[str] = Counter()
        with timed(spent):
            started = time.process_time()
            count = sum(len(arm(source)) for source in sources)
            spent["all"] = time.process_time() - started
        if spent["all"] < best["all"]:
            best = spent
    parts = ", ".join(f"{part} {1e3 * best[part] / count:.3f}" for part in PARTS)
    return f"{1e3 * best['all'] / count:.3f} ms a token: {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--random", action="store_true", help="random weights of a larger shape")
    parser.add_argument("--wheels", type=Path, default=Path("models/annalog"))
    parser.add_argument("--out", type=Path, help="a folder for translated.json")
    parser.add_argument("--texts", type=int, default=4, help="of random weights")
    parser.add_argument("--where", action="store_true", help="the parts of our time alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    case = random_weights(asked.texts) if asked.random else molecules(asked.wheels)
    model = case.model()
    model.generation_config.max_length = None
    loaded = {
        kind: outrider.load(case.model(), dtype=kind, threads=1) for kind in ("float32", "int8")
    }
    if asked.where:
        for beams in (1, asked.beams):
            for kind, speculator in loaded.items():
                told = where(ours(speculator, case, beams), case.sources, asked.rounds)
                print(f"{beams} beams, {kind}: {told}", flush=True)
        return
    tables: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        converted(model, case, folder)
        for beams in (1, asked.beams):
            arms: dict[str, Arm] = {"transformers float32": transformers_own(model, case, beams)}
            for kind, speculator in loaded.items():
                arms[f"outrider {kind}"] = ours(speculator, case, beams)
                if beams == 1:
                    arms[f"outrider {kind}, plain"] = ours(speculator.plain(), case, beams)
                arms[f"CTranslate2 {kind}"] = theirs(folder, case, kind, beams)
            how = "greedy" if beams == 1 else f"{beams} beams"
            tables[how] = compared(arms, case.sources, asked.rounds)
            for row in tables[how]:
                said = ", ".join(f"{key} {value}" for key, value in row.items())
                print(f"{how}: {said}", flush=True)
    if asked.out is not None:
        about = (
            f"{len(case.sources)} texts, one thread, processor time of the process, the least of "
            f"so many rounds: {asked.rounds}."
        )
        asked.out.mkdir(parents=True, exist_ok=True)
        told = json.dumps({"about": about, "tables": tables})
        (asked.out / "translated.json").write_text(told + "\n")


def compared(arms: dict[str, Arm], sources: list[list[int]], rounds: int) -> list[dict[str, Any]]:
    """A row for each arm."""
    least: dict[str, list[float]] = {name: [float("inf")] * len(sources) for name in arms}
    texts: dict[str, list[list[int]]] = {name: [[]] * len(sources) for name in arms}
    for turn in range(rounds + 1):
        for number, source in enumerate(sources):
            for name, arm in arms.items():
                started = time.process_time()
                texts[name][number] = arm(source)
                took = time.process_time() - started
                if turn:  # the first one warms up
                    least[name][number] = min(least[name][number], took)
    meant = texts["transformers float32"]
    found = []
    for name in arms:
        took, count = sum(least[name]), sum(map(len, texts[name]))
        same = sum(a == b for a, b in zip(texts[name], meant, strict=True))
        kind = next(kind for kind in ("float32", "int8") if kind in name)
        other = f"CTranslate2 {kind}"
        speed = sum(least[other]) / sum(map(len, texts[other])) / (took / count)
        found.append(
            {
                "engine": name,
                "ms a token": 1e3 * took / count,
                "times CTranslate2's speed": speed,
                "texts as transformers'": f"{same} of {len(sources)}",
            }
        )
    return found


if __name__ == "__main__":
    main()
