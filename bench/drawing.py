"""The look that all pictures share: opaque white, large dark text, lines labelled where they end, no legend.

They stand on light and dark pages alike. Ours is blue; a peer has one colour, its eager calls a dashed line.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from bench.derived import encoder, is_ours

INK, FAINT, GRID = "#1f2328", "#6e7781", "#d8dee4"
OURS = ("#0969da", "#0a3069", "#0aa5c9")
PEERS = ("#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a", "#9a6700", "#1b7c83")
FONT, DPI, WIDTH = 12, 150, 9.0  # points, dots an inch, inches
BELOW = 0.6  # inches of a panel's ticks and the next one's heading
BESIDE = 0.9  # inches of a panel's pointers to its labels and the next one's ticks
LABEL_GAP = 1.25  # lines of text
LETTER = 0.65 * FONT / 72  # inches, bold
COLORS = 96


@dataclass(frozen=True)
class End:
    """Where a line ends, in the axes' data, and what it is called."""

    label: str
    x: float
    y: float
    color: str


def panels(count: int, *, columns: int, height: float, gap: float = 0.25) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, each ``height`` inches high and ``gap`` inches beside the next."""
    columns = min(count, columns)
    rows = -(-count // columns)
    width = (WIDTH - (columns - 1) * gap) / columns
    figure = Figure(figsize=(WIDTH, rows * height + (rows - 1) * BELOW), dpi=DPI)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1, wspace=gap / width, hspace=BELOW / height)
    every = list(grid.flat)
    for axes in every[count:]:
        axes.remove()
    for axes in every[:count]:
        axes.tick_params(labelsize=FONT, colors=INK, length=0)
        axes.xaxis.label.set(size=FONT, color=INK)
        axes.yaxis.label.set(size=FONT, color=INK)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=FAINT)
    return figure, every[:count]


def room_for(labels: Iterable[str]) -> float:
    """Inches between panels whose lines bear these labels at their ends."""
    return BESIDE + LETTER * max(map(len, labels))


def save(figure: Figure, title: str, conditions: str, file: Path) -> None:
    """Write the figure under a title and with its conditions, small, below."""
    drawn = figure.get_tightbbox()  # inches
    height = figure.get_figheight()
    figure.text(0, (drawn.y1 + 0.2) / height, title, va="bottom", size=FONT + 4, color=INK)
    figure.text(0, (drawn.y0 - 0.2) / height, conditions, va="top", size=FONT - 2, color=FAINT)
    buffer = BytesIO()
    figure.savefig(buffer, facecolor="white", bbox_inches="tight", pad_inches=0.25)
    # a palette makes the file a third of the size
    Image.open(buffer).convert("RGB").quantize(COLORS).save(file, optimize=True)


def line(
    axes: Axes, x: Sequence[float], y: Sequence[float], color: str, *, dashed: bool = False, strong: bool = True
) -> None:
    axes.plot(
        x,
        y,
        color=color,
        linewidth=3 if strong else 1.8,
        linestyle=(0, (3, 1.5)) if dashed else "solid",
        marker="o",
        markersize=6 if strong else 4.5,
        zorder=3 if strong else 2,
    )


def bars(
    axes: Axes,
    lengths: Mapping[str, float | None],
    words: Callable[[float], str],
    color: str,
    *,
    end: float,
    words_at: float | None = None,
) -> None:
    """A horizontal bar for each name, the first on top, its length in words at its end or at ``words_at``."""
    for place, length in enumerate(lengths.values()):
        if length is not None:
            axes.barh(place, length, height=0.66, color=color)
            axes.text((words_at or length) + 0.015 * end, place, words(length), va="center", size=FONT - 1, color=INK)
    axes.set(xlim=(0, end), ylim=(len(lengths) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(lengths)), list(lengths))
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)


def heading(axes: Axes, text: str, color: str = INK) -> None:
    axes.set_title(text, loc="left", size=FONT, color=color, fontweight="bold")


def logarithmic(axes: Axes, x: Iterable[float], *, room: int) -> None:
    """Both axes, with plain numbers: on x the smallest and the largest of those given, and what has room between."""
    axes.set(xscale="log", yscale="log")
    smallest, *between, largest = sorted(x)
    apart, shown = (largest / smallest) ** (1 / room), [smallest]
    for at in between:
        if at >= shown[-1] * apart and largest >= at * apart:
            shown.append(at)
    shown.append(largest)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    plain_decades(axes.yaxis)


def plain_decades(axis: Axis, steps: Sequence[int] = (1, 2, 5)) -> None:
    """1, 2, 5, 10, 20 and so on, in plain digits."""
    axis.set_major_locator(FixedLocator([step * 10.0**power for power in range(-3, 5) for step in steps]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def label_ends(axes: Axes, ends: Sequence[End], *, beside: bool = False) -> None:
    """Write each line's name to the right of the axes, or of its end, at its height or as near as the others let it."""
    axes.autoscale_view()  # now, not at the next drawing: places depend on the limits
    ordered = sorted(ends, key=lambda end: end.y)
    points = [axes.transData.transform((end.x, end.y)) for end in ordered]
    heights = spread([y for _, y in points], LABEL_GAP * FONT * DPI / 72)
    for end, (x, _), height in zip(ordered, points, heights, strict=True):
        left, y = axes.transAxes.inverted().transform((x, height))
        axes.annotate(
            end.label,
            xy=(end.x, end.y),
            xytext=(left + 0.03 if beside else 1.04, y),
            textcoords="axes fraction",
            va="center",
            size=FONT,
            color=end.color,
            fontweight="bold" if is_ours(end.label) else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.color,
                "linewidth": 0.8,
                "relpos": (0, 0.5),  # from the middle of the text's left side
                "shrinkA": 2,
                "shrinkB": 4,
            },
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The places nearest to these, which ascend, that are ``gap`` apart (pool adjacent violators)."""
    pools: list[list[float]] = []
    for number, place in enumerate(places):
        pools.append([place - number * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [_mean(pool) for pool in pools for _ in pool]
    return [at + number * gap for number, at in enumerate(level)]


def palette(providers: Iterable[str]) -> dict[str, str]:
    """A color for each encoder: its eager and graph calls share it."""
    colors: dict[str, str] = {}
    ours, peers = cycle(OURS), cycle(PEERS)
    names = list(providers)
    for name in map(encoder, names):
        if name not in colors:
            colors[name] = next(ours if is_ours(name) else peers)
    return {name: colors[encoder(name)] for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
