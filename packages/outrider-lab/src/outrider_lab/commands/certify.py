"""`outrider certify`: does this drafter with this rule keep the target's distribution?"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from outrider.cli import options
from outrider.cli.console import bar, out
from outrider.drafters import DRAFTERS, get
from outrider.errors import ConfigurationError, PromptError
from outrider.load_config import LoadConfig
from outrider_lab.certify import Power

if TYPE_CHECKING:
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.speech.speech_model import WhisperModel
    from outrider.text.speculator import Speculator
    from outrider.types import Inputs
    from outrider_lab.certify import CertifyReport


# What `outrider certify` decodes: prompts of a file, or sources and how answers to them begin.

CUT = 32  #: last tokens of each prompt: contexts should differ, not be long
MADE_UP = 8  #: sources, where none are given


class Decoded(NamedTuple):
    """One entry for each text that is begun."""

    prompts: list[list[int]]
    inputs: "list[Inputs] | None" = None  #: what is read besides; None: made up, or text alone
    named: str = ""  #: where they come from, for results of several runs


def certify_prompts(
    speculator: "Speculator", prompts: Path | None, sources: Path | None
) -> Decoded:
    """Prompts as token ids, the last few of each; or sources, made up if there is no file.

    Sources are texts or, for speech to text, recordings: one a line, or JSON lines with `source`.
    """
    from outrider_lab.bench.prompts import read_rows

    if speculator.engine.target.reads == "text":
        if sources is not None:
            raise ConfigurationError(
                "--sources is what an encoder-decoder reads; got a model that goes on from its "
                "prompt; give --prompts"
            )
        return Decoded(_prompts(speculator, prompts))
    if prompts is not None:
        raise ConfigurationError(
            "--prompts is what a model without an encoder goes on from; got an encoder-decoder; "
            "give --sources, or neither to have sources made up"
        )
    hearing, reader = speculator.hearing, speculator.prompt_encoder
    if sources is None:
        begun = _begun(hearing) if hearing is not None else reader.begin()
        return Decoded([begun] * MADE_UP)
    texts = [str(row["source"]) for row in read_rows(sources, "source")]
    if hearing is not None:
        inputs = [_heard(hearing, text, number) for number, text in enumerate(texts)]
        return Decoded([_begun(hearing)] * len(texts), inputs, str(sources.resolve()))
    asked = reader.read(texts)
    return Decoded(asked.prompts, asked.sources, str(sources.resolve()))


def _prompts(speculator: "Speculator", path: Path | None) -> list[list[int]]:
    from outrider_lab.bench.prompts import read_prompts

    texts = read_prompts(path)
    if speculator.tokenizer is None:
        raise ConfigurationError(
            "prompts are text, but the target has no tokenizer; got none beside its weights; "
            "use outrider_lab.certify.certify with token ids"
        )
    ids = [list(speculator.tokenizer.encode(text))[-CUT:] for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        if len(tokens) < 3:
            raise PromptError(
                f"prompts must have at least 3 tokens; got {len(tokens)} in {text!r}; make it "
                "longer or remove it"
            )
    return ids


def _begun(hearing: "WhisperModel") -> list[int]:
    """A transcript in the model's first language, without times."""
    from outrider.speech.transcriber import window_prompt

    words = hearing.vocabulary
    ids, _ = window_prompt(words, next(iter(words.languages), None), "transcribe", timestamps=False)
    return ids


def _heard(hearing: "WhisperModel", path: str, number: int) -> "Inputs":
    """The first window of a recording."""
    from outrider.speech import audio, windows
    from outrider.speech.speech_model import one_row

    recording = audio.look(path, number, None, hearing.rate)
    found = windows.frames(hearing.extractor, recording.read(hearing.rate))
    return one_row(found.window(0, hearing.frames), hearing.model.device)


@options.with_setup
def command(
    *,
    setup: LoadConfig,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with 'prompt', or one a line. Default: held-out code."),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option(
            help="For encoder-decoders, one a line: texts, or recordings' paths. Default: made up."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Texts decoded together.")] = Power.rows,
    tokens: Annotated[int, typer.Option(help="Tokens for the conditional tests.")] = Power.tokens,
    samples: Annotated[int, typer.Option(help="Runs of the marginal test.")] = Power.samples,
    equality_tokens: Annotated[
        int, typer.Option(help="Tokens of each certificate.")
    ] = Power.equality_tokens,
    level: Annotated[
        float, typer.Option(help="Chance of a false alarm by any test.")
    ] = Power.level,
    effect: Annotated[
        float, typer.Option(help="Shift of probability that must be detectable to say 'exact'.")
    ] = Power.effect,
    seed: Annotated[int, typer.Option(help="Another seed is another sample.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32 keeps the tests sharp; also bfloat16, float16, int8, int4.")
    ] = "float32",
    every: Annotated[
        Path | None,
        typer.Option(
            "--matrix",
            help="Certify every exact rule with every drafter; results go to this file.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="With --matrix: only these drafters, e.g. recall,suffix.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Test that speculative decoding keeps the target's distribution.

    Exit code 0: exact, 1: not exact, 3: inconclusive, 2: an error. Tests: greedy certificate,
    coupled equality, set tests and PIT over pooled contexts, verdicts given their drafts, marginal.
    """
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.text.decoder_prompt import ruled
    from outrider_lab.certify import certify

    power = Power(tokens, samples, equality_tokens, level, effect=effect, seed=seed, rows=rows)
    sampling = SamplingParams(temperature, top_k, top_p, min_p)
    if every is not None and options.choices(setup):
        raise ConfigurationError(
            "--matrix certifies every drafter with every rule; got "
            f"{', '.join(options.choices(setup))} as well; leave them out, or leave --matrix out "
            "to certify one pair"
        )
    if only is not None and every is None:
        raise ConfigurationError(
            f"--only chooses drafters of --matrix; got --only {only} alone; give --drafter"
        )
    options.refuse_adapters(setup)
    if setup.chat_template is not None:
        raise ConfigurationError(
            "--chat-template is for conversations; got it with prompts, which are read as they "
            "are; leave it out, and write prompts with the template's marks"
        )
    for name in (names := only.split(",") if only is not None else list(DRAFTERS)):
        get(name)  # or UnknownName
    speculator = options.load_speculator(setup, dtype)
    decoded = certify_prompts(speculator, prompts, sources)
    sampling = ruled(sampling, speculator.rules)
    if every is not None:
        _matrix(speculator, decoded, sampling, power, every, names, as_json)
        return
    about = {"target": speculator.notes.target, "draft": speculator.notes.draft, "dtype": dtype}
    with bar("certify") as show:
        report = certify(
            speculator.engine,
            decoded.prompts,
            sampling,
            power,
            inputs=decoded.inputs,
            setup=about,
            progress=show,
        )
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
    else:
        _print(report)
    raise typer.Exit(report.exit_code)


def _print(report: "CertifyReport") -> None:
    setup = report.setup
    lossy = "" if setup["rule_says_exact"] else " (lossy: it changes the distribution)"
    out.print(
        f"{setup['drafter']} verified by {setup['rule']}{lossy}\n", style="bold", markup=False
    )
    for test in report.tests:
        mark = "--    " if not test.conclusive else "ok    " if test.passed else "FAILED"
        chance = " " * 11 if test.p_value is None else f"p = {test.p_value:<7.2g}"
        line = f"{mark} {test.name:<20} {test.statistic:>9.4g}  {chance}  {test.detail}"
        out.print(line, style=None if test.passed else "red", markup=False)
    out.print()
    out.print(f"verdict: {report.verdict.upper()}", style="bold", markup=False)
    out.print(explain(report), markup=False)


def explain(report: "CertifyReport") -> str:
    """One paragraph: what the verdict rests on."""
    found = report.detectable
    lines = [
        f"joint false-alarm level {report.level:g}; {report.seconds:.0f} s; "
        f"tolerance of the certificates {report.setup['tolerance']:.2g}"
    ]
    if found is not None:
        lines.append(
            f"with probability {report.power:g} it finds a shift of {found:.3f} probability per "
            f"token into the tokens that the draft overrates; demanded: {report.effect:g}"
        )
    if report.verdict == "inconclusive":
        lines.append("too little power to say 'exact': raise --tokens (error falls as its root)")
    if report.verdict == "not exact":
        lines.append(f"failed: {', '.join(report.failed)}")
    return "\n".join(lines)


def _matrix(
    speculator: "Speculator",
    decoded: Decoded,
    sampling: "SamplingParams",
    power: "Power",
    path: Path,
    names: list[str],
    as_json: bool,
) -> None:
    from outrider.drafters import DraftModel, Translated
    from outrider_lab.certify import matrix

    target, ids = speculator.engine.target, decoded.prompts
    drafter = speculator.engine.drafter  # nobody chose it: the draft model's, if there is one
    draft = drafter.model if isinstance(drafter, DraftModel | Translated) else None
    made = matrix.drafters(
        draft, [token for prompt in ids for token in prompt], target.vocab_size, target
    )
    missing = [name for name in matrix.missing(made) if name in names]
    made = {label: drafter for label, drafter in made.items() if label.split()[0] in names}
    todo = matrix.pairs(made)
    notes = speculator.notes
    models = [notes.target, notes.draft, notes.dtype, target.device]
    about = matrix.identity([*models, *filter(None, [decoded.named])], ids)
    known = matrix.done(path, sampling, power, about)
    left = sum(pair.key not in known for pair in todo)
    if not as_json:
        out.print(
            f"{len(todo)} legal pairs of exact rule and drafter, {left} to do; results: {path}. "
            "Interrupt and run the same command to resume.",
            markup=False,
        )
        for name in missing:
            other = " with another tokenizer" * ("translated" in DRAFTERS[name].needs)
            out.print(f"left out: {name}, which needs a draft model{other}", style="yellow")
    rows, began, fresh = [], time.perf_counter(), 0
    for pair, row, old in matrix.run(
        target, todo, ids, sampling, power, path, about=about, inputs=decoded.inputs
    ):
        rows.append(row)
        fresh += not old
        if as_json:
            continue
        line = f"{row['verdict']:<10} {pair.key}"
        if old:
            out.print(f"{line} (already there)", markup=False)
            continue
        minutes = (left - fresh) * (time.perf_counter() - began) / fresh / 60
        out.print(f"{line} ({row['seconds']:.0f} s; about {minutes:.0f} min left)", markup=False)
    verdicts = {row["verdict"] for row in rows}
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        exact = sum(row["verdict"] == "exact" for row in rows)
        out.print(f"{exact} of {len(rows)} pairs exact", style="bold")
    raise typer.Exit(1 if "not exact" in verdicts else 3 if "inconclusive" in verdicts else 0)
