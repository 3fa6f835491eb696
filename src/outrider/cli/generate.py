"""`outrider generate`: complete a prompt, a file or standard input."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider import verifiers
from outrider.cli import options, paint
from outrider.cli.console import EXIT_INTERRUPTED, err, out
from outrider.errors import ConfigurationError, PromptError
from outrider.laws.sampling import Sampling
from outrider.text.speculator import Generation, Speculator, Stop, Stream


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input."""
    if prompt is not None and file is not None:
        raise ConfigurationError("got both a prompt and --file; give one of them")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        err.print("reading the prompt from the keyboard; Ctrl-D ends it", style="dim")
    try:
        raw = file.read_bytes() if file is not None else sys.stdin.buffer.read()
    except OSError as error:
        raise PromptError(
            f"cannot read the prompt; got {file}: {error.strerror}; check the path"
        ) from error
    where = str(file) if file is not None else "standard input"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not valid UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            "convert the file first (for example with iconv)"
        ) from error


@options.with_setup
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")
    ] = None,
    *,
    setup: options.Setup,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")
    ] = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and text get rarer; 1 is off.")
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Off a logit each time its token was generated; 0 is off.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Off a logit once its token was generated; 0 is off.")
    ] = 0.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="No n-gram of this size twice; 0 is off.")
    ] = 0,
    min_new_tokens: Annotated[int, typer.Option(help="No stop token before so many tokens.")] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text. Default: another every time.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be repeated.")
    ] = None,
    dtype: options.Dtype = "auto",
    stream: Annotated[
        bool, typer.Option("--stream", help="Print blocks as they are decoded.")
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Show what became of drafted tokens: accepted, [-rejected-], {+corrected+} and "
            "{*bonus*}; on a terminal in colours.",
        ),
    ] = False,
    as_json: options.AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Say how the models run, what drafts and what judges."
        ),
    ] = False,
) -> None:
    """Complete a prompt with speculative decoding; the text goes to standard output."""
    if as_json and (stream or trace):
        raise ConfigurationError(
            "--json prints one document; got --stream or --trace too; drop one"
        )
    how = Sampling(
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        min_new_tokens=min_new_tokens,
    )
    end = Stop(max_new_tokens, tuple(stop or ()))
    text = read_prompt(prompt, file)
    if not text:
        raise PromptError("the prompt is empty; got ''; give at least one character")
    speculator = setup.load(dtype)
    judged = speculator.engine.choose_rule("all" if temperature == 0 else "none")
    how_made = {
        "drafter": speculator.engine.drafter.name,
        "rule": judged.name,
        "rule_options": verifiers.taken(judged),
        "exact": judged.exact,
    }
    if verbose:
        _describe(speculator, how_made)
    running = speculator.stream(text, how, end, trace=trace)
    try:
        _print(running, speculator, stream, trace)
    except KeyboardInterrupt:
        _finish(running.result(), how_made if as_json else None, printed=stream or trace)
        err.print("interrupted; what was generated is above", style="yellow")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _finish(running.result(), how_made if as_json else None, printed=stream or trace)


def _print(running: Stream, speculator: Speculator, stream: bool, trace: bool) -> None:
    colour = out.is_terminal and not out.no_color

    def decode(token: int) -> str:
        text: str = speculator.tokenizer.decode([token], skip_special_tokens=True)
        return text

    for block in running:
        if trace:
            out.print(paint.step(block.block, decode, colour), end="")
        elif stream:
            sys.stdout.write(block.text)
            sys.stdout.flush()


def _finish(result: Generation, about: dict[str, object] | None, printed: bool) -> None:
    """The text, if it is not there yet, or a document that says how it was made as well."""
    done = result.completions[0]
    if about is not None:
        document: dict[str, object] = {
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            **about,
            "stats": result.stats.as_dict(),
        }
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    elif printed:
        sys.stdout.write("\n")
    else:
        sys.stdout.write(done.text + "\n")
    sys.stdout.flush()


def _describe(speculator: Speculator, how_made: dict[str, object]) -> None:
    notes = speculator.notes
    err.print(
        f"target {notes.target}\ndraft {notes.draft}"
        f"{f', which attends to {notes.encoder} encoder' if notes.encoder else ''}\n"
        f"drafter {how_made['drafter']}, rule {how_made['rule']} "
        f"({'exact' if how_made['exact'] else 'lossy: the text is not from the law of the target'})"
        f"\ndevice {notes.device}, {notes.dtype}, "
        f"{notes.threads} thread(s), packed {notes.packed}, vocabulary {notes.vocab_size}, "
        f"tree check {notes.tree_check:.2g}",
        markup=False,
    )
    for candidate in notes.calibration.candidates if notes.calibration else ():
        err.print(f"  measured {candidate}", markup=False)
