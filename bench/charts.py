"""The pictures of a run."""

from collections.abc import Callable
from itertools import chain, product
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
    room_for,
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
    colors, ends = _colors(run), []
    for name, calls in lines.items():
        x, y = [call.patches for call in calls], [call.median for call in calls]
        line(axes, x, y, colors[name], dashed=derived.EAGER in name, strong=derived.is_ours(name))
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
    colors, most = _colors(run), max(gain for of in gains.values() for gain in of.values())
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
        (shown, xlabel, title)
        for groups, xlabel, title in (
            (in_one_graph, "live rows", "Graph of {} rows"),
            (of_one_size, "rows of the graph", "{} live rows"),
        )
        if (shown := {key: points for key, points in groups.items() if len(points) > 1})
    ]
    if not sides:
        return None
    figure, every = panels(len(sides), columns=2, height=3.8, gap=room_for(entry.provider for entry in run.padding))
    colors = _colors(run)
    for axes, (groups, xlabel, title) in zip(every, sides, strict=True):
        ends = []
        for (provider, _), points in groups.items():
            x, y = zip(*sorted(points.items()), strict=True)
            line(axes, x, y, colors[provider], strong=derived.is_ours(provider))
            ends.append(End(provider, x[-1], y[-1], colors[provider]))
        logarithmic(axes, {x for points in groups.values() for x in points}, room=4)
        axes.set(xlabel=xlabel, ylabel="milliseconds")
        heading(axes, title.format(" or ".join(f"{fixed:,}" for fixed in sorted({fixed for _, fixed in groups}))))
        label_ends(axes, ends)
    return figure


def roofline(run: Run) -> Figure | None:
    """Our kernels, each at all its sizes, under the ceilings measured in the same run."""
    copy, peak = run.machine.copy, run.machine.product
    groups = {name: [one for one in of.values() if _intensity(one)] for name, of in _ours(run).items()}
    groups = {name: sorted(of, key=_intensity) for name, of in groups.items() if of}
    if not groups or not copy or not peak:
        return None
    intensities = list(map(_intensity, chain(*groups.values())))
    left, right = min(intensities) * 0.5, max(*intensities, peak / copy) * 1.4
    figure, (axes,) = panels(1, columns=1, height=5.6)
    axes.set(xscale="log", yscale="log", xlim=(left, right), xlabel="FLOP for a byte moved", ylabel="TFLOP/s")
    corners = [left, peak / copy, right]
    axes.plot(corners, [min(peak, copy * at) / 1e12 for at in corners], color=FAINT, linewidth=3)
    slope, flat = left * (corners[1] / left) ** 0.5, corners[1] * 0.95
    style: dict[str, Any] = {"ha": "right", "va": "bottom", "size": FONT, "color": FAINT}
    axes.text(slope, copy * slope / 1e12 * 1.1, f"copy {copy / 1e12:.1f} TB/s", **style)
    axes.text(flat, peak / 1e12, f"large product {peak / 1e12:.0f} TFLOP/s", **style)
    ends = []
    for (name, entries), (marker, color) in zip(groups.items(), product("os^", (OURS[0], *PEERS)), strict=False):
        axes.plot(
            [_intensity(entry) for entry in entries],
            [entry.tflops for entry in entries],
            color=color,
            marker=marker,
            linewidth=1.2,
        )
        ends.append(End(name, _intensity(entries[-1]), entries[-1].tflops, color))
    plain_decades(axes.xaxis, steps=(1,))
    plain_decades(axes.yaxis)
    label_ends(axes, [end for end in ends if end.x >= peak / copy])
    label_ends(axes, [end for end in ends if end.x < peak / copy], beside=True)
    return figure


def ideal(run: Run) -> Figure | None:
    """A panel for each of our kernels, a bar for each size; a tick where the fastest peer would end."""
    peers, groups = derived.fastest_peers(run), _ours(run)
    if not groups:
        return None
    ticks = {
        key: derived.of_ideal(entry) * entry.microseconds / peers[key].microseconds
        for of in groups.values()
        for entry in of.values()
        if (key := (entry.kernel, entry.case, entry.rows)) in peers
    }
    most, widest = max(map(len, groups.values())), max([1.0, *ticks.values()])
    figure, every = panels(len(groups), columns=PANELS_BESIDE, height=0.32 * most, gap=1.04)
    for axes, (name, of) in zip(every, groups.items(), strict=True):
        shares = {label: derived.of_ideal(entry) for label, entry in of.items()}
        bars(axes, shares, lambda share: f"{share:.0%}", OURS[0], end=widest + 0.3, words_at=widest + 0.02)
        axes.set_ylim(most - 0.5, -0.5)
        for place, entry in enumerate(of.values()):
            share = ticks.get((entry.kernel, entry.case, entry.rows))
            if share is not None:
                axes.plot([share, share], [place - 0.4, place + 0.4], color=PEERS[0], linewidth=3)
        axes.plot([1, 1], [-0.5, len(of) - 0.5], color=INK, linewidth=1)
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
    gap = room_for(provider for of in inputs.values() for provider in of)
    figure, every = panels(len(inputs), columns=2, height=3.8, gap=gap)
    colors = _colors(run)
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


def _colors(run: Run) -> dict[str, str]:
    """Of every encoder in the run, the same in all of its pictures."""
    return palette([*derived.providers(run.calls), *(entry.provider for entry in (*run.padding, *run.accuracy))])


def _ours(run: Run) -> dict[str, dict[str, Kernel]]:
    """Our kernels, and each one's sizes by their names: rows, or the case where every case has one size."""
    entries = [entry for entry in run.kernels if entry.provider == "ours"]
    cases: dict[str, dict[str, list[Kernel]]] = {}
    for entry in sorted(entries, key=lambda entry: entry.rows):
        cases.setdefault(entry.kernel, {}).setdefault(entry.case, []).append(entry)
    found: dict[str, dict[str, Kernel]] = {}
    for kernel, of_kernel in cases.items():
        if len(of_kernel) > 1 and all(len(of_case) == 1 for of_case in of_kernel.values()):
            found[kernel] = {
                f"{int(case):,}" if case.isdigit() else case: of_case[0] for case, of_case in of_kernel.items()
            }
            continue
        for case, of_case in of_kernel.items():
            name = kernel if len(of_kernel) == 1 else f"{kernel} {case}"
            found[name] = {f"{entry.rows:,}": entry for entry in of_case}
    return found


def _intensity(entry: Kernel) -> float:
    """FLOP a byte; zero for a kernel without counted FLOP or bytes, which no roofline can show."""
    return 1e3 * entry.tflops / entry.gigabytes_per_second if entry.gigabytes_per_second else 0.0
