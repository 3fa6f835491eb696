"""`outrider batch`: a file of requests to a file of answers."""

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.console import EXIT_INTERRUPTED, EXIT_SOME, LINE_SECONDS, bar, err
from outrider.cli.options import Dtype, load_speculator, target_name, with_setup
from outrider.cli.serve import named
from outrider.errors import BackendUnavailable, ConfigurationError
from outrider.load_config import LoadConfig
from outrider.models.program_imports import import_lean
from outrider.plugins import required

if TYPE_CHECKING:
    from outrider.server.batch_file import BatchResults, Row

GROUP = "outrider.batch_workers"  #: of entry points
Workers = Callable[..., "Generator[Row]"]


@with_setup
def batch(
    setup: LoadConfig,
    requests: Annotated[Path, typer.Argument(help="A file of requests, one JSON object a line.")],
    answers: Annotated[Path, typer.Argument(help="The file of their answers; goes on if there.")],
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests decoded side by side.")] = 16,
    max_model_len: Annotated[
        int, typer.Option(min=64, help="Tokens of a row: prompt, answer and draft.")
    ] = 2048,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Default: the target's.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--ray", min=1, help="So many workers of a Ray cluster (RAY_ADDRESS), not this process."
        ),
    ] = None,
    dtype: Dtype = "auto",
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A run that was stopped goes on where it was: answers that are there stay, and nothing is
    answered twice. Lines that are no requests, and requests that cannot be answered, get a row that
    says why; the exit code is 1 then, and the same command asks them again.
    """
    import_lean()
    try:
        from outrider.server import batch_file
    except ImportError as error:
        raise BackendUnavailable(
            f"batches need the extra 'server' ({error.name} is missing); "
            "pip install 'outrider[server]'"
        ) from error
    if not requests.is_file():
        raise ConfigurationError(
            f"there is no file of requests; got {str(requests)!r}; give one, one request a line"
        )
    if answers.exists() and answers.samefile(requests):
        raise ConfigurationError(
            f"answers would be written over the requests; got {str(answers)!r} for both; name "
            "another file for the answers"
        )
    with batch_file.BatchResults(answers) as file:
        names = {wanted.name for wanted in batch_file.requests(requests)}
        file.check(names, requests)
        if file.names or file.dropped:
            err.print(f"{len(file.names)} of {len(names)} requests have their answers already")
        left = (one for one in batch_file.requests(requests) if one.name not in file.names)
        written: Generator[Row] = (row for row in list["Row"]())
        if len(file.names) < len(names):
            name = served_model_name or named(target_name(setup))
            speculator = partial(load_speculator, setup, dtype)
            if workers is None:
                written = batch_file.answers(speculator(), name, max_num_seqs, max_model_len, left)
            else:
                on_ray: Workers = required(GROUP, "ray", "--ray", "outrider-ray")
                written = on_ray(speculator, name, max_num_seqs, max_model_len, left, workers)
        _write(written, file, len(names))
        err.print(f"{len(names)} requests, {file.faults} of them with an error: {answers}")
    if file.faults:
        raise typer.Exit(EXIT_SOME)


def _write(rows: "Generator[Row]", file: "BatchResults", total: int) -> None:
    """Add the rows as they come."""
    try:
        with bar("answers", LINE_SECONDS) as show, closing(rows):  # the engine ends before we do
            show("answers", len(file.names), total)
            for row in rows:
                if file.write(row):
                    show("answers", len(file.names), total)
    except KeyboardInterrupt:
        there = f"{len(file.names)} of {total} requests have their rows in {file.path}"
        err.print(f"interrupted; {there}; the same command goes on", style="yellow", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None
