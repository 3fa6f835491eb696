"""The experiments of the papers as commands: thin, like all commands."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Out = Annotated[Path, typer.Option(help="Folder for tables and pictures; runs resume from it.")]
Quick = Annotated[bool, typer.Option(help="Under five minutes on two cores.")]
Pictures = Annotated[bool, typer.Option("--pictures/--no-pictures", help="PNG and SVG.")]
Target = Annotated[str | None, typer.Option(help="Target model; default: shipped.")]
DraftName = Annotated[str | None, typer.Option(help="Draft model.")]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines: prompt, reference.")]
Seed = Annotated[int, typer.Option()]
Temperature = Annotated[float, typer.Option("--temperature", "-t")]
Only = Annotated[str | None, typer.Option(help="Only these lengths or budgets, e.g. 14,30.")]
Count = Annotated[int, typer.Option("--count", help="How many prompts.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: measured.")]

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console.width = 160  # files and pipes: no wrapped columns


@contextmanager
def _bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    err = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )


def _pair(target: str | None, draft: str | None, threads: int | None, dtype: str = "auto") -> Any:
    from outrider.errors import ConfigurationError
    from outrider.load import load

    if (target is None) != (draft is None):
        raise ConfigurationError("a pair needs both --target and --draft; give both or neither")
    return load(target, draft, dtype=dtype, threads=threads or "auto")


def _prompts(path: Path | None) -> list[dict[str, str]]:
    from outrider.errors import PromptError
    from outrider.load import shipped

    file = path or shipped("heldout_prompts.jsonl")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise PromptError(
            f"cannot read prompts; got {file}: {error}; give JSON lines with 'prompt'"
        ) from error


def _show(tables: dict[str, list[dict[str, Any]]], names: dict[str, str], out: Path) -> None:
    from outrider.bench.record import table

    for key, title in names.items():
        if tables.get(key):
            console.print(table(title, tables[key]))
    console.print(f"written to {out}", markup=False)


def toy(out: Out = Path("bench-results"), quick: Quick = False, pictures: Pictures = True) -> None:
    """Two drafts of a coin: acceptance by bias (RSD figure 1), all rules."""
    from outrider.bench import toy as experiment

    rows = experiment.run(out, 41 if quick else 101, pictures)
    _show({"means": rows}, {"means": "acceptance of two drafts of a coin"}, out)


def _trees(
    name: str,
    out: Path,
    quick: bool,
    pictures: bool,
    target: str | None,
    draft: str | None,
    prompts: Path | None,
    temperature: float,
    seed: int,
    threads: int | None,
    only: str | None,
    count: int,
) -> None:
    from outrider.bench import trees
    from outrider.errors import ConfigurationError

    pair, rows = _pair(target, draft, threads), _prompts(prompts)
    groups = trees.draft_lengths() if name == "draft-length" else trees.budgets()
    if only is not None:
        wanted = only.split(",")
        if not set(wanted) <= {str(group) for group in groups}:
            raise ConfigurationError(f"--only must name some of {sorted(groups)}; got {only!r}")
        groups = {group: arms for group, arms in groups.items() if str(group) in wanted}
    plan = trees.Plan(prompts=count, temperature=temperature, seed=seed)
    if quick:
        plan = trees.Plan(8, 32, temperature, timed=1, rows=8, seed=seed)
        kept = {2, 4} if name == "draft-length" else {6, 14}
        kept = kept if only is None else set(groups)
        groups = {group: arms for group, arms in groups.items() if group in kept}
    with _bar(name) as progress:
        tables = trees.run(name, groups, pair, rows, plan, out, progress, pictures)
    about = (
        f"T = {temperature:g}, {min(plan.prompts, len(rows))} prompts x {plan.new_tokens} tokens"
    )
    titles = {
        "all": f"{name}: every tree ({about})",
        "best": f"{name}: the best tree of each method",
        "differences": "paired differences of block efficiency",
        "published": "published: Llama 2-7B with a 115 M draft, XSum, T = 0.3 (Jeon et al. 2024)",
    }
    _show(tables, titles, out)


def draft_length(
    out: Out = Path("bench-results"),
    quick: Quick = False,
    pictures: Pictures = True,
    target: Target = None,
    draft: DraftName = None,
    prompts: Prompts = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    threads: Threads = None,
    only: Only = None,
    count: Count = 32,
) -> None:
    """RSD experiment 1: methods at equal draft length."""
    _trees(
        "draft-length",
        out,
        quick,
        pictures,
        target,
        draft,
        prompts,
        temperature,
        seed,
        threads,
        only,
        count,
    )


def budget(
    out: Out = Path("bench-results"),
    quick: Quick = False,
    pictures: Pictures = True,
    target: Target = None,
    draft: DraftName = None,
    prompts: Prompts = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    threads: Threads = None,
    only: Only = None,
    count: Count = 32,
) -> None:
    """RSD experiment 2: methods at equal target budget (6, 10, 14, 21, 30 tokens a call)."""
    _trees(
        "budget",
        out,
        quick,
        pictures,
        target,
        draft,
        prompts,
        temperature,
        seed,
        threads,
        only,
        count,
    )


def k_sweep(
    out: Out = Path("bench-results"),
    quick: Quick = False,
    pictures: Pictures = True,
    target: Target = None,
    draft: DraftName = None,
    prompts: Prompts = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Chen figure 1: time for 128 tokens, its spread, acceptance and loop time for K = 0..7."""
    from outrider.bench import k_sweep as experiment

    pair, rows = _pair(target, draft, threads), _prompts(prompts)
    with _bar("k-sweep") as progress:
        tables = experiment.run(
            pair,
            rows[: 4 if quick else 24],
            out,
            progress,
            temperature=temperature,
            repeats=2 if quick else 4,
            seed=seed,
            pictures=pictures,
        )
    titles = {"k": "draft length K, batch 1", "published": "published (Chen et al. 2023, K = 4)"}
    _show(tables, titles, out)


def alpha(
    out: Out = Path("bench-results"),
    quick: Quick = False,
    pictures: Pictures = True,
    target: Target = None,
    draft: DraftName = None,
    prompts: Prompts = None,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Leviathan tables 2-5: alpha by drafter, expected against measured improvement, lenience."""
    from outrider.bench import alpha as experiment

    pair, rows = _pair(target, draft, threads), _prompts(prompts)
    how: dict[str, Any] = {}
    if quick:
        how = {"tokens": 2048, "library": 300_000, "timed": 2, "repeats": 1, "new_tokens": 32}
    with _bar("alpha") as progress:
        tables = experiment.run(pair, rows, out, progress, seed=seed, pictures=pictures, **how)
    titles = {
        "alpha": "alpha = E[sum min(p, q)]; at T = 0 the agreement of argmaxes",
        "speed": "expected against measured improvement",
        "lenience": "alpha by lenience, T = 1",
    }
    _show(tables, titles, out)


def register(app: typer.Typer) -> None:
    """Add the experiments to `outrider bench`."""
    app.command("toy")(toy)
    app.command("draft-length")(draft_length)
    app.command("budget")(budget)
    app.command("k-sweep")(k_sweep)
    app.command("alpha")(alpha)
