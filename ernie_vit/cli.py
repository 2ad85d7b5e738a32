"""The command line: ``ernie-vit encode`` and ``ernie-vit info``.

Starts light: torch and what needs it are imported by the command that runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ernie_vit import __version__
from ernie_vit.inputs import Source, find_sources

if TYPE_CHECKING:
    from rich.console import Console

    from ernie_vit.encoder import ErnieVisionEncoder
    from ernie_vit.encoding import Encoded

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".pdf", ".svg")
PICTURE_PANELS = 8  # a person looks at no more of them in one picture


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """ERNIE-4.5-VL's vision encoder: photographs in, image tokens out."""


@cli.command()
@click.argument("paths", nargs=-1)
@click.option(
    "--video",
    "videos",
    multiple=True,
    metavar="FOLDER",
    help="A video: a folder of frames, taken in name order. Repeatable.",
)
@click.option(
    "--weights",
    default="random",
    show_default=True,
    metavar="random|DIR|HUB_ID",
    help="Random weights at the model's own size, a checkpoint's folder, or a hub's repository.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of random weights.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="auto: bfloat16 on a GPU, float32 on a CPU.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "triton", "torch"]),
    default="auto",
    show_default=True,
    help="What computes the tower; auto: Triton's kernels where they run.",
)
@click.option("--min-pixels", type=click.IntRange(min=1), help="Enlarge images and frames with fewer pixels.")
@click.option("--max-pixels", type=click.IntRange(min=1), help="Reduce images and frames with more pixels.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Store the tokens in this safetensors file.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Draw the first {PICTURE_PANELS} beside their tokens into this file (.png, .pdf, .svg, ...).",
)
def encode(
    paths: tuple[str, ...],
    videos: tuple[str, ...],
    min_pixels: int | None,
    max_pixels: int | None,
    out: Path | None,
    picture: Path | None,
    **choices: Any,
) -> None:
    """Encode images and videos into tokens.

    PATHS are image files, folders (the images directly in them) and patterns such as 'photos/**/*.jpg'. A
    file that cannot be read is named, the others are encoded, and the exit status is 1.

    The tokens file holds a tensor [tokens, text width] for each image under its file's name and for each
    video under its folder's; a name that comes again gets #2, #3. The metadata says path, size and grid_thw
    of each.
    """
    if picture and picture.suffix.lower() not in PICTURE_SUFFIXES:
        raise click.UsageError(f"--picture: expected one of {', '.join(PICTURE_SUFFIXES)}, got {picture}")
    if min_pixels and max_pixels and min_pixels > max_pixels:
        raise click.UsageError(f"--min-pixels {min_pixels} is more than --max-pixels {max_pixels}")
    sources, problems = find_sources(paths, videos)
    if not sources:
        wanted = "give image files, folders or patterns, or --video FOLDER"
        raise click.UsageError("\n".join([f"no images to encode: {wanted}", *problems]))
    for file in (out, picture):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)

    from ernie_vit.report import encoded_table, make_console

    console = make_console()
    encoder = _make_encoder(console, **choices)
    results, unreadable = _encode_all(encoder, sources, {"min_pixels": min_pixels, "max_pixels": max_pixels})
    if results:
        console.print(encoded_table(results, encoder))
    if results and out:
        from ernie_vit.encoding import save_tokens

        save_tokens(out, results, {"version": __version__, **choices, "backend": encoder.backend})
        click.echo(f"tokens:  {out}")
    if results and picture:
        from ernie_vit.picture import draw_picture, panels_of

        panels = [panel for result in results[:PICTURE_PANELS] for panel in panels_of(result)]
        draw_picture(panels[:PICTURE_PANELS], picture)
        click.echo(f"picture: {picture}")
    for problem in (*problems, *unreadable):
        click.secho(f"not encoded: {problem}", fg="red", err=True)
    if problems or unreadable:
        raise SystemExit(1)


@cli.command()
def info() -> None:
    """Show versions, GPUs, and which backend runs where."""
    from ernie_vit.report import make_console, print_info

    print_info(make_console())


def _make_encoder(
    console: Console, weights: str, seed: int, device: str, dtype: str, backend: str
) -> ErnieVisionEncoder:
    """The encoder as asked for; says where it runs and why, and which weights it has.

    Raises:
        click.ClickException: device or backend are not to be had here, or the weights cannot be read.
    """
    from ernie_vit.encoder import ErnieVisionEncoder
    from ernie_vit.machine import choose_device, choose_dtype, describe_device

    try:
        where, why = choose_device(device)
        options: dict[str, Any] = {"device": where, "dtype": choose_dtype(dtype, where), "backend": backend}
        with console.status(f"weights: {weights} ..."):
            if weights == "random":
                encoder = ErnieVisionEncoder.from_config(seed=seed, **options)
            else:
                encoder = ErnieVisionEncoder.from_pretrained(weights, **options)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    millions = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    seeded = f", seed {seed}" if weights == "random" else ""
    click.echo(f"device:  {describe_device(where)}; {why}")
    click.echo(f"backend: {encoder.backend}; {encoder.backend_reason}")
    click.echo(f"weights: {weights}{seeded}, {millions:.1f} M parameters")
    return encoder


def _encode_all(
    encoder: ErnieVisionEncoder, sources: list[Source], limits: dict[str, int | None]
) -> tuple[list[Encoded], list[str]]:
    """Encode behind a progress bar: the results, and a sentence for each source that could not be read."""
    from tqdm import tqdm

    from ernie_vit.encoding import Failure, encode_sources

    results: list[Encoded] = []
    unreadable: list[str] = []
    outcomes = encode_sources(encoder, sources, **limits)
    for outcome in tqdm(outcomes, total=len(sources), desc="encoding", unit="file", disable=None):
        if isinstance(outcome, Failure):
            unreadable.append(outcome.reason)
        else:
            results.append(outcome)
    return results, unreadable
