"""`outrider bench images`."""

from typing import Annotated

import typer

from outrider.cli.console import bar
from outrider_lab.drawing import pyplot
from outrider_lab.papers import options
from outrider_lab.papers.options import RESULTS


def images(
    out: options.Out = RESULTS,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fifth of the training, 64 pictures; half a minute.")
    ] = False,
    pictures: options.Pictures = True,
    count: Annotated[int, typer.Option("--images", min=10, help="Pictures of each.")] = 256,
    ahead: Annotated[
        int, typer.Option("--num-speculative-tokens", min=1, help="Pixels the draft runs ahead.")
    ] = 6,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.05)] = 1.0,
    guidance_scale: Annotated[
        float, typer.Option(help="Classifier-free guidance from the class; 1 is none.")
    ] = 1.0,
    seed: options.Seed = 0,
) -> None:
    """Image tokens: 8x8 digits by the target and by speculative decoding, side by side.

    A target and a draft are trained on scikit-learn's digits the first time (minutes), and kept
    in the cache.
    """
    from outrider_lab.images import experiment
    from outrider_lab.papers.record import folder, show

    folder(out)
    if pictures:
        pyplot()
    asked = experiment.PictureRequest(
        min(count, 64) if quick else count, ahead, temperature, guidance_scale, seed, quick
    )
    with bar("images") as progress:
        tables = experiment.run(asked, out, progress, pictures)
    titles = {
        "arms": f"{asked.pictures} pictures each, T = {temperature:g}, guidance {guidance_scale:g}",
        "by-row": "share of the draft's pixels that were kept, where all before them were",
    }
    show(images, tables, titles, out)
