"""The experiments of the papers as commands: thin, like all commands."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider import verifiers
from outrider.cli.console import LOADING, bar, working
from outrider_lab.bench.prompts import read_prompts, read_rows
from outrider_lab.images.command import images
from outrider_lab.papers import options
from outrider_lab.papers.chen_command import chen
from outrider_lab.papers.options import RESULTS
from outrider_lab.papers.record import console, draft_of, folder, show
from outrider_lab.papers.wagner_command import wagner
from outrider_lab.peers.command import peers
from outrider_lab.tasks.command import tasks

Temperature = Annotated[float, typer.Option("--temperature", "-t", min=0, help="0 is greedy.")]


def _law(temperature: float, top_p: float) -> str:
    return f"T = {temperature:g}" + (f", top-p {top_p:g}" if top_p < 1 else "")


def toy(
    out: Annotated[Path, typer.Option(help="Folder for tables and pictures.")] = RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="A coarser grid.")] = False,
    pictures: options.Pictures = True,
) -> None:
    """Jeon et al. 2024 (RSD), figure 1: two drafts of a coin, acceptance by bias, all rules."""
    from outrider_lab.papers import toy as experiment

    folder(out)
    rows = experiment.run(out, 41 if quick else 101, pictures)
    show(toy, {"means": rows}, {"means": "acceptance of two drafts of a coin"}, out)


@options.with_asked(without=("quick",))
def tree(asked: options.PaperRequest, temperature: Temperature = 1.0) -> None:
    """Jeon et al. 2024 (RSD), figures 2 and 3: one step's trees, both laws, the verdict."""
    from outrider.sampling.sampling_params import SamplingParams
    from outrider_lab.papers import one_step as experiment

    how = SamplingParams(temperature, seed=asked.seed)
    pair, rows = asked.pair(), read_rows(asked.prompts)
    tables = experiment.run(pair, rows, asked.out, how, asked.pictures)
    titles = {
        "nodes": "one step behind the first prompt: every drafted token",
        "steps": "what the step emitted",
    }
    show(tree, tables, titles, asked.out)


def _trees(name: str, about: str) -> Callable[..., None]:
    """The command of an experiment on trees: `name` is draft-length or budget."""

    @options.with_asked()
    def command(
        asked: options.PaperRequest,
        temperature: Temperature = 0.3,
        top_p: options.TopP = 1.0,
        only: Annotated[
            str | None, typer.Option(help="Only these lengths or budgets, e.g. 14,30.")
        ] = None,
        count: Annotated[int, typer.Option(min=1, help="Prompts to judge on.")] = 80,
        choosing: Annotated[
            int, typer.Option(min=1, help="Other prompts, to choose trees on.")
        ] = 16,
        samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 2,
        timed: Annotated[
            int, typer.Option(min=0, help="Prompts under the clock; 0: no times.")
        ] = 20,
        rule: options.Rule = None,
    ) -> None:
        from outrider.errors import ConfigurationError
        from outrider_lab.papers import tree_runs, tree_tables, trees

        own = verifiers.named(rule)
        groups = trees.draft_lengths() if name == "draft-length" else trees.budgets()
        if only is not None:
            wanted = only.split(",")
            if not set(wanted) <= {str(group) for group in groups}:
                raise ConfigurationError(f"--only must name some of {sorted(groups)}; got {only!r}")
            groups = {group: arms for group, arms in groups.items() if str(group) in wanted}
        elif asked.quick:
            groups = {g: groups[g] for g in ((2, 4) if name == "draft-length" else (6, 14))}
        plan = tree_runs.TreePlan(
            count,
            choosing,
            samples,
            temperature=temperature,
            top_p=top_p,
            timed=timed,
            seed=asked.seed,
        )
        if asked.quick:
            plan = tree_runs.TreePlan(
                8, 8, 1, 32, temperature, top_p, timed=min(timed, 1), rows=8, seed=asked.seed
            )
        pair = asked.pair()
        rows = read_rows(asked.prompts)
        if own is not None:
            groups = trees.with_rule(groups, own, draft_of(pair))
        with bar(name) as progress:
            tables = tree_tables.run(
                name, groups, pair, rows, plan, asked.out, progress, asked.pictures
            )
        chosen, judged = (len(part) for part in tree_runs.split(rows, plan))
        size = f"{_law(temperature, top_p)}, {plan.new_tokens} tokens"
        titles = {
            "trees": f"{name}: every tree ({size}, {chosen} choosing prompts)",
            "methods": f"{name}: the chosen trees on {judged} other prompts x {plan.samples}",
            "differences": "paired differences of block efficiency on those prompts",
            "published": "Jeon et al. 2024: Llama 2-7B, 115 M draft, XSum, T = 0.3; all rows of "
            "its 27 tables are in published-all",
        }
        show(command, tables, titles, asked.out)

    command.__doc__, command.__name__ = about, name.replace("-", "_")
    return command


draft_length = _trees(
    "draft-length", "Jeon et al. 2024 (RSD), experiment 1: methods at equal draft length."
)
budget = _trees(
    "budget",
    "Jeon et al. 2024 (RSD), experiment 2: methods at equal target budget (6, 10, 14, 21 or 30 "
    "tokens a call).",
)


@options.with_asked()
def k_sweep(
    asked: options.PaperRequest,
    temperature: Temperature = 1.0,
    top_p: options.TopP = 0.8,
    rule: Annotated[
        str, typer.Option(help="Verification rule; Chen's is rejection.")
    ] = "rejection",
) -> None:
    """Chen et al. 2023, figure 1: time for 128 tokens, acceptance and loop time for K = 0..7."""
    from outrider_lab.papers import k_sweep as experiment
    from outrider_lab.papers.published import CHEN_FIGURE

    verifier = verifiers.get(rule)  # or UnknownName, before models are read
    pair = asked.pair()  # ahead of the bar: a load shows its own
    with bar("k-sweep") as progress:
        tables = experiment.run(
            pair,
            read_rows(asked.prompts)[: 20 if asked.quick else 24],
            asked.out,
            progress,
            temperature=temperature,
            top_p=top_p,
            repeats=1 if asked.quick else 4,
            rule=rule,
            seed=asked.seed,
            pictures=asked.pictures,
        )
    by = verifiers.listed([verifier])[0]
    titles = {
        "k": f"draft length K, batch 1, rule {by}, {_law(temperature, top_p)}",
        "published": f"Chen et al. 2023, table 1: Chinchilla 70B, K = 4; {CHEN_FIGURE}",
    }
    show(k_sweep, tables, titles, asked.out)


@options.with_asked()
def alpha(
    asked: options.PaperRequest,
    top_p: options.TopP = 1.0,
    timed: Annotated[int, typer.Option(min=0, help="Prompts under the clock; 0: no times.")] = 20,
    recordings: Annotated[
        Path | None, typer.Option(help="Folder of recordings, for a Whisper --model.")
    ] = None,
    language: Annotated[str, typer.Option(help="Spoken in the recordings.")] = "en",
) -> None:
    """Leviathan et al. 2023, tables 2-5: alpha by drafter and task, improvement, lenience.

    A chat model is asked the shipped prompts, another one goes on from held-out code. Besides, both
    write from nothing. Encoder-decoders read the 'source' of each line: --model corrector is the
    shipped one, others need --prompts, a Whisper --recordings. Without --draft-model it is measured
    with drafters that need none.
    """
    from outrider_lab.papers import alpha as experiment, alpha_tasks

    amount = experiment.AlphaAmount(timed=timed, seed=asked.seed, top_p=top_p)
    if asked.quick:
        tokens = 2048 if recordings is None else 1024  # an encoder takes its time
        amount = experiment.AlphaAmount(
            tokens, 300_000, min(timed, 2), 1, 32, 64, 16, 32, asked.seed, top_p
        )
    rows = options.alpha_rows(asked, recordings, language, 40 if asked.quick else 240)
    pair = asked.pair_or_alone()
    rows = alpha_tasks.usual_rows(pair) if rows is None else rows
    with bar("alpha") as progress:
        tables = experiment.run(pair, rows, asked.out, progress, amount, asked.pictures)
    titles = {
        "alpha": "alpha = E[sum min(p, q)]; at T = 0 the agreement of argmaxes",
        "tasks": "alpha by task: the prompts' category; unconditional: from nothing, drawn",
        "speed": "expected against measured improvement",
        "two": "two drafts at one node on recorded laws; RSD's experiments are at T = 0.3",
        "lenience": "alpha by lenience: sum min(p / l, q); T = 0: p(argmax q) >= l max p",
        "lenience-speed": "improvement by lenience (published: expected only)",
        "quality": "texts against what was meant; 'as plain': the share of plain decoding's texts",
        "quality-equal": "ROUGE-L (of 1) less plain decoding's: two one-sided tests at 5 %; power "
        "is the chance to show equality if there is no difference",
    }
    show(alpha, tables, titles, asked.out)


@options.with_asked()
def theory(
    asked: options.PaperRequest,
    top_p: options.TopP = 1.0,
) -> None:
    """Leviathan et al. 2023, table 1 and figures 2-4: formulas, and how real betas keep to them.

    Encoder-decoders read the 'source' of each line of --prompts.
    """
    from outrider_lab.papers import theory as experiment

    amount = experiment.TheoryAmount(seed=asked.seed, top_p=top_p)
    if asked.quick:
        amount = experiment.TheoryAmount(8, 32, (2, 4), asked.seed, top_p)
    rows, pair = asked.rows(), asked.pair(sources=True)
    with bar("theory") as progress:
        tables = experiment.run(pair, rows, asked.out, progress, amount, asked.pictures)
    titles = {
        "table1": "table 1: total operations and speed for c = 0, ours and published",
        "beta": "beta = sum min(p, q) along the target's texts, T = 1",
        "lags": "autocorrelation of beta about each text's mean, and that of independent betas",
        "calls": "tokens per call; operations and memory reads of plain decoding are 1",
    }
    show(theory, tables, titles, asked.out)


@options.with_asked(without=("pictures", "seed"))
def beams(asked: options.PaperRequest) -> None:
    """Leviathan et al. 2023, A.4: beam search, calls and time by w, u and gamma.

    With --model alone: the tree and copies, without a draft model's beams. Encoder-decoders read
    the 'source' of each line of --prompts.
    """
    from outrider_lab.papers import beams as experiment

    asked = replace(asked, pictures=False)
    rows, pair = asked.rows(), asked.pair_or_alone()
    with bar("beams") as progress:
        tables = experiment.run(
            pair,
            rows[: 3 if asked.quick else 24],
            asked.out,
            progress,
            new_tokens=32 if asked.quick else 48,
            widths=(2, 5) if asked.quick else experiment.WIDTHS,
        )
    titles = {"beams": "beam search: w beams, u of the draft model's, gamma steps scored ahead"}
    show(beams, tables, titles, asked.out)


@options.with_asked(without=("pictures", "seed", "draft", "dtype"))
def layers(
    asked: options.PaperRequest,
    dtype: options.Dtype = "float32",
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0.01, help="Beside 0.")
    ] = 0.7,
) -> None:
    """Draft & Verify, LayerSkip: which layers a draft can do without, alpha, c, ideal speed-up."""
    from outrider_lab.papers import layers as experiment

    amount = experiment.LayersAmount(temperature=temperature)
    if asked.quick:
        amount = experiment.LayersAmount(2, 32, temperature)
    alone = replace(asked, pictures=False, dtype=dtype).load("none")
    rows = read_rows(asked.prompts)[: amount.prompts]
    with bar("layers") as progress:
        tables = experiment.run(alone, rows, asked.out, progress, amount)
    titles = {
        "each": "each layer: how little it changes its input, and a draft without it",
        "layers": "drafts by some of the layers on the target's cache; speed-ups are upper bounds",
    }
    show(layers, tables, titles, asked.out)
    console.print(experiment.verdict(tables["layers"], len(rows)), markup=False)


@options.with_asked(without=("pictures", "seed"))
def speed(
    asked: options.PaperRequest,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Length of the chain.")
    ] = 4,
    rule: Annotated[
        str | None,
        typer.Option(help="Rule by name, yours too. Default: block, match at T = 0."),
    ] = None,
) -> None:
    """What speculation is worth: against plain decoding, at three temperatures, with its ceiling.

    A chain of --draft-model, or prompt lookup where there is a --model and no --draft-model.
    """
    from outrider_lab.bench.machine import load_to_measure
    from outrider_lab.papers import speed as experiment

    folder(asked.out)
    options.goes_on(asked.target)
    texts = read_prompts(asked.prompts, 20 if asked.quick else 30)
    alone = asked.target is not None and asked.draft is None
    verifiers.named(rule)  # or UnknownName, before models are read
    with working(LOADING):
        pair = load_to_measure(
            asked.target,
            asked.draft,
            drafter="prompt_lookup" if alone else None,
            rule=rule,
            num_speculative_tokens=num_speculative_tokens,
            dtype=asked.dtype,
            threads="auto" if asked.threads is None else asked.threads,
        )
    tokens, repeats = (32, 1) if asked.quick else (64, 2)
    with bar("speed") as progress:
        tables = experiment.run(
            pair, texts, asked.out, progress, new_tokens=tokens, repeats=repeats
        )
    drafts = pair.engine.drafter.name
    if pair.engine.rule is not None and rule is not None:
        drafts += f" with rule {verifiers.listed([pair.engine.rule])[0]}"
    title = f"{len(texts)} prompts, {tokens} tokens, {drafts}, decoding alone"
    show(speed, tables, {"speed": f"times faster than plain decoding: {title}"}, asked.out)


#: Every experiment by its name, which is its command's and its document's.
COMMANDS: dict[str, Callable[..., None]] = {
    "toy": toy,
    "tree": tree,
    "draft-length": draft_length,
    "budget": budget,
    "k-sweep": k_sweep,
    "alpha": alpha,
    "beams": beams,
    "theory": theory,
    "layers": layers,
    "wagner": wagner,
    "chen": chen,
    "speed": speed,
    "tasks": tasks,
    "images": images,
    "peers": peers,
}


def register(app: typer.Typer) -> None:
    """Add the experiments to `outrider bench`."""
    for name, command in COMMANDS.items():
        app.command(name)(command)
