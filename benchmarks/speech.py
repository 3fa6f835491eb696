"""What decoding speech costs on a CPU: transformers, the lean decoder, drafts and copies.

    OUTRIDER_MODELS=models python -m benchmarks.speech --draft FOLDER [--windows 10]
    python -m benchmarks.speech --models models --language fr --draft FOLDER

The folder holds `whisper-base`, `whisper-tiny.en` and `speech`, into which Debian's
asterisk-core-sounds-en and -fr and their -wav were unpacked (`training.whisper_recordings`). One
thread, its CPU time, every window by every arm in turn, greedy and without timestamps. Encoders are
timed apart, since their states are the same for all arms of a dtype. The planned arms run all
windows as one run with one row, as a long recording does; "same" counts texts equal to lean
plain's.

    transformers          generate with encoder_outputs
    assisted              the same with an assistant of the draft's layers
    plain                 the lean decoder
    draft K               a chain of K by the draft, K fixed
    int8 K                the same by the draft in 8 bits (`draft_dtype="int8"`)
    draft, adaptive       what is fastest, nothing included; and so of the draft in 8 bits
    copy                  8 tokens from tiny.en's transcript, from 0 to 8 with the planner
    batch of 8            eight windows at once: plain, with the draft, and with it in 8 bits
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from training.whisper_recordings import asterisk, joined
from training.whisper_speech import RATE
from transformers.modeling_outputs import BaseModelOutput

from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.drafters.reference_lookup import ReferenceLookup
from outrider.engine.request import Request
from outrider.models.calibrate import Setting
from outrider.models.layer_subset import LayerSubset, LayerSubsetSource
from outrider.models.sources import ModelSource
from outrider.types import Inputs

BUDGET = 220


class Window(NamedTuple):
    """A window with its encoder states, and what another recogniser made of it."""

    inputs: Inputs
    heard: list[int]


class Timed:
    """Milliseconds and tokens of an arm."""

    def __init__(self) -> None:
        self.milliseconds, self.tokens, self.steps = 0.0, 0, 0
        self.texts: dict[int, list[int]] = {}

    def add(self, number: int, text: list[int], milliseconds: float, steps: int) -> None:
        self.milliseconds += milliseconds
        self.tokens += len(text)
        self.steps += steps
        self.texts[number] = text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=os.environ.get("OUTRIDER_MODELS"))
    parser.add_argument("--draft", help="a draft folder; layers 0 and 5 untrained without one")
    parser.add_argument("--language", default="en")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--depths", default="2,3,4")
    parser.add_argument("--lean", action="store_true", help="without transformers' arms")
    asked = parser.parse_args()
    if asked.models is None:
        parser.error("say where the models are: --models or OUTRIDER_MODELS")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with torch.inference_mode():
        Bench(asked).run()


class Bench:
    """Models and windows, and the arms over them."""

    def __init__(self, asked: Any) -> None:
        path = Path(asked.models)
        source, setting = (
            ModelSource(path / "whisper-base", "target"),
            Setting(1, asked.dtype, True),
        )
        cpu = torch.device("cpu")
        self.language = asked.language
        self.whole: Any = source.model(asked.dtype, cpu)
        self.whole.generation_config.max_length = None
        vocab = self.whole.config.vocab_size
        self.target = source.driven(setting, cpu, vocab)
        made = LayerSubsetSource(source, asked.draft or LayerSubset((0, 5)))
        self.draft = made.driven(setting, cpu, vocab)
        self.eight = made.driven(replace(setting, draft_dtype="int8"), cpu, vocab)
        for draft in (self.draft, self.eight):  # as `load` does: no dummy nodes
            draft.rounding = draft.rounding._replace(rows=None)
        self.assistant = assistant(made.model(asked.dtype, cpu))
        self.lean = asked.lean
        self.depths = [int(depth) for depth in asked.depths.split(",")]
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            path / "whisper-base", trust_remote_code=False
        )
        self.extractor = transformers.WhisperFeatureExtractor.from_pretrained(path / "whisper-base")
        self.windows = self.heard(path, asked)
        self.arms: dict[str, Timed] = {}

    def prompt(self) -> list[int]:
        names = ["<|startoftranscript|>", f"<|{self.language}|>", "<|transcribe|>"]
        found: list[int] = self.tokenizer.convert_tokens_to_ids([*names, "<|notimestamps|>"])
        return found

    def heard(self, path: Path, asked: Any) -> list[Window]:
        """Windows with states by the lean encoder; the other encoders are timed beside it."""
        recordings = list(joined(asterisk(path / "speech", asked.language)))[: asked.windows]
        reader, times = self.target.runner.reader, {"lean": 0.0, "transformers": 0.0}
        other: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
            path / "whisper-tiny.en", dtype=torch.float32
        )
        spelt: Any = transformers.AutoTokenizer.from_pretrained(
            path / "whisper-tiny.en", trust_remote_code=False
        )
        assert reader is not None
        windows = []
        for number, recording in enumerate(recordings):
            made = self.extractor(recording.samples, sampling_rate=RATE, return_tensors="pt")
            columns = made["input_features"]
            frames = columns.transpose(1, 2)
            inputs = Inputs(None, frames, torch.ones(frames.shape[:2], dtype=torch.bool))
            encoders: dict[str, Callable[[], Any]] = {
                "lean": lambda inputs=inputs: reader.encode(inputs),
                "transformers": lambda columns=columns: self.whole.model.encoder(
                    columns.to(self.whole.dtype)
                ),
            }
            for name, encode in encoders.items():
                if not number:
                    encode()
                started = time.thread_time()
                states = encode()
                times[name] += 1e3 * (time.thread_time() - started)
                if name == "lean":
                    inputs = inputs._replace(encoded=states)
            text = spelt.decode(other.generate(columns)[0], skip_special_tokens=True)
            heard = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            windows.append(Window(inputs, heard))
        self.encoding = {name: took / len(windows) for name, took in times.items()}
        return windows

    def sampling(self) -> SamplingParams:
        """Greedy, with what Whisper's own configuration suppresses, and no timestamps."""
        rules = self.whole.generation_config
        stamps = range(rules.no_timestamps_token_id + 1, self.whole.config.vocab_size)
        banned = {*rules.suppress_tokens, *stamps}
        bias = dict.fromkeys(banned, -float("inf"))
        return SamplingParams(
            0, logit_bias=bias, begin_suppress_tokens=tuple(rules.begin_suppress_tokens)
        )

    def request(self, window: Window) -> Request:
        limits = StopConditions(BUDGET, (self.whole.generation_config.eos_token_id,))
        return Request(self.prompt(), self.sampling(), limits, window.inputs, window.heard)

    def engine(self, drafter: Any, planner: str = "fixed") -> Engine:
        return Engine(self.target, drafter, "match", planner)

    def decoded(self, arm: str, engine: Engine, numbers: list[int], max_num_seqs: int = 1) -> None:
        """All these windows as one run."""
        from outrider.engine.engine_run import EngineRun

        requests = [self.request(self.windows[number]) for number in numbers]
        engine.priced(max_num_seqs)  # once, where the planner needs it: `load` remembers it
        started = time.thread_time()
        run = EngineRun(engine, max_num_seqs, 448 + 16)
        run.submit_all(requests)
        run.close()
        texts: list[list[int]] = [[] for _ in numbers]
        for block in run:
            texts[block.request_id] += block.token_ids
        took = 1e3 * (time.thread_time() - started)
        timed = self.arms.setdefault(arm, Timed())
        for number, text, stats in zip(numbers, texts, run.requests, strict=True):
            timed.add(number, text, took / len(numbers), stats.steps)

    def generated(self, arm: str, number: int, **more: Any) -> None:
        window = self.windows[number]
        assert window.inputs.encoded is not None
        states = BaseModelOutput(last_hidden_state=window.inputs.encoded.states_BTE)
        started = time.thread_time()
        out = self.whole.generate(
            encoder_outputs=states, language=self.language, task="transcribe",
            max_new_tokens=BUDGET, **more,
        )  # fmt: skip
        took = 1e3 * (time.thread_time() - started)
        end = self.whole.generation_config.eos_token_id
        text = [token for token in out[0].tolist() if token <= end]
        text += [end] * (end not in text)
        self.arms.setdefault(arm, Timed()).add(number, text, took, 0)

    def run(self) -> None:
        each = range(len(self.windows))
        single: dict[str, Engine] = {"plain": self.engine(Root())}
        for depth in self.depths:
            drafter = DraftModel(self.draft, (1,) * depth)
            single[f"draft {depth}"] = self.engine(drafter)
            single[f"int8 {depth}"] = self.engine(DraftModel(self.eight, (1,) * depth))
        single["copy"] = self.engine(ReferenceLookup(8))
        for number in each:
            if not self.lean:
                self.generated("transformers", number)
                self.generated("assisted", number, assistant_model=self.assistant)
            for arm, engine in single.items():
                self.decoded(arm, engine, [number])
        deepest = (1,) * max(self.depths)
        runs: dict[str, tuple[Engine, int]] = {
            "plain, one run": (single["plain"], 1),
            "draft, adaptive": (self.engine(DraftModel(self.draft, deepest), "adaptive"), 1),
            "int8, adaptive": (self.engine(DraftModel(self.eight, deepest), "adaptive"), 1),
            "copy, adaptive": (self.engine(ReferenceLookup(8), "adaptive"), 1),
            "batch of 8": (single["plain"], 8),
            "batch of 8, draft": (single[f"draft {self.depths[0]}"], 8),
            "batch of 8, int8": (single[f"int8 {self.depths[0]}"], 8),
        }
        for arm, (engine, max_num_seqs) in runs.items():
            self.decoded(arm, engine, list(each), max_num_seqs)
        self.tell()

    def tell(self) -> None:
        first = "plain" if self.lean else "transformers"
        plain, theirs = self.arms["plain"], self.arms[first]
        per = {arm: t.milliseconds / t.tokens for arm, t in self.arms.items()}
        lean, other = (self.encoding[name] for name in ("lean", "transformers"))
        print(f"encoder, ms a window: lean {lean:.0f}, transformers {other:.0f}")
        whole = {arm: t.milliseconds / len(t.texts) + lean for arm, t in self.arms.items()}
        for arm in whole.keys() & {"transformers", "assisted"}:
            whole[arm] += other - lean
        for arm, timed in self.arms.items():
            same = sum(text == plain.texts[number] for number, text in timed.texts.items())
            rate = f"{timed.tokens / timed.steps:.2f}" if timed.steps else "-"
            print(
                f"{arm:18s} {per[arm]:6.2f} ms/token {rate:>5s} tokens/step; "
                f"{per[first] / per[arm]:5.2f}x {first}, "
                f"{per['plain'] / per[arm]:5.2f}x plain; with the encoder "
                f"{whole[first] / whole[arm]:5.2f}x, {whole['plain'] / whole[arm]:5.2f}x; "
                f"same {same}/{len(timed.texts)}",
                flush=True,
            )
        print(f"{theirs.tokens} and {plain.tokens} tokens in {len(plain.texts)} windows")


def assistant(model: Any) -> Any:
    """The draft as transformers takes an assistant: a decoder that shares the encoder."""
    from transformers import WhisperForCausalLM

    made = WhisperForCausalLM(model.config.__class__.from_dict(model.config.to_dict())).eval()
    made = made.to(model.dtype)
    made.model.decoder.load_state_dict(model.model.decoder.state_dict())
    made.tie_weights()
    made.generation_config.update(
        num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return made


if __name__ == "__main__":
    main()
