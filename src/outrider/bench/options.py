"""Options that the experiments share, written once."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Shared:
    """Options of every experiment that runs a pair."""

    out: Annotated[
        Path, typer.Option(help="Folder for tables and pictures; runs resume from it.")
    ] = Path("bench-results")
    quick: Annotated[bool, typer.Option(help="Under five minutes on two cores.")] = False
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="PNG and SVG.")] = True
    target: Annotated[str | None, typer.Option(help="Target model; default: shipped.")] = None
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None
    prompts: Annotated[Path | None, typer.Option(help="JSON lines: prompt, reference.")] = None
    seed: Annotated[int, typer.Option(help="Recorded with the results.")] = 0
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto"
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: measured.")] = None

    def pair(self) -> Any:
        """The loaded pair."""
        from outrider.errors import ConfigurationError
        from outrider.load import load

        if (self.target is None) != (self.draft is None):
            raise ConfigurationError("a pair needs both --target and --draft; give both or neither")
        return load(self.target, self.draft, dtype=self.dtype, threads=self.threads or "auto")

    def rows(self) -> list[dict[str, str]]:
        """The prompts with their references."""
        from outrider.errors import PromptError
        from outrider.load import shipped

        file = self.prompts or shipped("heldout_prompts.jsonl")
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise PromptError(
                f"cannot read prompts; got {file}: {error}; give JSON lines with 'prompt'"
            ) from error


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of `Shared` and its own: its first argument is a `Shared`."""
    common = inspect.signature(Shared).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**given: Any) -> None:
        command(Shared(**{name: given.pop(name) for name in common}), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*common.values(), *own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


@contextmanager
def bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal; one line per step of work elsewhere would be noise."""
    err = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda text, done, total: shown.update(
            task, description=text, completed=done, total=total
        )
