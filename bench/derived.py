"""Figures that follow from a run's records: speed-ups, where eager and graph cross, and the conditions in one line."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from bench.records import Call, Kernel, Padding, Run

MIX = "mix"
GRAPH, EAGER = " graph", " eager"
AGAIN = " again"  # the same encoder a second time in one run: what differs is noise


def is_ours(provider: str) -> bool:
    """``"ours"``, ``"ours graph"`` and ``"ours, 1/8 live"`` are; everything else is a peer."""
    return provider.replace(",", " ").split()[:1] == ["ours"]


def encoder(provider: str) -> str:
    """Whose, without how it runs: ``"vLLM"`` of ``"vLLM graph"``."""
    return provider.replace(GRAPH, "").replace(EAGER, "")


def headline(call: Call) -> float:
    """Milliseconds that stand for a call: the median, and of the mix, whose calls differ in size, the mean."""
    return call.mean if call.input == MIX else call.median


def by_input(run: Run) -> dict[str, dict[str, Call]]:
    """Calls by input and provider, in the run's order, the mix last."""
    found: dict[str, dict[str, Call]] = {}
    for call in sorted(run.calls, key=lambda call: call.input == MIX):
        found.setdefault(call.input, {})[call.provider] = call
    return found


def providers(calls: Iterable[Call]) -> list[str]:
    """Peers in the run's order, then ours, so that ours stand together and last; none twice."""
    names = dict.fromkeys(call.provider for call in calls if not call.provider.endswith(AGAIN))
    return sorted(names, key=is_ours)


def noise(run: Run) -> dict[str, float]:
    """By input: how far two measurements of one encoder are apart, as a share; where a run has both."""
    return {
        name: abs(headline(call) / headline(calls[provider.removesuffix(AGAIN)]) - 1)
        for name, calls in by_input(run).items()
        for provider, call in calls.items()
        if provider.endswith(AGAIN) and provider.removesuffix(AGAIN) in calls
    }


def our_encoder(run: Run) -> str | None:
    """The one of our ways to encode that is compared with the peers: from graphs, if the run has that."""
    ours = [name for name in providers(run.calls) if is_ours(name)]
    return next((name for name in ours if GRAPH in name), ours[0] if ours else None)


def speed_ups(run: Run) -> dict[str, dict[str, float]]:
    """By input and peer: the peer's time over ours. Inputs that ours or all peers lack are left out."""
    ours = our_encoder(run)
    found: dict[str, dict[str, float]] = {}
    for name, calls in by_input(run).items():
        if ours in calls:
            peers = {peer: headline(call) / headline(calls[ours]) for peer, call in calls.items() if not is_ours(peer)}
            found |= {name: peers} if peers else {}
    return found


def single_images(run: Run) -> dict[str, list[Call]]:
    """Calls of one image by provider, smallest first: what can be drawn against patches as one line."""
    lines: dict[str, list[Call]] = {name: [] for name in providers(run.calls)}
    for call in sorted(run.calls, key=lambda call: call.patches):
        if call.provider in lines and call.images == 1 and call.input != MIX and not call.input.startswith("video"):
            lines[call.provider].append(call)
    return {name: calls for name, calls in lines.items() if calls}


def crossovers(run: Run) -> dict[str, str]:
    """For each encoder that ran both ways: from how many patches on its graph or its eager call is faster.

    Between two sizes the lines are taken as straight in logarithms of patches and of time. A size at which the two
    differ by no more than the noise is passed over.
    """
    lines, differ = single_images(run), noise(run)
    found = {}
    for name, graph in lines.items():
        eager = {call.patches: call for call in lines.get(name.replace(GRAPH, EAGER), [])}
        gains = []  # positive where the graph is faster
        for call in graph:
            other = eager.get(call.patches)
            if other is not None:
                gain = math.log(other.median / call.median)
                if abs(gain) > max(call.spread, other.spread, differ.get(call.input, 0.0)):
                    gains.append((call.patches, gain))
        if GRAPH in name and gains:
            found[encoder(name)] = _in_words(gains)
    return found


def _in_words(gains: Sequence[tuple[int, float]]) -> str:
    way = {True: "graph", False: "eager"}
    words = []
    for (few, gain), (many, next_gain) in pairwise(gains):
        if (gain >= 0) != (next_gain >= 0):
            share = gain / (gain - next_gain)
            words.append(f"{way[gain >= 0]} up to about {round(few * (many / few) ** share, -2):,.0f} patches")
    last = way[gains[-1][1] >= 0]
    if words:
        return ", ".join([*words, f"{last} from there"])
    return f"{last} everywhere, {gains[0][0]:,} to {gains[-1][0]:,} patches"


def of_ideal(kernel: Kernel) -> float:
    """The share of what the tiles' whole rounds allow; where that is not known, of the machine's ceiling."""
    return kernel.of_ceiling if kernel.of_ideal is None else kernel.of_ideal


def fastest_peers(run: Run) -> dict[tuple[str, str, int], Kernel]:
    """By kernel, case and rows: the fastest provider that is not ours."""
    found: dict[tuple[str, str, int], Kernel] = {}
    for kernel in run.kernels:
        key = kernel.kernel, kernel.case, kernel.rows
        if not is_ours(kernel.provider) and (key not in found or kernel.microseconds < found[key].microseconds):
            found[key] = kernel
    return found


def conditions(run: Run) -> str:
    """Everything that the figures depend on, in one line."""
    machine = run.machine
    parts = [
        machine.gpu,
        ", ".join(f"{name} {value}" for name, value in machine.conditions.items()),
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        f"commit {machine.commit}",
        machine.date + (", quick run" if run.quick else ""),
    ]
    return "; ".join(part for part in parts if part)


def clocks(timed: Iterable[Call | Kernel | Padding]) -> str:
    """The range of clocks, power and temperature while these were timed; empty where none were read."""
    read = [entry.clocks for entry in timed if entry.clocks]
    if not read:
        return ""
    return ", ".join(
        f"{_range([getattr(clock, name) for clock in read])} {unit}"
        for name, unit in (("sm", "MHz (SM)"), ("power", "W"), ("temperature", "°C"))
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"
