"""The measured tables of a README, from a folder of results: between two comments, nothing else."""

from pathlib import Path

from outrider.errors import ConfigurationError
from outrider_lab.book import pages
from outrider_lab.book.pages import Page
from outrider_lab.book.report import short, shown
from outrider_lab.certify.report import Row
from outrider_lab.tasks.prompts import KINDS

START, END = "<!-- measured:start -->", "<!-- measured:end -->"


def rewrite(file: Path, folder: Path) -> None:
    """Put the tables of `folder` between the comments of `file`.

    Raises ConfigurationError if either has not what it takes.
    """
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(file)!r}: {error.strerror}") from error
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ConfigurationError(
            f"{str(file)!r} has no place for the tables; put {START} and {END} where they belong"
        )
    file.write_text(f"{before}{START}\n{block(pages.read(folder))}\n{END}{after}", "utf-8")


def block(found: list[Page]) -> str:
    """Markdown of the experiments `speed` and `tasks`, those of them that are there."""
    makers = {"speed": _speed, "tasks": _tasks}
    parts = [
        makers[name](page)
        for name in makers
        for page in found
        if page.document["experiment"] == name
    ]
    if not parts:
        raise ConfigurationError(
            "no results of outrider bench speed or tasks in this folder; run one of them first"
        )
    return "\n\n".join(parts)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(page: Page) -> str:
    settings = page.document["settings"]
    head = [
        "temperature",
        "tokens per call of the target",
        "times faster (95 % interval)",
        "ceiling",
    ]
    rows = [
        [
            f"{row['T']:g}",
            f"{row['tokens a call']:.2f}",
            f"{row['times faster']:.2f} {row['interval']}",
            f"{row['ceiling']:.2f}",
        ]
        for row in page.tables["speed"]
    ]
    pair = "The shipped pair" if settings["target"] == "shipped" else short(settings["target"])
    packed = " with packed weights" if settings["packed"] else ""
    return (
        f"{table(head, rows)}\n\n"
        f"{pair}, {settings['prompts']} prompts, {settings['new tokens']} tokens each, "
        f"{settings['drafted tokens']} drafted a step, {settings['dtype']}{packed} in both arms, "
        f"{_threads(settings)}, arms interleaved, decode time without the prompt. {_where(page)}"
    )


def _tasks(page: Page) -> str:
    settings = page.document["settings"]
    head = ["times faster than plain", "T", *KINDS, "all"]
    rows = [
        [row["drafter"], f"{row['T']:g}", *(str(row.get(kind, "")) for kind in KINDS), row["all"]]
        for row in page.tables["speed"]
    ]
    count = page.tables["speed"][0]["prompts"]
    return (
        f"{table(head, rows)}\n\n"
        f"{short(settings['target'])}, {count} prompts of six kinds, up to "
        f"{settings['new tokens']} tokens each, {settings['dtype']}, {_threads(settings)}, whole "
        f"calls, 95 % intervals over prompts; `default` is {settings['default']}. {_where(page)}"
    )


def _threads(settings: Row) -> str:
    return "one thread" if settings["threads"] == 1 else f"{settings['threads']} threads"


def _where(page: Page) -> str:
    machine = page.document["machine"]
    place = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    return (
        f"{place}, {shown(machine['cores'])} cores, torch {machine['torch']}, "
        f"{page.document['date']}: `{short(page.document['command'])}`."
    )
