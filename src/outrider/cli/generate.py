"""`outrider generate`: complete a prompt, or answer a source."""

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

import typer

from outrider import arguments, verifiers
from outrider.cli import console, options
from outrider.cli.chat import attached, conversation, has_template, refuse_untemplated
from outrider.cli.console import (
    EXIT_INTERRUPTED,
    as_typed,
    err,
    out,
    put,
    read_file,
    read_prompt,
    read_source,
)
from outrider.cli.gathered import gathered
from outrider.costs import trust
from outrider.drafters import DRAFTERS
from outrider.errors import ConfigurationError
from outrider.load_config import LoadConfig
from outrider.models import budget
from outrider.models.program_imports import import_lean
from outrider.plugins import required

if TYPE_CHECKING:
    from types import ModuleType

    from outrider.cli.chat import Message
    from outrider.engine.beam_search import Beams
    from outrider.engine.engine import Engine
    from outrider.models.sources import ModelSource
    from outrider.sampling.sampling_params import SamplingParams as Rules
    from outrider.stats import Stats
    from outrider.text.output_text import Generation, Stream
    from outrider.text.speculator import Speculator

PICTURES = "outrider.pictures"  #: of entry points

# What a planner goes by and what it chose, as lines for `--verbose`.


def priced(engine: "Engine") -> list[str]:
    """The planner, and the costs that it weighs tokens against."""
    from outrider.engine.speculation_policy import FixedLength

    if isinstance(engine.planner, FixedLength):
        return [f"planner fixed: {engine.shapes[0].max_nodes - 1} drafted tokens in every step"]
    lines = [f"planner {type(engine.planner).__name__.lower()}"]
    if engine.costs is not None:
        if engine.kept is not None:
            lines[0] += f"; costs {trust(engine.costs.starts, 1 in engine.costs.agreed)}"
        for context, curve in sorted(engine.costs.times[1].items()):
            each = zip(*curve, strict=True)
            steps = ", ".join(
                f"{n - 1} drafted {ms:.1f}" if n > 1 else f"{ms:.1f}" for n, ms in each
            )
            lines.append(f"  ms of a step at {context} tokens: plain {steps}")
    return lines


def chosen(stats: "Stats") -> list[str]:
    """How often each size was drafted; why nothing was, if that was best."""
    each = [
        f"{steps} of {nodes - 1} drafted" if nodes > 1 else f"{steps} plain"
        for nodes, steps in sorted(stats.sizes.items())
    ]
    lines = [f"steps: {', '.join(each) or 'none'}"]
    if stats.predicted_ms:
        lines[0] += f"; predicted {stats.predicted_ms:.0f} ms, took {stats.measured_ms:.0f} ms"
    if stats.why_plain:
        lines.append(f"speculation is off because {stats.why_plain}")
    if stats.why_dropped:
        lines.append(f"the draft model is asked no more: {stats.why_dropped}")
    return lines


def searched(stats: "Stats") -> list[str]:
    """What a beam search took."""
    return [
        f"beam search: {stats.steps} calls of the target for {stats.new_tokens} tokens, took "
        f"{stats.measured_ms:.0f} ms"
    ]


@dataclass
class _Sampling(options.TypedSampling):
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens of prompt and text get rarer; 1 is off.")
    ] = None
    frequency_penalty: Annotated[
        float, typer.Option(help="Off a logit each time its token was generated; 0 is off.")
    ] = 0.0
    presence_penalty: Annotated[
        float, typer.Option(help="Off a logit once its token was generated; 0 is off.")
    ] = 0.0
    no_repeat_ngram_size: Annotated[
        int | None, typer.Option(help="No n-gram of this size twice; 0 is off.")
    ] = None
    min_new_tokens: Annotated[
        int | None, typer.Option(help="No stop token before so many tokens.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text. Default: another every time.")
    ] = None


@options.with_setup
@gathered("typed", _Sampling)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, or as -, standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")
    ] = None,
    source: options.SourceText = None,
    reference: options.ReferenceFile = None,
    image: options.ImageFiles = None,
    audio: options.AudioFiles = None,
    chat: options.AsChat = False,
    system: options.System = None,
    *,
    setup: LoadConfig,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")
    ] = 128,
    typed: _Sampling,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be repeated.")
    ] = None,
    num_beams: options.NumBeams = 1,
    length_penalty: options.LengthPenalty = 1.0,
    dtype: options.Dtype = "auto",
    stream: Annotated[
        bool, typer.Option("--stream", help="Print blocks as they are decoded.")
    ] = False,
    trace: options.Trace = False,
    timeline: options.Timeline = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Complete a prompt, or answer a source; the text goes to standard output."""
    import_lean()
    from outrider.resolve_config import seen
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.text.output_text import Stop, check_least
    from outrider.text.speculator import Speculator

    if as_json and (stream or trace):
        raise ConfigurationError(
            "--json prints one document; got --stream or --trace too; drop one"
        )
    options.refuse_adapters(setup)
    beams = _beams(num_beams, length_penalty, stream or trace)
    _drawable(timeline, beams)
    said = typed.said()
    sampling = SamplingParams(**said)  # before a model is read
    end = Stop(max_new_tokens, tuple(map(as_typed, stop or ())))
    check_least([sampling], [end])
    media = attached(image or (), audio or ())
    _said(chat := chat or bool(media), system, source, setup.chat_template is not None)
    given = _read(prompt, file, source, reference)
    _suits(seen(setup.target), given[1])
    with budget.postponing():  # what steps cost is measured behind the text
        speculator = options.load_speculator(setup if reference is None else _copying(setup), dtype)
    how, rules = speculator.defaults.over(said, {"temperature": 0.0}, beams is None)
    asked = _asked(*given)
    if speculator.opening is None:
        asked["rules"] = rules
    if chat:
        leave = f"leave {'--image and --audio' if media else '--chat'} out"
        refuse_untemplated(speculator, options.target_name(setup), leave)
        asked["prompts"] = conversation(str(asked["prompts"]), system, media=media)
    made, stopped = how_made(speculator, greedy=how.temperature == 0), False
    with speculator.engine.estimated(how):
        if verbose:
            describe(speculator, made, beams)
        if beams is None:
            running = speculator.stream(sampling=how, stop=end, trace=trace, **asked)
            found, stopped = _print(running, speculator, stream, trace)
        else:
            found = speculator.generate(sampling=how, stop=end, beams=beams, **asked)
    _finish(found, made if as_json else None, printed=stream or trace, verbose=verbose)
    if stopped:
        err.print("interrupted; what was generated is above", style="yellow")
        raise typer.Exit(EXIT_INTERRUPTED)
    _advise(speculator, found, chat)
    options.measure(speculator.engine)
    if timeline is not None:
        run = partial(Speculator.generate, sampling=how, stop=end, **asked)
        _timeline().compare(speculator, run, timeline)


def _drawable(path: Path | None, beams: "Beams | None") -> None:
    """Say what a picture lacks before a model is loaded."""
    if path is None:
        return
    if beams is not None:
        raise ConfigurationError(
            "--timeline draws the steps of one text; got --num-beams too; drop one"
        )
    if path.suffix not in (".png", ".svg"):
        raise ConfigurationError(
            f"--timeline draws to a .png or .svg; got {str(path)!r}; give a name that ends in .svg"
        )
    _timeline().check(path)


def _timeline() -> "ModuleType":
    module: ModuleType = required(PICTURES, "timeline", "--timeline", "outrider-lab")
    return module


def _beams(count: int, penalty: float, streamed: bool) -> "Beams | None":
    """The beam search asked for, if one is."""
    from outrider.engine.beam_search import Beams

    if count == 1 and penalty == 1:
        return None
    if count == 1:
        raise ConfigurationError(
            f"--length-penalty compares beams; got {penalty:g} without any; give --num-beams"
        )
    if streamed:
        raise ConfigurationError(
            "beams are not known before their search ends; got --num-beams with --stream or "
            "--trace; drop one"
        )
    return Beams(count, penalty)


def how_made(speculator: "Speculator", greedy: bool) -> dict[str, object]:
    """The drafter and the rule, for whoever reads the text."""
    rule = speculator.engine.choose_rule("all" if greedy else "none")
    return {
        "drafter": speculator.engine.drafter.name,
        "rule": rule.name,
        "rule_options": verifiers.options_of(rule),
        "exact": rule.exact,
    }


def _read(
    prompt: str | None, file: Path | None, source: str | None, reference: Path | None
) -> tuple[str | None, str | None, str | None]:
    """The prompt, the source and the reference, before any model is loaded."""
    begun = prompt is not None or file is not None
    text = read_prompt(prompt, file) if begun or source is None else None
    read = None if source is None else read_source(source)
    return text, read, None if reference is None else read_file(reference, "reference")


def _said(chat: bool, system: str | None, source: str | None, template: bool) -> None:
    """Refuse what no chat template has a place for, before any model is loaded."""
    if template and not chat:
        raise ConfigurationError(
            "--chat-template writes chats; got a text to go on with; give --chat, or leave it out"
        )
    if system is not None and not chat:
        raise ConfigurationError(
            f"--system is the first message of a chat; got {system!r} without one; give --chat"
        )
    if chat and source is not None:
        raise ConfigurationError(
            "--chat is for models that go on from their prompt; got --source too; drop one"
        )


def _advise(speculator: "Speculator", result: "Generation", chat: bool) -> None:
    """Say what may help where an instruct model ended at once, as nobody had spoken to it, and
    where the text is cut because the model can read no more."""
    done = result.completions[0]
    if done.finish_reason == "context":
        room = speculator.engine.target.context
        err.print(f"the text ends where the model's context of {room} tokens does", markup=False)
    ended = (
        not done.text.strip() and done.token_ids[-1:] and done.token_ids[-1] in speculator.eos_ids
    )
    if ended and not chat and has_template(speculator):
        err.print(
            "the model ended the text at once; it has a chat template: --chat makes the prompt a "
            "question to it",
            markup=False,
        )


def _copying(setup: LoadConfig) -> LoadConfig:
    """What copies from the reference; refuses what was named and does not, before it is loaded."""
    from outrider.drafters import ReferenceLookup, Root

    if (setup.drafter, setup.draft, setup.draft_layers) == (None, None, None):
        return replace(setup, drafter=ReferenceLookup.name)
    name = setup.drafter or "draft_model"
    recipe = DRAFTERS.get(name)
    if recipe is not None and not recipe.copies and name != Root.name:
        given = (
            "--drafter" if setup.drafter else "--draft-model" if setup.draft else "--draft-layers"
        )
        able = " or ".join(f"--drafter {name}" for name, other in DRAFTERS.items() if other.copies)
        raise ConfigurationError(
            f"the drafter {name!r} copies from no reference; got --reference with {given}; leave "
            f"{given} out, say {able}, or leave --reference out"
        )
    return setup


class _GenerateRequest(TypedDict):
    rules: "NotRequired[Rules]"
    prompts: "str | list[Message]"
    decoder_prompts: str | None
    reference: str | None


def _suits(target: "ModelSource", source: str | None) -> None:
    """Refuse a target of the wrong kind before its weights are read."""
    from outrider.models.config import is_speech, pairs

    reads = pairs(target.config)
    if is_speech(target.config):
        raise ConfigurationError(
            "generate goes on from text; got a Whisper model, which hears recordings; use "
            "`outrider transcribe FILE -m MODEL`, or name another --model"
        )
    if source is None and reads:
        raise ConfigurationError(
            "the model reads a source beside its own text; got a prompt alone; give the source: "
            "--source TEXT, --source FILE, or --source - for standard input"
        )
    if source is not None and not reads:
        raise ConfigurationError(
            "--source is what an encoder-decoder reads; got a model that goes on from its prompt; "
            "give the text as the prompt, or load an encoder-decoder: --model"
        )


def _asked(prompt: str | None, source: str | None, reference: str | None) -> _GenerateRequest:
    """The prompt, or the source and what the answer begins with."""
    if source is None:
        assert prompt is not None
        return _GenerateRequest(prompts=prompt, decoder_prompts=None, reference=reference)
    return _GenerateRequest(prompts=source, decoder_prompts=prompt, reference=reference)


def _print(
    running: "Stream", speculator: "Speculator", stream: bool, trace: bool
) -> "tuple[Generation, bool]":
    """Decode to the end and show what is to be shown on the way; whether somebody stopped it."""
    colour = out.coloured

    def decode(token: int) -> str:
        return console.written(speculator.tokenizer, token)

    try:
        for number, block in enumerate(running):
            if trace:
                out.print(
                    "\n" if number else "",
                    console.line(block.block, decode, colour),
                    end="",
                    sep="",
                )
            elif stream:
                put(block.text)
    except KeyboardInterrupt:
        return running.result(), True
    return running.result(), False


def _finish(
    result: "Generation", about: dict[str, object] | None, printed: bool, verbose: bool = False
) -> None:
    """The text, if it is not there yet, or a document that says how it was made as well."""
    done = result.completions[0]
    if verbose:
        beams = done.score is not None
        for line in searched(result.stats) if beams else chosen(result.stats):
            err.print(line, markup=False)
    if about is not None:
        document: dict[str, object] = {
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            **({} if done.score is None else {"score": done.score}),
            **({} if done.near_tie is None else {"near_tie": asdict(done.near_tie)}),
            **about,
            "stats": result.stats.as_dict(),
        }
        put(json.dumps(document, ensure_ascii=False) + "\n")
    elif printed:
        put("\n")
    else:
        put(done.text + "\n")


def describe(
    speculator: "Speculator", how_made: dict[str, object], beams: "Beams | None" = None
) -> None:
    """What `--verbose` says: how the models run, what drafts, what verifies."""
    from outrider.sampling.sampling_params import SamplingParams

    notes = speculator.notes
    how = (
        f"drafter {how_made['drafter']}, rule {how_made['rule']} "
        f"({'exact' if how_made['exact'] else 'lossy: another distribution than the target has'})"
    )
    if beams is not None:
        how = (
            f"beam search of {beams.num_beams} beams, length penalty {beams.length_penalty:g}; "
            f"drafter {how_made['drafter']} says what is scored ahead, which changes no beam"
        )
    err.print(
        f"target {notes.target}{f' in {notes.shards} processes' if notes.shards > 1 else ''}\n"
        f"draft {notes.draft}"
        f"{f', which attends to {notes.encoder} encoder' if notes.encoder else ''}\n"
        f"{f'vocabularies: {notes.vocabulary}' + chr(10) if notes.vocabulary else ''}"
        f"{how}\ndevice {notes.device}, weights {notes.weights}"
        f"{f', what drafts read {notes.draft_dtype}' if notes.draft_dtype else ''}, "
        f"{notes.threads} thread(s), packed {notes.packed}, vocabulary {notes.vocab_size}, "
        f"tree check {notes.tree_check:.2g}\nthe target runs as {notes.means}"
        f"{chr(10) + 'compiled kernels: ' + notes.kernels if notes.kernels else ''}",
        markup=False,
    )
    usual = {field.name: field.default for field in fields(SamplingParams)}
    rules = arguments.fields_of(speculator.rules, usual)
    changed = [f"{name}={arguments.shown(v)}" for name, v in rules.items() if v != usual[name]]
    if changed:
        err.print(f"rules of the model: {', '.join(changed)}", markup=False)
    for line in priced(speculator.engine) if beams is None else ():
        err.print(line, markup=False)
    if notes.calibration is not None:
        found = notes.calibration
        err.print(f"threads, dtype, packing: {trust(found.starts, found.agreed)}", markup=False)
        for candidate in found.candidates:
            err.print(f"  measured {candidate}", markup=False)
