"""`outrider bench all` and `outrider bench report`."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.errors import ConfigurationError

BOOK = Path("outrider-book")
Html = Annotated[
    Path | None, typer.Option(help="The report's file. Default: report.html in the folder.")
]


def every(
    app: typer.Typer,
    quick: bool,
    models: Path | None,
    out: Path,
    only: str | None,
    html: Path | None,
) -> None:
    """Run, and write the report, even if some of it failed."""
    from outrider_lab.book import plan, runs
    from outrider_lab.drawing import pyplot

    pyplot()  # what is missing for pictures is said now
    names = None if only is None else only.split(",")
    wanted, absent = plan.planned(app, out, quick, models, names)
    record = runs.Record(out, quick)
    record.document["absent"] = absent
    record.write()
    failed = runs.run_all(wanted, record, lambda line: typer.echo(line, err=True))
    write(out, html, None)
    if failed:
        raise ConfigurationError(
            f"{len(failed)} of {len(wanted)} experiments failed: {', '.join(failed)}; each folder "
            f"of {str(out)!r} has a {runs.LOG}; run the same command again to try them once more"
        )


def write(folder: Path, html: Path | None, readme: Path | None) -> None:
    """The report of a folder, and its README's tables."""
    from outrider_lab.book import readme as markdown
    from outrider_lab.book.report import render

    path = html or folder / "report.html"
    text = render(folder)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the report to {str(path)!r}: {error.strerror}; give another --html"
        ) from error
    typer.echo(f"written to {path}")
    if readme is not None:
        markdown.rewrite(readme, folder)
        typer.echo(f"tables written to {readme}")


def register(app: typer.Typer) -> None:
    """Add both to `outrider bench`."""

    @app.command("all")
    def run_all(
        quick: Annotated[
            bool,
            typer.Option(
                "--quick/--full", help="Half an hour on two cores, or all of it: many hours."
            ),
        ],
        models: Annotated[
            Path | None,
            typer.Option(help="Folder of models of your own, as CONTRIBUTING.md names them."),
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder of all results; runs go on there.")] = BOOK,
        only: Annotated[
            str | None, typer.Option(help="Only these experiments, e.g. toy,k-sweep.")
        ] = None,
        html: Html = None,
    ) -> None:
        """Every experiment, and one report of them all."""
        every(app, quick, models, out, only, html)

    @app.command("report")
    def report(
        folder: Annotated[Path, typer.Argument(help="Folder of results.")] = BOOK,
        html: Html = None,
        readme: Annotated[
            Path | None,
            typer.Option(help="Also write the measured tables into this Markdown file."),
        ] = None,
    ) -> None:
        """One HTML page of a folder of results; it needs nothing else, and no network."""
        write(folder, html, readme)
