"""The pictures of a run."""

from collections.abc import Callable, Iterable
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench import derived
from bench.drawing import (
    FAINT,
    FONT,
    INK,
    OURS,
    PEERS,
    End,
    bars,
    heading,
    label_ends,
    line,
    logarithmic,
    palette,
    panels,
    plain_decades,
    save,
)  # fmt: skip
from bench.records import Kernel, Run

PANELS_BESIDE = 3


def draw(run: Run, folder: Path, stem: str) -> dict[str, Path]:
    """Draw what the run has figures for, to ``STEM-NAME.png``.

    Returns:
        The files by their titles.
    """
    drawn = {}
    for name, (title, make) in PICTURES.items():
        figure = make(run)
        if figure is not None:
            drawn[title] = folder / f"{stem}-{name}.png"
            save(figure, title, f"{run.machine.gpu}, {run.machine.date}, commit {run.machine.commit}", drawn[title])
    return drawn


def latency(run: Run) -> Figure | None:
    """Time of a call over patches, calls of one image."""
    lines = derived.single_images(run)
    if not any(len(calls) > 1 for calls in lines.values()):
        return None
    figure, (axes,) = panels(1, columns=1, height=5.2)
    colors, ends = palette(lines), []
    for name, calls in lines.items():
        x, y = [call.patches for call in calls], [call.median for call in calls]
        line(axes, x, y, colors[name], dashed=name.endswith(derived.EAGER), strong=derived.is_ours(name))
        ends.append(End(name, x[-1], y[-1], colors[name]))
    logarithmic(axes, {call.patches for calls in lines.values() for call in calls}, room=10)
    axes.set(xlabel="patches of one image", ylabel="milliseconds")
    label_ends(axes, ends)
    return figure


def speed_up(run: Run) -> Figure | None:
    """A panel for each peer, a bar for each input."""
    gains = derived.speed_ups(run)
    peers = [peer for peer in derived.providers(run.calls) if any(peer in of for of in gains.values())]
    if not peers:
        return None
    columns = len(peers) if len(peers) <= 4 else PANELS_BESIDE
    figure, every = panels(len(peers), columns=columns, height=0.32 * len(gains))
    colors, most = palette(peers), max(gain for of in gains.values() for gain in of.values())
    for place, (axes, peer) in enumerate(zip(every, peers, strict=True)):
        lengths = {name: of.get(peer) for name, of in gains.items()}
        bars(axes, lengths, lambda gain: f"{gain:.1f}", colors[peer], end=most * 1.2)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xticks([1], ["ours"])
        axes.tick_params(labelleft=place % columns == 0)
        heading(axes, peer, colors[peer])
    return figure


def padding(run: Run) -> Figure | None:
    """Left: more and more live rows in one graph. Right: the same rows in larger and larger graphs."""
    in_one_graph: dict[tuple[str, int], dict[int, float]] = {}
    of_one_size: dict[tuple[str, int], dict[int, float]] = {}
    for entry in run.padding:
        in_one_graph.setdefault((entry.provider, entry.capacity), {})[entry.rows] = entry.milliseconds
        of_one_size.setdefault((entry.provider, entry.rows), {})[entry.capacity] = entry.milliseconds
    sides = [
        (shown, xlabel, label)
        for groups, xlabel, label in (
            (in_one_graph, "live rows", "graph of {:,} rows"),
            (of_one_size, "rows of the graph", "{:,} live rows"),
        )
        if (shown := {key: points for key, points in groups.items() if len(points) > 1})
    ]
    if not sides:
        return None
    figure, every = panels(len(sides), columns=2, height=3.8, gap=0.9)
    colors = palette(dict.fromkeys(entry.provider for entry in run.padding))
    for axes, (groups, xlabel, label) in zip(every, sides, strict=True):
        ends = []
        for (provider, fixed), points in groups.items():
            x, y = zip(*sorted(points.items()), strict=True)
            line(axes, x, y, colors[provider], strong=derived.is_ours(provider))
            ends.append(End(f"{provider},\n{label.format(fixed)}", x[-1], y[-1], colors[provider]))
        logarithmic(axes, {x for points in groups.values() for x in points}, room=5)
        axes.set(xlabel=xlabel, ylabel="milliseconds")
        label_ends(axes, ends)
    return figure


def roofline(run: Run) -> Figure | None:
    """Our kernels, each from few rows to many, under the ceilings measured in the same run."""
    copy, product = run.machine.copy, run.machine.product
    lines = _ours(entry for entry in run.kernels if _intensity(entry))
    if not lines or not copy or not product:
        return None
    left, right = min(map(_intensity, chain(*lines.values()))) * 0.5, product / copy * 20
    figure, (axes,) = panels(1, columns=1, height=5.6)
    axes.set(xscale="log", yscale="log", xlim=(left, right), xlabel="FLOP for a byte moved", ylabel="TFLOP/s")
    corners = [left, product / copy, right]
    axes.plot(corners, [min(product, copy * at) / 1e12 for at in corners], color=FAINT, linewidth=3)
    slope, flat = left * (corners[1] / left) ** 0.5, corners[1] * 0.95
    style: dict[str, Any] = {"ha": "right", "va": "bottom", "size": FONT, "color": FAINT}
    axes.text(slope, copy * slope / 1e12 * 1.1, f"copy {copy / 1e12:.1f} TB/s", **style)
    axes.text(flat, product / 1e12, f"large product {product / 1e12:.0f} TFLOP/s", **style)
    ends = []
    for (name, entries), color in zip(lines.items(), cycle((OURS, *PEERS)), strict=False):
        line(axes, [_intensity(entry) for entry in entries], [entry.tflops for entry in entries], color, strong=False)
        ends.append(End(name, _intensity(entries[-1]), entries[-1].tflops, color))
    plain_decades(axes.xaxis)
    plain_decades(axes.yaxis)
    label_ends(axes, [end for end in ends if end.x >= product / copy])
    label_ends(axes, [end for end in ends if end.x < product / copy], beside=True)
    return figure


def ideal(run: Run) -> Figure | None:
    """A panel for each of our kernels, a bar for each size; a tick where the fastest peer would end."""
    peers, groups = derived.fastest_peers(run), _ours(run.kernels)
    if not groups:
        return None
    sizes = sorted({entry.rows for entries in groups.values() for entry in entries})
    figure, every = panels(len(groups), columns=PANELS_BESIDE, height=0.32 * len(sizes))
    for place, (axes, (name, entries)) in enumerate(zip(every, groups.items(), strict=True)):
        of_rows = {entry.rows: entry for entry in entries}
        lengths = {f"{rows:,}": derived.of_ideal(of_rows[rows]) if rows in of_rows else None for rows in sizes}
        bars(axes, lengths, lambda share: f"{share:.0%}", OURS, end=1.3, words_at=1.02)
        for bar, rows in enumerate(sizes):
            peer = peers.get((entries[0].kernel, entries[0].case, rows))
            if peer and rows in of_rows:
                share = derived.of_ideal(of_rows[rows]) * of_rows[rows].microseconds / peer.microseconds
                axes.plot([share, share], [bar - 0.4, bar + 0.4], color=PEERS[0], linewidth=3)
        axes.axvline(1, color=INK, linewidth=1)
        axes.tick_params(labelleft=place % PANELS_BESIDE == 0)
        heading(axes, name)
    return figure


def errors(run: Run) -> Figure | None:
    """A panel for each input: error after each block, and, as a dot on the right, of the tokens."""
    inputs: dict[str, dict[str, dict[int, float]]] = {}
    tokens = {(entry.input, entry.provider): entry.error for entry in run.accuracy if entry.block is None}
    for entry in run.accuracy:
        if entry.block is not None:
            inputs.setdefault(entry.input, {}).setdefault(entry.provider, {})[entry.block] = entry.error
    if not inputs:
        return None
    figure, every = panels(len(inputs), columns=2, height=3.8, gap=0.6)
    colors = palette(dict.fromkeys(entry.provider for entry in run.accuracy))
    for axes, (name, providers) in zip(every, inputs.items(), strict=True):
        ends, beyond = [], 1.06 * max(block for of in providers.values() for block in of)
        for provider, of in providers.items():
            blocks, values = zip(*sorted(of.items()), strict=True)
            axes.plot(blocks, values, color=colors[provider], linewidth=2.5)
            end = End(provider, blocks[-1], values[-1], colors[provider])
            if (name, provider) in tokens:
                end = End(provider, beyond, tokens[name, provider], colors[provider])
                axes.plot(end.x, end.y, marker="o", markersize=7, color=end.color)
            ends.append(end)
        axes.set(xlabel="blocks; dots: tokens", ylim=(0, None))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
        heading(axes, f"{name} patches" if name.replace(",", "").isdigit() else name)
        label_ends(axes, ends)
    return figure


PICTURES: dict[str, tuple[str, Callable[[Run], Figure | None]]] = {
    "latency": ("Milliseconds of a whole call", latency),
    "speedup": ("Time of a peer's call over that of ours", speed_up),
    "padding": ("What padding costs", padding),
    "roofline": ("Our kernels under the ceilings of this GPU", roofline),
    "ideal": ("Share of the ideal that our kernels reach, by rows (orange: the fastest peer)", ideal),
    "error": ("Relative error against float64", errors),
}


def _ours(entries: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Our kernels by kernel and case, each from few rows to many."""
    found: dict[str, list[Kernel]] = {}
    for entry in sorted(entries, key=lambda entry: entry.rows):
        if entry.provider == "ours":
            name = entry.case if entry.kernel in (entry.case, "linear") else f"{entry.kernel}, {entry.case}"
            found.setdefault(name, []).append(entry)
    return found


def _intensity(entry: Kernel) -> float:
    """FLOP a byte; zero for a kernel without counted FLOP or bytes, which no roofline can show."""
    return 1e3 * entry.tflops / entry.gigabytes_per_second if entry.gigabytes_per_second else 0.0
