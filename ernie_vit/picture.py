"""A picture of what the encoder sees: photographs beside their tokens, coloured by principal components."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ernie_vit.encoding import Encoded
from ernie_vit.model.images import read_image

# The share of tokens at either end whose colour is clipped: a few outliers would leave the others one grey.
CLIPPED = 0.01

# Inches: a photograph's longer side, the space between it and its tokens, around all and above each panel,
# and the shorter side of the most extreme shapes.
SIDE, GAP, MARGIN, TITLE, THINNEST = 4.6, 0.15, 0.2, 0.36, 0.1


@dataclass(frozen=True)
class Panel:
    """One row of the picture.

    Attributes:
        title: the photograph's name.
        photograph: what was encoded; of a video, the frame beside which the tokens are shown.
        colors: float ``[height, width, 3]`` in 0..1, a colour for each token.
    """

    title: str
    photograph: Image.Image
    colors: Tensor


def panels_of(result: Encoded) -> list[Panel]:
    """An image's one panel, or one for each pair of a video's frames, beside the first of the two."""
    source = result.source
    colors = token_colors(result.tokens, result.grid_thw)
    if source.frames is None:
        return [Panel(source.path.name, read_image(source.path), colors[0])]
    return [
        Panel(f"{source.path.name}/{frame.name}", read_image(frame), of_pair)
        for frame, of_pair in zip(source.frames[::2], colors, strict=True)
    ]


def token_colors(tokens: Tensor, grid_thw: tuple[int, int, int]) -> Tensor:
    """Colour tokens by their first three principal components, as red, green and blue.

    Each component is stretched to 0..1 over all tokens; its sign, which is arbitrary, is taken so that the
    token farthest from the mean is bright. A component without spread is grey.

    Args:
        tokens: ``[tokens, width]`` of one image or video.
        grid_thw: its frames, height and width in patches; a token is 2x2 patches of 2 frames (an image's 1).

    Returns:
        float32 ``[frames, height, width, 3]`` in tokens.
    """
    components = principal_components(tokens, 3)
    low, high = torch.quantile(components, torch.tensor([CLIPPED, 1 - CLIPPED], dtype=torch.float64), dim=0)
    spread = high - low
    flat = spread <= 1e-9 * components.abs().max().clamp_min(1e-30)
    colors = ((components - low) / torch.where(flat, 1.0, spread)).clamp(0, 1)
    colors = torch.where(flat, 0.5, colors)
    frames, height, width = grid_thw
    return colors.float().reshape(max(1, frames // 2), height // 2, width // 2, 3)


def principal_components(rows: Tensor, count: int) -> Tensor:
    """The first principal components of ``rows`` ``[n, width]``: float64 ``[n, count]``, strongest first.

    The value of largest magnitude in each is positive. Components that ``rows`` do not have are zero.
    """
    centred = rows.double() - rows.double().mean(dim=0)
    # The smaller of the two Gram matrices: both have the same eigenvalues.
    if len(centred) <= centred.shape[1]:
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        scores = vectors * values.clamp_min(0).sqrt()
    else:
        scores = centred @ torch.linalg.eigh(centred.T @ centred).eigenvectors
    scores = scores[:, -count:].flip(dims=[1])
    scores = torch.nn.functional.pad(scores, (0, count - scores.shape[1]))
    extremes = scores.gather(0, scores.abs().argmax(dim=0, keepdim=True))
    return scores * torch.where(extremes < 0, -1.0, 1.0)


def draw_picture(panels: Sequence[Panel], file: Path) -> None:
    """Draw the panels one below the other to ``file``, each photograph beside its tokens."""
    boxes = [_fit(panel.photograph) for panel in panels]
    total_width = 2 * SIDE + GAP + 2 * MARGIN
    total_height = sum(height + TITLE for _, height in boxes) + MARGIN
    figure = Figure(figsize=(total_width, total_height), dpi=150)
    FigureCanvasAgg(figure)
    bottom = total_height
    for panel, (width, height) in zip(panels, boxes, strict=True):
        bottom -= TITLE + height
        rows, columns, _ = panel.colors.shape
        legend = f"{rows} x {columns} tokens, by their first three principal components"
        sides = (
            (np.asarray(panel.photograph), "antialiased", panel.title),
            (panel.colors.numpy(), "nearest", legend),
        )
        for side, (image, interpolation, caption) in enumerate(sides):
            left = (MARGIN + side * (SIDE + GAP)) / total_width
            axes = figure.add_axes((left, bottom / total_height, width / total_width, height / total_height))
            axes.imshow(image, aspect="auto", interpolation=interpolation)
            axes.set_axis_off()
            figure.text(left, (bottom + height + 0.08) / total_height, caption, fontsize=9, color="#333333")
    figure.savefig(file)


def _fit(photograph: Image.Image) -> tuple[float, float]:
    """Width and height in inches: a photograph of any shape fits a square of ``SIDE`` and stays visible."""
    width, height = photograph.size
    scale = SIDE / max(width, height)
    return max(width * scale, THINNEST), max(height * scale, THINNEST)
