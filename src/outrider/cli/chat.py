"""`outrider chat`: a conversation in the terminal with any instruct model."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from outrider import arguments
from outrider.cli import console
from outrider.cli.console import fail, out
from outrider.cli.gathered import gathered
from outrider.cli.options import (
    Dtype,
    TypedSampling,
    load_speculator,
    refuse_adapters,
    target_name,
    with_setup,
)
from outrider.errors import ConfigurationError, OutriderError, PromptError
from outrider.load_config import LoadConfig
from outrider.models.program_imports import import_lean

if TYPE_CHECKING:
    from outrider.sampling.sampling_params import SamplingParams
    from outrider.text.speculator import Speculator

HELP = """/help           this
/new            forget the conversation
/system TEXT    what the model is told first; without TEXT nothing
/seed N         the seed of the next answers; without N a fresh one each
/image FILE     the next question is about this image; several may be given
/audio FILE     the same for a recording
/tools FILE     a JSON list of tools that the model may call; without FILE none
/result TEXT    what the call gave that the model has written; it goes on from there
/trace          colours: what was drafted and kept, or not
/stats          how the last answer was decoded
/exit           leave (or Ctrl-D)
A line that ends in \\ goes on in the next one; three quotes begin and end a longer text.
Ctrl-C stops an answer, not the chat."""
_FENCE = '"""'


#: A message, or a part of one.
Message: TypeAlias = dict[str, Any]


class Talk:
    """One conversation."""

    def __init__(
        self, speculator: "Speculator", sampling: "SamplingParams", most: int | None, trace: bool
    ) -> None:
        self.speculator, self.sampling, self.most = speculator, sampling, most
        self.trace, self.system = trace, ""
        self.turns: list[Message] = []
        self.media: list[Message] = []  #: what the next question is about
        self.tools: list[Message] = []  #: what the model may call
        self.said = "nothing was said yet"

    def order(self, line: str) -> bool:
        """Obey a line that begins with a slash. Whether the talk goes on."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/new":
            self.turns.clear()
            self.media.clear()
            out.print("(a new conversation)")
        elif name == "/system":
            self.system = rest
            self.turns.clear()
            out.print("(a new conversation)")
        elif name in ("/image", "/audio"):
            self._attach(name.removeprefix("/"), rest)
        elif name == "/tools":
            self._equip(rest)
        elif name == "/result":
            self.answer(rest, role="tool")
        elif name == "/seed":
            self._reseed(rest)
        elif name == "/trace":
            self.trace = not self.trace
            out.print(f"(colours {'on' if self.trace else 'off'})")
            self.explain()
        elif name == "/stats":
            out.print(self.said)
        else:
            if name != "/help":
                out.print(f"(there is no {name})", markup=False)
            out.print(HELP, markup=False)
        return True

    def turn(self, asks: str) -> bool:
        """Listen, and answer or obey. Whether the talk goes on."""
        try:
            text = listen(asks)
        except EOFError:
            return False
        except KeyboardInterrupt:
            out.print("\n(Ctrl-D or /exit leaves)")
            return True
        try:
            if text.startswith("/"):
                return self.order(text.strip())
            if text.strip():
                self.answer(text)
        except OutriderError as error:  # the talk so far stays
            fail(f"{error}; /new forgets the conversation")
        return True

    def explain(self) -> None:
        """What the colours mean, if there are any."""
        if self.trace:
            out.print(console.legend(out.coloured))

    def answer(self, text: str, role: str = "user") -> None:
        """Say something and print what comes back; an answer that is stopped stays as it is.

        `role` "tool": what a call gave. Raises OutriderError for what the model cannot answer, and
        forgets it.
        """
        from outrider.text.output_text import Stop

        if role == "tool" and not self.turns:
            raise PromptError("a result is of a call; got /result and no answer yet; ask first")
        told = conversation(text, self.system, self.turns, self.media)
        told[-1]["role"], self.media = role, []
        stop = Stop(self.most)
        stream = self.speculator.stream([self._prompt(told)], self.sampling, stop, trace=self.trace)
        written, stopped, colour = "", False, out.coloured
        try:
            for block in stream:
                written += block.text
                if self.trace:
                    out.print(console.step(block.block, self._decode, colour), end="")
                else:
                    out.print(block.text, end="", markup=False)
                out.file.flush()
        except KeyboardInterrupt:
            stopped = True
        # kept ahead of what is printed: another Ctrl-C may come meanwhile
        self.turns = [*self.turns, told[-1], {"role": "assistant", "content": written}]
        out.print(" (stopped)" if stopped else "")
        done = stream.result().completions[0]
        if done.finish_reason == "context":
            room = self.speculator.engine.target.context
            out.print(f"(cut: the model's context of {room} tokens is full; /new forgets the talk)")
        stats = done.stats
        self.said = (
            f"{stats.new_tokens} tokens in {stats.steps} calls of the target: "
            f"{stats.block_efficiency:.2f} a call, {stats.tokens_per_second:.1f} a second"
        )

    def _decode(self, token: int) -> str:
        return console.written(self.speculator.tokenizer, token)

    def _prompt(self, told: list[Message]) -> Any:
        """A conversation as it is, or as the template writes it where the model has tools."""
        if not self.tools:
            return told
        from outrider.text.prompts import chat as templated

        if self.speculator.media is not None and any(is_media(turn) for turn in told):
            raise PromptError("tools and files are not said together; got both; give one of them")
        return templated(self.speculator.tokenizer, told, template={"tools": self.tools})

    def _equip(self, rest: str) -> None:
        try:
            self.tools = read_tools(arguments.at_home(Path(rest)), self.speculator) if rest else []
        except OutriderError as error:
            fail(str(error))
            return
        names = ", ".join(str(tool["function"]["name"]) for tool in self.tools)
        out.print(f"(it may call {names or 'nothing'})", markup=False)

    def _attach(self, kind: str, rest: str) -> None:
        files = [arguments.at_home(Path(rest))]
        try:
            if self.speculator.media is None:
                raise PromptError(
                    f"this model reads text alone; got /{kind}; use an image-text or audio "
                    "language model"
                )
            if not rest:
                raise PromptError(f"no file was named; got /{kind} alone; say /{kind} FILE")
            self.media += attached(*((files, []) if kind == "image" else ([], files)))
        except OutriderError as error:
            fail(str(error))
            return
        out.print(f"(the next question is about {len(self.media)} of these)")

    def _reseed(self, rest: str) -> None:
        if rest and not rest.isdecimal():
            out.print("(a seed is a whole number)")
            return
        self.sampling = replace(self.sampling, seed=int(rest) if rest else None)


def attached(images: Sequence[Path], recordings: Sequence[Path]) -> list[Message]:
    """Files as parts of a message. Raises PromptError for one that is not there."""
    parts: list[Message] = []
    for kind, paths in (("image", images), ("audio", recordings)):
        for path in paths:
            if not path.is_file():
                raise PromptError(f"no {kind} to read; got {str(path)!r}; check the path")
            parts.append({"type": kind, kind: str(path)})
    return parts


def is_media(turn: Message) -> bool:
    """Whether a message has parts that are no text.

    >>> is_media({"role": "user", "content": "Hello"})
    False
    """
    return not isinstance(turn["content"], str)


def read_tools(file: Path, speculator: "Speculator") -> list[Message]:
    """The tools of a JSON file, as OpenAI's clients write them.

    Raises PromptError for another file, and for a model whose chat template knows of no tools.
    """
    try:
        found: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        do = "write a JSON list of tools"
        raise PromptError(f"no tools to read; got {str(file)!r} ({error}); {do}") from error
    named = isinstance(found, list) and all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in found
    )
    if not named or not found:
        raise PromptError(
            f"tools are a list of functions with names; got another thing in {str(file)!r}; write "
            '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
        )
    template = speculator.tokenizer.chat_template if speculator.tokenizer is not None else None
    if "tools" not in str(template):
        raise PromptError(
            "this model's chat template says nothing of tools; got /tools; use a model that was "
            "trained to call them"
        )
    tools: list[Message] = found
    return tools


def conversation(
    text: str,
    system: str | None = None,
    turns: Sequence[Message] = (),
    media: Sequence[Message] = (),
) -> list[Message]:
    """The messages up to what the user says now, about these images or recordings.

    >>> conversation("Hello", "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hello'}]
    """
    told = console.as_typed(system) if system else ""
    first: list[Message] = [{"role": "system", "content": told}] if told else []
    said: Any = [*media, {"type": "text", "text": text}] if media else text
    return [*first, *turns, {"role": "user", "content": said}]


def has_template(speculator: "Speculator") -> bool:
    """Whether the tokenizer renders conversations."""
    if speculator.media is not None and speculator.media.chat_template is not None:
        return True
    tokenizer = speculator.tokenizer
    return tokenizer is not None and tokenizer.chat_template is not None


def refuse_untemplated(speculator: "Speculator", target: str | None, do: str) -> None:
    """Refuse a model that nobody can talk with, and say what to do with it."""
    if has_template(speculator):
        return
    does = f"goes on from text; {do}, or give --chat-template FILE"
    if speculator.hearing is not None:
        does = "turns speech into text; use `outrider transcribe`"
    elif speculator.opening is not None:
        does = "reads a source beside its own text; use `outrider generate --source`"
    raise ConfigurationError(
        f"{target or 'the shipped target'} has no chat template; got a model that {does}, or "
        "--model with an instruct model"
    )


def edit_lines() -> None:
    """Make what is typed a line that can be edited, recalled by the arrows and of any length, and
    a text that is pasted one line; a terminal by itself cuts lines at 4,095 bytes.

    Nothing is kept beyond this talk. Does nothing where Python was built without readline.
    """
    try:
        import readline
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):  # which has another language and no such key
        readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: self-insert")  # a tab is part of a text


def listen(prompt: str) -> str:
    """What is typed: one line, several that end in a backslash, or a text between fences.

    What the input's end cuts off is one, too. Raises EOFError where there is no more of it.
    """
    line, more = input(prompt), "... " if prompt else ""
    fenced = line.strip().startswith(_FENCE)
    lines = [line.strip().removeprefix(_FENCE) if fenced else line]
    with suppress(EOFError):
        if fenced:
            while not lines[-1].rstrip().endswith(_FENCE) or (len(lines) == 1 and not lines[0]):
                lines.append(input(more))
        while not fenced and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(more))
    if fenced:
        return "\n".join(lines).rstrip().removesuffix(_FENCE).strip("\n")
    return "\n".join(lines)


@with_setup
@gathered("typed", TypedSampling)
def chat(
    setup: LoadConfig,
    *,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    trace: Annotated[
        bool, typer.Option("--trace", help="Colours: drafted and kept, or the target's own.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            help="Most tokens of an answer. Default: all there is room for.",
        ),
    ] = None,
    typed: TypedSampling,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Talk with an instruct model. /help says what else there is."""
    import_lean()
    from outrider.sampling.sampling_params import SamplingParams

    refuse_adapters(setup)
    given = typed.said(seed=seed)
    SamplingParams(**given)  # before a model is read
    speculator = load_speculator(setup, dtype)
    sampling, _ = speculator.defaults.over(given, {"temperature": 0.7})
    refuse_untemplated(speculator, target_name(setup), "use `outrider generate`")
    talk = Talk(speculator, sampling, max_new_tokens, trace)
    talk.system = system
    asks = "> " if sys.stdin.isatty() else ""
    if asks:
        edit_lines()
        out.print("(/help says what can be typed; Ctrl-D leaves)")
    talk.explain()
    going = True
    while going:
        with suppress(KeyboardInterrupt):  # a key that is held down comes at any place
            going = talk.turn(asks)
