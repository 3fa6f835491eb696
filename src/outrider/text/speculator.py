"""What users hold: a model pair with its tokenizer. Text in, text and statistics out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider import arguments, verifiers
from outrider.engine.engine import Engine
from outrider.engine.request import Logprobs, Request, StopConditions, broadcast_setting
from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import SamplingParams
from outrider.stats import RequestStats, Stats
from outrider.text.decoder_prompt import SILENT, DecoderPrompt, ModelDefaults, ruled
from outrider.text.output_text import (
    Completion,
    Detokenizer,
    Generation,
    IncrementalText,
    NearTie,
    Stop,
    Stream,
    check_least,
    stop_ids,
)
from outrider.text.prompts import (
    Adapter,
    EncodedPrompts,
    PromptEncoder,
    Text,
    adapter_names,
    refuse_unknown,
)
from outrider.types import Drafter, Inputs, Verifier

if TYPE_CHECKING:
    from outrider.engine.beam_search import Beams
    from outrider.engine.beam_search.step import Close
    from outrider.speech.audio import Audio
    from outrider.speech.prompted_transcriber import PromptedTranscription
    from outrider.speech.result import Transcript
    from outrider.speech.settings import TranscribeOptions as SpeechOptions
    from outrider.speech.speech_model import WhisperModel
    from outrider.speech.transcriber import Transcription
    from outrider.text.media_processor import MediaProcessor
    from outrider.text.sound_prompts import SourceTranscription, TranscriptionPrompts

# Answers by beam search: the finished beams as texts.

#: Gaps between log-probabilities that the order of sums may close, by the model's dtype.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def beamed(
    engine: Engine, tokenizer: Any, requests: Sequence[Request], beams: "Beams"
) -> Generation:
    """The best `num_return_sequences` beams of each prompt, one prompt after another.

    A completion's `steps` are calls of the target, which all prompts share.
    """
    from outrider.engine.beam_search.search import search

    most = engine.drafter.shapes[0].max_depth
    with engine.paces.lent(most, beams.num_beams, len(requests)) as pace:
        found = search(engine.target, engine.drafter, requests, beams, pace=pace)
    completions = []
    rows = zip(requests, found.hypotheses, found.counts.close, strict=True)
    for request, row, close in rows:
        tie = None
        if close is not None and close.margin < ROUNDING[engine.target.dtype]:
            tie = _tie(close, request.prompt, tokenizer)
        stops = request.limits.stop_ids
        for one in row:
            ids = one.token_ids
            ended = bool(ids) and ids[-1] in stops
            calls, size = found.counts.calls, len(request.prompt)
            stats = RequestStats(prompt_tokens=size, new_tokens=len(ids), steps=calls)
            stats.seconds = found.seconds
            text = _text(tokenizer, request.prompt, ids[:-1] if ended else ids)
            reason = "stop" if ended else "length"
            if not ended and size + len(ids) >= engine.target.context:
                reason = "context"
            done = Completion(text, ids, reason, stats, score=one.score, near_tie=tie)
            completions.append(done)
    totals = Stats(engine_steps=found.counts.calls)
    for completion in completions:
        totals.add(completion.stats)
    totals.steps, totals.seconds = found.counts.calls, found.seconds
    return Generation(completions, totals)


def _tie(close: "Close", prompt: Sequence[int], tokenizer: Any) -> NearTie:
    kept, dropped = (one.tokens()[len(prompt) :] for one in (close.kept, close.dropped))
    said = [_text(tokenizer, prompt, ids) for ids in (kept, dropped)]
    return NearTie(close.margin, said[0], said[1], kept, dropped)


def _text(tokenizer: Any, prompt: Sequence[int], ids: list[int]) -> str:
    """What is written behind a prompt; nothing without a tokenizer."""
    if tokenizer is None:
        return ""
    words = Detokenizer(tokenizer, (), prompt)
    return words.push(ids) + words.finish()


def check(stops: Sequence[Stop], useless: dict[str, object]) -> None:
    """Refuse what a beam search has no use for: ConfigurationError."""
    named = [name for name, value in useless.items() if value is not None]
    if named:
        raise ConfigurationError(
            f"a beam search has no use for {', '.join(named)}; got beams=..., too; leave "
            f"{'it' if len(named) == 1 else 'them'} out (Beams has num_return_sequences of its own)"
        )
    if any(stop.strings for stop in stops):
        raise ConfigurationError(
            "stop strings end texts between tokens, which no beam's score says; got strings in "
            "Stop for a beam search; use token_ids, or cut the texts"
        )


#: Text, token ids or a conversation; an encoder may also read an array of features, or `Inputs`; a
#: mapping is what a processor made of one prompt, or a text with its `multi_modal_data`.
Prompt: TypeAlias = (
    str
    | Sequence[int]
    | Sequence[Mapping[str, Any]]
    | Mapping[str, Any]
    | NDArray[np.floating[Any]]
    | Tensor
    | Inputs
)


class GenerateOptions(TypedDict, total=False):
    """What else may be asked of `generate` and `stream`, by name."""

    decoder_prompts: Text | Sequence[Text | None] | None  #: what an encoder-decoder's answers
    #: begin with: one text for all, or one for each prompt
    reference: Text | Sequence[Text | None] | None  #: text to copy from, as `decoder_prompts`;
    #: an encoder-decoder's drafters copy from its source if there is none
    beams: "Beams | None"  #: the finished beams of a search, the best first, in place of one text
    rules: SamplingParams | None  #: of tokens, in place of the model's own `Speculator.rules`
    lora_request: Adapter | Sequence[Adapter]  #: the adapter that writes, or each prompt's own, by
    #: its name in `lora_modules`, or as vLLM's LoRARequest has it; None: the target alone
    num_return_sequences: int  #: completions of each prompt; copy i of a seeded one has seed + i
    logprobs: bool  #: of the law that each token was emitted from
    capacity: int | None  #: slots of a row, if more are wanted than prompt and budget need


_KNOWN = (*GenerateOptions.__annotations__, "trace")
_PARTS = {"stop": Stop, "sampling": SamplingParams}


class Speculator:
    """A target, a drafter, a rule and a tokenizer. Made by `outrider.load`.

    >>> import outrider
    >>> speculator = outrider.load()                                        # doctest: +SKIP
    >>> speculator.generate("def add(a, b):", stop=outrider.Stop(16)).texts  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        notes: Any = None,
        opening: DecoderPrompt | None = None,
        hearing: "WhisperModel | None" = None,
        defaults: ModelDefaults = SILENT,
        media: "MediaProcessor | None" = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.eos_ids = tuple(eos_ids)
        self.notes = notes  #: how it was loaded: dtype, threads, packing, cost curve
        self.opening = opening  #: how answers begin, for encoder-decoders
        self.defaults = defaults  #: of the generation configuration, for decoder-only models
        self.hearing = hearing  #: what transcription needs besides, for speech-to-text models
        self.media = media  #: what reads images and sound of prompts, for models that do
        #: what turns prompts into what the engine takes
        self.prompt_encoder = PromptEncoder(
            engine.target, tokenizer, opening, self.eos_ids, media, engine.drafter
        )

    @property
    def rules(self) -> SamplingParams:
        """What the model's generation configuration says of tokens: bans, penalties, forced ones.

        They hold for every answer, where its own sampling says nothing else.
        `generate(..., rules=...)` puts others in their place.
        """
        return self.defaults.rules if self.opening is None else self.opening.rules()

    def using(self, drafter: Drafter, rule: str | Verifier | None = None) -> "Speculator":
        """The same target and tokenizer with another drafter and rule: nothing is loaded again.

        >>> speculator.using(outrider.PromptLookup(8), "match")  # doctest: +SKIP
        """
        engine = Engine(self.engine.target, drafter, rule, graphs=self.engine.graphs)
        more = (self.tokenizer, self.eos_ids, self.notes, self.opening, self.hearing, self.defaults)
        return Speculator(engine, *more, self.media)

    def plain(self, shared_noise: bool = False) -> "Speculator":
        """Ordinary decoding with the same target; `shared_noise` by the noise that drafts share."""
        from outrider.drafters import Root

        return self.using(Root(), verifiers.get("match") if shared_noise else None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: Stop | Sequence[Stop] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Complete one prompt or a batch; every row has its own sampling and stop settings.

        A prompt is text, token ids, or a list of messages for the chat template; those of an
        image-text or audio language model may have images and sound, and a prompt may be what the
        model's own processor made (docs/images.md). For an
        encoder-decoder it is the source: text, ids, or an array of what its processor makes of one
        recording (frames [S, F], samples [S]) or image ([C, H, W]). See `GenerateOptions`.

        With `beams` a prompt's completions are the best beams of a search, drawn if its sampling
        has a temperature; without any sampling they are not (docs/beams.md).

        >>> speculator.generate("teh cat", SamplingParams(0)).texts  # doctest: +SKIP
        ['the cat']
        """
        beams = options.pop("beams", None)
        if beams is not None:
            refuse_unknown(options, _KNOWN, _PARTS)
            return self._beamed(beams, prompts, sampling, stop, options)
        stream = self.stream(prompts, sampling, stop, **options)
        stream.drain()
        return stream.result()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: Stop | Sequence[Stop] | None = None,
        *,
        decoder_prompts: Text | Sequence[Text | None] | None = None,
        reference: Text | Sequence[Text | None] | None = None,
        beams: "Beams | None" = None,
        rules: SamplingParams | None = None,
        lora_request: Adapter | Sequence[Adapter] = None,
        num_return_sequences: int = 1,
        logprobs: bool = False,
        capacity: int | None = None,
        trace: bool = False,
        **unknown: Never,
    ) -> "Stream":
        """An iterator of TextBlocks; `result()` gives what has been generated so far."""
        if unknown:
            refuse_unknown(unknown, _KNOWN, _PARTS)
        if beams is not None:
            what = "left out of a stream: they are known when their search ends"
            arguments.refuse("beams", what, beams, "use generate")
        asked = self.prompt_encoder.read(prompts, decoder_prompts, reference)
        stops = broadcast_setting("stop", stop, Stop(), len(asked.prompts))
        usual = SamplingParams(**self.defaults.sampling)
        settings = broadcast_setting("sampling", sampling, usual, len(asked.prompts))
        check_least(settings, stops)
        do = "use 1 for one completion"
        copies = arguments.whole("num_return_sequences", num_return_sequences, do, least=1)
        if capacity is not None:
            capacity = arguments.whole("capacity", capacity, "leave it out", least=1)
        adapters = adapter_names(lora_request, len(asked.prompts))
        if copies > 1:
            asked = asked.repeated(copies)
            adapters = [name for name in adapters for _ in range(copies)]
            settings = [_reseeded(s, copy) for s in settings for copy in range(copies)]
            stops = [s for s in stops for _ in range(copies)]
        settings = self._ruled(settings, asked.prompts, rules)
        told = Logprobs() if logprobs else None
        requests = self._requests(asked, settings, stops, adapters, told)
        run = self.engine.decode(requests, capacity=capacity, trace=trace)
        answers = []  # behind the engine's checks: no tokenizer decodes an id that it does not have
        for request, ends in zip(requests, stops, strict=True):
            stop_tokens = request.limits.stop_ids
            answers.append(IncrementalText(self.tokenizer, ends, request.prompt, stop_tokens))
        return Stream(run, answers)

    def _requests(
        self,
        asked: EncodedPrompts,
        settings: Sequence[SamplingParams],
        stops: Sequence[Stop],
        adapters: Sequence[str | None],
        logprobs: Logprobs | None = None,
    ) -> list[Request]:
        """What is asked, as the engine takes it."""
        target, ends, requests = self.engine.target, dict[Stop, StopConditions](), []
        inputs = asked.inputs or [None] * len(stops)
        every = zip(asked.prompts, settings, stops, inputs, asked.references, adapters, strict=True)
        for prompt, sampling, stop, source, reference, name in every:
            if stop not in ends:
                ids = stop_ids(stop, self.tokenizer, self.eos_ids, target.vocab_size)
                ends[stop] = StopConditions(stop.max_new_tokens, ids)
            given = prompt, sampling, ends[stop], source, reference
            requests.append(Request(*given, logprobs=logprobs, lora_name=name))
        return requests

    def _beamed(
        self, beams: "Beams", prompts: object, sampling: Any, stop: Any, options: GenerateOptions
    ) -> Generation:
        """`generate` by beam search."""
        from outrider.engine.beam_search import Beams

        if not isinstance(beams, Beams):
            arguments.refuse("beams", "a Beams", beams, "write beams=outrider.Beams(5)")
        begun, reference = options.pop("decoder_prompts", None), options.pop("reference", None)
        asked = self.prompt_encoder.read(prompts, begun, reference)
        rules = options.pop("rules", None)
        adapters = adapter_names(options.pop("lora_request", None), len(asked.prompts))
        stops = broadcast_setting("stop", stop, Stop(), len(asked.prompts))
        check(stops, {name: value for name, value in options.items() if value})
        settings = broadcast_setting("sampling", sampling, SamplingParams(0), len(asked.prompts))
        check_least(settings, stops)
        settings = self._ruled(settings, asked.prompts, rules)
        requests = self._requests(asked, settings, stops, adapters)
        return beamed(self.engine, self.tokenizer, requests, beams)

    @overload
    def transcribe(self, audio: "Audio", **options: "Unpack[SpeechOptions]") -> "Transcript": ...

    @overload
    def transcribe(
        self, audio: "list[Audio] | tuple[Audio, ...]", **options: "Unpack[SpeechOptions]"
    ) -> "list[Transcript]": ...

    def transcribe(
        self, audio: Any, **options: "Unpack[SpeechOptions]"
    ) -> "Transcript | list[Transcript]":
        """Speech to text: one recording, or several as one ragged batch.

        A Whisper model has all of the options; an audio language model is asked for the words of
        windows that are cut at pauses (docs/transcribing.md).

        A recording is a path (WAV; other formats by soundfile), samples in [-1, 1], or a mapping of
        `array` and `sampling_rate`. Options: those of
        `outrider.speech.settings.TranscribeSettings`.

        Raises AudioError for what cannot be read, ConfigurationError for options that the model
        cannot honour. Where one of several fails on its way, the first error comes when the others
        are done; `transcribe_stream` keeps their transcripts.

        >>> speculator.transcribe("talk.wav", language="en").text  # doctest: +SKIP
        'Please enter your password.'
        """
        running = self.transcribe_stream(audio, **options).drain()
        for error in running.errors.values():
            raise error
        done = [transcript for transcript in running.transcripts if transcript is not None]
        return done if running.several else done[0]

    def transcribe_stream(
        self, audio: Any, **options: "Unpack[SpeechOptions]"
    ) -> "Transcription | PromptedTranscription":
        """The segments of `transcribe` as they are heard; `transcripts` has what is done.

        >>> for segment in speculator.transcribe_stream("talk.wav"):  # doctest: +SKIP
        ...     print(segment.start, segment.text)
        """
        from outrider.speech.settings import TranscribeSettings
        from outrider.speech.speech_model import not_a_speech_model
        from outrider.speech.transcriber import transcription

        name = "this model" if self.notes is None else str(self.notes.target)
        prompts = self.sound_prompts
        if self.hearing is None and prompts is None:
            raise not_a_speech_model(name)
        if self.tokenizer is None:
            raise ConfigurationError("transcripts need a tokenizer; pass tokenizer=... to load")
        settings = TranscribeSettings(**options)
        if self.hearing is None:
            from outrider.speech.prompted_transcriber import prompted

            assert prompts is not None
            return prompted(self.engine, prompts, audio, settings)
        engine = self.engine
        if settings.reference is not None:
            from outrider.drafters import ReferenceLookup

            if engine.drafter.name != ReferenceLookup.name:
                engine = self.using(ReferenceLookup()).engine
        return transcription(engine, self.hearing, audio, settings)

    @property
    def sound_prompts(self) -> "TranscriptionPrompts | SourceTranscription | None":
        """How a model that hears and is no Whisper is asked for what is said; None for others."""
        media = self.media
        if self.hearing is not None or media is None:
            return None
        if not (media.recordings_alone or media.reads_sound):
            return None
        from outrider.text.sound_prompts import SourceTranscription, TranscriptionPrompts

        name = "this model" if self.notes is None else str(self.notes.target)
        own = name, media, self.tokenizer, self.eos_ids, self.defaults
        if not media.recordings_alone:
            return TranscriptionPrompts(*own)
        begun = () if self.opening is None else (self.opening.start,)
        return SourceTranscription(*own, begun)  # it hears a recording as its source

    def _ruled(
        self,
        settings: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        rules: SamplingParams | None,
    ) -> list[SamplingParams]:
        """The rows' sampling with the rules for tokens."""
        if rules is not None:
            if not isinstance(rules, SamplingParams):
                do = "write rules=SamplingParams(...); SamplingParams() for none"
                arguments.refuse("rules", "a SamplingParams", rules, do)
            return [ruled(own, rules) for own in settings]
        if self.opening is None:
            if self.defaults.rules == SILENT.rules and not self.defaults.min_length:
                return list(settings)
            both = zip(settings, prompts, strict=True)
            return [ruled(own, self.defaults.rules_without(len(ids))) for own, ids in both]
        if self.opening.left_out:
            raise ConfigurationError(
                f"the model's generation configuration sets {', '.join(self.opening.left_out)}, "
                "which is not applied here; set it to None there, or say which rules are to hold: "
                "rules=speculator.rules"
            )
        each = zip(settings, prompts, strict=True)
        return [ruled(own, self.opening.rules(len(prompt))) for own, prompt in each]


def _reseeded(sampling: SamplingParams, copy: int) -> SamplingParams:
    """The sampling of a prompt's n-th copy."""
    if sampling.seed is None or not copy:
        return sampling
    return replace(sampling, seed=(sampling.seed + copy) % 2**64)
