"""What decodes for a server: a loop over a model, and what others must know of that model."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import outrider
from outrider.drafters.root import Root
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Logprobs, Request, StopConditions
from outrider.errors import ConfigurationError
from outrider.models.decoder import adapters_of
from outrider.models.prefix_cache import PrefixCache
from outrider.sampling.sampling_params import SamplingParams
from outrider.server.batch_runners import (
    SCORES,
    SPEECH,
    PromptScores,
    TranscriptionRequest,
    TranscriptionRunner,
)
from outrider.server.engine_loop import EngineLoop, OutputCallback
from outrider.server.model_info import ModelInfo, SpeechModelInfo, TextModelInfo
from outrider.server.speculation_methods import MethodRouter
from outrider.server.tool_parsers import chat_template
from outrider.speech.prompted_transcriber import PromptedTranscription, prompted
from outrider.speech.speech_model import WhisperModel
from outrider.speech.transcriber import Transcription, transcription
from outrider.text.speculator import Speculator

KEPT_BYTES = 256 << 20  #: of prompts that were read, for requests that begin alike


class EngineConfig(NamedTuple):
    """How much of a loop there is.

    max_num_seqs         requests decoded side by side
    max_model_len        slots of a row: prompt, answer and draft
    max_queued_requests  requests that may wait; more are refused
    prefix_cache_bytes   of prompts that were read, for requests that begin alike; 0: none
    ready_first          measure what steps cost while nobody asks, not before the first request
    """

    max_num_seqs: int = 16
    max_model_len: int = 2048
    max_queued_requests: int = 64
    prefix_cache_bytes: int = KEPT_BYTES
    ready_first: bool = False


def fingerprint(speculator: Speculator, adapter: str | None = None) -> str:
    """Names what a seeded text depends on: weights, dtype, processor, libraries, version, template.

    A hash of what the model says of a few tokens, to the last bit.
    """
    target, said = speculator.engine.target, []
    vocab = target.vocab_size
    prompt = [1 + 7 * at % (vocab - 1) for at in range(24)]
    run = EngineRun(Engine(target, Root(), "match", graphs=speculator.engine.graphs), 1, 256)
    told = Logprobs(8, "raw")
    request = Request(prompt, SamplingParams(0), StopConditions(4), logprobs=told)
    run.submit(replace(request, lora_name=adapter))
    run.close()
    for block in run:
        said.append((block.token_ids, block.logprobs, block.likeliest))
    media = speculator.media
    templates = chat_template(speculator.tokenizer), media and media.chat_template
    more = (*templates, *speculator.defaults.followed)
    identity = repr((said, vocab, outrider.__version__, *more)).encode()
    return "fp_" + hashlib.sha256(identity).hexdigest()[:16]


def build_engine(
    speculator: Speculator,
    room: EngineConfig,
    deliver: OutputCallback,
    most_still: float | None = None,
) -> tuple[ModelInfo, EngineLoop]:
    """A loop that is not yet started. A Whisper transcribes, others write text.

    deliver     takes what has happened, once a turn, on the loop's thread
    most_still  seconds without a turn's end after which it is given up; None: never
    """
    engine = speculator.engine
    if speculator.opening is not None and speculator.hearing is None:
        raise ConfigurationError(
            "requests are prompts that a model goes on from; got an encoder-decoder, which reads a "
            "source beside its own text; use `outrider generate --source`, or a list of sources in "
            "Python: outrider.load(MODEL).generate(SOURCES)"
        )
    ahead = _measurements(engine, 1 if speculator.hearing is not None else room.max_num_seqs)
    if not room.ready_first:
        deque(ahead, maxlen=0)
    if speculator.hearing is not None:
        known, opened = _hears(speculator, speculator.hearing)
        return known, EngineLoop(opened, room.max_num_seqs, deliver, most_still, ahead)
    if speculator.tokenizer is None:
        raise ConfigurationError("a server needs the target's tokenizer; put one beside it")
    adapters = adapters_of(engine.target)
    lanes, prefixes = MethodRouter(engine), PrefixCache(room.prefix_cache_bytes)

    def run(lane: str) -> EngineRun | PromptScores | TranscriptionRunner:
        if lane == SCORES:
            return PromptScores(engine.target)
        if lane == SPEECH:
            return TranscriptionRunner(partial(_prompted, speculator))
        with engine.estimated():
            return EngineRun(lanes[lane], room.max_num_seqs, room.max_model_len, prefixes=prefixes)

    text = TextModelInfo(
        speculator.tokenizer,
        speculator.eos_ids,
        engine.target.context,
        engine.target.vocab_size,
        lanes.methods,
        fingerprint(speculator),
        speculator.defaults,
        {name: fingerprint(speculator, name) for name in adapters},
        speculator.media,
    )
    return text, EngineLoop(run, room.max_num_seqs, deliver, most_still, ahead)


def _measurements(engine: Engine, max_num_seqs: int) -> Iterator[bool]:
    """Measure what steps cost, a look at a time: of one row, then of all. True: more is known."""
    for rows in (1, max_num_seqs):
        yield from engine.pricing(rows)


def _prompted(speculator: Speculator, spoken: TranscriptionRequest) -> PromptedTranscription:
    """A recording heard by an audio language model, beside its chats."""
    prompts = speculator.sound_prompts
    assert prompts is not None, "the route is there for models that hear"
    given = {"array": spoken.samples, "sampling_rate": prompts.rate}
    with speculator.engine.estimated():
        return prompted(speculator.engine, prompts, given, spoken.settings)


def _hears(
    speculator: Speculator, hearing: WhisperModel
) -> tuple[SpeechModelInfo, Callable[[str], TranscriptionRunner]]:
    def begin(spoken: TranscriptionRequest) -> Transcription:
        given = {"array": spoken.samples, "sampling_rate": hearing.rate}
        with speculator.engine.estimated():
            return transcription(speculator.engine, hearing, given, spoken.settings)

    known = SpeechModelInfo(hearing.name, hearing.vocabulary, hearing.rate)
    return known, lambda lane: TranscriptionRunner(begin)
