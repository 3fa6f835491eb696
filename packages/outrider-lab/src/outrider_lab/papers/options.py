"""Options that the experiments share, written once."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.gathered import Target, Threads, gathered
from outrider.errors import ConfigurationError
from outrider.shipped import CORRECTOR, shipped
from outrider_lab.bench.prompts import read_rows
from outrider_lab.certify.report import Row
from outrider_lab.drawing import pyplot
from outrider_lab.papers.record import folder

if TYPE_CHECKING:
    from outrider.text.speculator import Speculator

Draft = Annotated[str | None, typer.Option("--draft-model", help="Draft model; goes with --model.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with 'prompt' (and 'reference'), or plain lines; default: held-out code."
    ),
]


def both(target: str | None, draft: str | None) -> None:
    """Refuse half a pair."""
    if (target is None) != (draft is None):
        raise ConfigurationError(
            f"a pair needs both --model and --draft-model; got {target or draft!r} alone; give "
            f"both or "
            "neither"
        )


Out = Annotated[Path, typer.Option(help="Folder for tables and pictures; runs resume from it.")]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Under five minutes on two cores: smaller, whatever else is asked."
    ),
]
Pictures = Annotated[
    bool, typer.Option("--pictures/--no-pictures", help="Also PNG and SVG (needs matplotlib).")
]
Seed = Annotated[int, typer.Option(help="Of all draws; recorded with the results.")]
TopP = Annotated[
    float, typer.Option(help="Nucleus: only the likeliest tokens up to this mass; 1 is off.")
]
Rule = Annotated[
    str | None,
    typer.Option(help="A rule by name, of your own, too (entry point); beside the paper's."),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
RESULTS = Path("bench-results")


@dataclass(frozen=True)
class PaperRequest:
    """What every experiment on a pair is told; `with_asked` makes options of it."""

    out: Out = RESULTS
    quick: Quick = False
    pictures: Pictures = True
    target: Target = None
    draft: Draft = None
    prompts: Prompts = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    threads: Threads = None

    def load(self, drafter: str | None = None, *, sources: bool = False) -> "Speculator":
        """The models; with `drafter` the one of that name, which needs no draft model.

        What is missing for the results is said before anything is loaded or measured, and an
        encoder-decoder is refused by what has nothing for it to read (`sources`).
        """
        from outrider.cli.console import LOADING, working
        from outrider_lab.bench.machine import load_to_measure

        if not sources:
            goes_on(self.target)
        folder(self.out)
        if self.pictures:
            pyplot()
        count = "auto" if self.threads is None else self.threads
        models = self.target, self.draft
        how = {"dtype": self.dtype, "threads": count, "planner": "fixed"}
        with working(LOADING):
            return load_to_measure(*models, drafter=drafter, **how)

    def pair(self, *, sources: bool = False) -> "Speculator":
        """The pair; `sources` as of `load`."""
        if not sources:
            goes_on(self.target)
        both(self.target, self.draft)
        return self.load(sources=True)

    def pair_or_alone(self) -> "Speculator":
        """The pair, or a target without a draft; also one that reads sources."""
        alone = self.target is not None and self.draft is None
        return self.load("none", sources=True) if alone else self.pair(sources=True)

    def rows(self) -> list[Row]:
        """What the target goes on from, or what an encoder-decoder reads."""
        reads = reads_sources(self.target)
        return source_rows(self.target, self.prompts) if reads else read_rows(self.prompts)


#: A command whose parameter `asked` is typed as one option for each field of `PaperRequest`.
with_asked = partial(gathered, "asked", PaperRequest)


def layers_of(given: str) -> tuple[int, ...]:
    """Numbers of layers to be left out, as `--skip` has them."""
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError as error:
        raise ConfigurationError(
            f"--skip takes numbers of layers with commas between; got {given!r}; write 3,4,5"
        ) from error


def reads_sources(target: str | None) -> bool:
    """Whether this is an encoder-decoder; False for what cannot be read."""
    from outrider.models import pretrained

    if target is None or target == CORRECTOR:
        return target is not None
    try:
        return bool(pretrained.read_config(target, trust=False).is_encoder_decoder)
    except (OSError, ValueError):
        return False


def goes_on(target: str | None) -> None:
    """Refuse an encoder-decoder."""
    if reads_sources(target):
        raise ConfigurationError(
            "this measures models that go on from their prompts; got an encoder-decoder, "
            f"{target!r}; bench alpha, beams, theory and wagner take one"
        )


def alpha_rows(
    asked: PaperRequest, recordings: Path | None, language: str, most: int
) -> list[Row] | None:
    """What `bench alpha` is measured on, if it is not what the model itself asks for."""
    from outrider_lab.papers.alpha_tasks import recorded_rows

    if recordings is not None:
        if asked.prompts is not None or asked.target is None:
            raise ConfigurationError(
                f"--recordings go with a Whisper --model, without --prompts; got "
                f"{str(recordings)!r}"
            )
        return recorded_rows(recordings, language, most)
    usual = asked.prompts is None and not reads_sources(asked.target)
    return None if usual else asked.rows()


def source_rows(target: str | None, prompts: Path | None) -> list[Row]:
    """What an encoder-decoder reads: the held-out pairs for the corrector, else a file's."""
    if prompts is None and target != CORRECTOR:
        raise ConfigurationError(
            f"an encoder-decoder needs texts to read; got {target!r} without --prompts; give a "
            "file of JSON lines with 'source' (and 'reference'), or plain lines"
        )
    return read_rows(prompts or shipped(CORRECTOR) / "heldout_pairs.jsonl", "source")
