"""What differs between two runs beyond their noise: times, errors and bits, of all of which less is better."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console

from bench import derived
from bench.records import LEFT_OUT, Run
from bench.report import rich_table, widened
from bench.tables import NOTHING, Table

# No smaller difference counts. Whole runs on other days, or other machines of one kind, differed by 2 to 3 %.
TIME_FLOOR = 0.03
ERROR_FLOOR = 0.05
HOST_FLOOR = 0.1  # the processor's share in a shared machine
CAPTURE_FLOOR = 0.25  # seconds of one capture, which is not repeated


class Key(NamedTuple):
    """What was measured: ``("calls", "1,296", "vLLM graph", "ms")``."""

    kind: str
    what: str
    provider: str
    unit: str


@dataclass(frozen=True)
class Figure:
    """A value, less of which is better; ``noise`` and ``floor`` are shares of it."""

    value: float
    noise: float = 0.0
    floor: float = TIME_FLOOR


@dataclass(frozen=True)
class Change:
    """A figure of both runs. ``share`` is by how much of the first the second is larger, infinite if that was zero."""

    key: Key
    before: float
    after: float
    allowed: float

    @property
    def share(self) -> float:
        if self.before == self.after:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")

    @property
    def is_worse(self) -> bool:
        return self.share > self.allowed

    @property
    def is_better(self) -> bool:
        # as many times faster as slower would count: 1 / 1.03, not 0.97
        return self.after * (1 + self.allowed) < self.before


def figures(run: Run) -> dict[Key, Figure]:
    """Everything of a run that can be compared."""
    return dict(_figures(run))


def _figures(run: Run) -> Iterator[tuple[Key, Figure]]:
    noise = derived.noise(run)
    for call in run.calls:
        if not call.provider.endswith(derived.AGAIN):
            of_call, of_input = ("calls", call.input, call.provider), max(call.spread, noise.get(call.input, 0.0))
            yield Key(*of_call, "ms"), Figure(derived.headline(call), of_input)
            yield Key(*of_call, "ms, host"), Figure(call.host, of_input, HOST_FLOOR)
    for kernel in run.kernels:
        of_kernel = f"kernel {kernel.kernel}", f"{kernel.case}, {kernel.rows:,} rows", kernel.provider
        yield Key(*of_kernel, "µs"), Figure(kernel.microseconds, kernel.noise)
        yield Key(*of_kernel, "error"), Figure(kernel.error, floor=ERROR_FLOOR)
    for padding in run.padding:
        yield (
            Key("padding", f"{padding.rows:,} of {padding.capacity:,} rows", padding.provider, "ms"),
            Figure(padding.milliseconds),
        )
    for error in run.accuracy:
        where = "tokens" if error.block is None else f"block {error.block}"
        yield (
            Key("accuracy", f"{error.input}, {where}", error.provider, "error"),
            Figure(error.error, floor=ERROR_FLOOR),
        )
    for bits in run.bits:
        yield (
            Key("bits", bits.situation, bits.provider, "% differ"),
            Figure(100 * (1 - bits.equal / bits.of), floor=0.0),
        )
    for host in run.hosts:
        sizes = "sizes met before" if host.met_before else "new sizes"
        yield Key("host", sizes, host.provider, "µs"), Figure(host.microseconds, floor=HOST_FLOOR)
    for cost in run.captures:
        yield Key("capture", f"{cost.graphs} graphs", cost.provider, "s"), Figure(cost.seconds, floor=CAPTURE_FLOOR)
        yield Key("capture", f"{cost.graphs} graphs", cost.provider, "MiB"), Figure(cost.mebibytes)


def changes(first: Run, second: Run) -> list[Change]:
    """Every figure that both runs have; a change is allowed up to its floor or up to the noise of both runs."""
    before, after = figures(first), figures(second)
    return [
        Change(key, old.value, after[key].value, max(old.floor, old.noise + after[key].noise))
        for key, old in before.items()
        if key in after
    ]


def table_of(found: list[Change], title: str) -> Table:
    return Table(
        title,
        ("what", "case", "provider", "unit", "before", "after", "change", "allowed"),
        "llllrrrr",
        [
            (*change.key, f"{change.before:.4g}", f"{change.after:.4g}", _percent(change), f"{change.allowed:.1%}")
            for change in sorted(found, key=lambda change: -abs(change.share))
        ],
    )


def only_in(first: Run, second: Run) -> Table:
    """What one run measured and the other did not, with the other's reason where it gives one."""
    rows = []
    for name, one, other in (("before", first, second), ("after", second, first)):
        reasons = {entry.provider: entry.reason for entry in other.missing}
        lacking = figures(one).keys() - figures(other).keys()
        for (kind, provider), count in sorted(Counter((key.kind, key.provider) for key in lacking).items()):
            rows.append((name, kind, provider, f"{count}", reasons.get(provider, NOTHING)))
    return Table("Only in one run", ("run", "what", "provider", "figures", "the other run says"), "lllrl", rows)


@click.command()
@click.argument("before", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def compare(context: click.Context, before: Path, after: Path) -> None:
    """Compare two runs, given as their JSON files. The exit status is 1 if something of ours got worse or fails now."""
    try:
        first, second = Run.read(before), Run.read(after)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    console = widened(Console())
    for name, run in (("before", first), ("after", second)):
        console.print(f"{name}: {derived.conditions(run)}", highlight=False, markup=False)
    if first.machine.gpu != second.machine.gpu or first.quick != second.quick:
        console.print("The runs are of different kinds: not all of a difference is the code's.", style="bold yellow")
    found = changes(first, second)
    worse = [change for change in found if change.is_worse and derived.is_ours(change.key.provider)]
    peers = [change for change in found if change.is_worse and not derived.is_ours(change.key.provider)]
    better = [change for change in found if change.is_better]
    for table in (
        table_of(worse, "Worse"),
        table_of(peers, "Worse, but not ours: the machine or the peer changed"),
        table_of(better, "Better"),
        only_in(first, second),
    ):
        if table.rows:
            console.print(rich_table(table))
    failed = [
        entry
        for entry in second.missing
        if derived.is_ours(entry.provider) and entry.reason != LEFT_OUT and entry not in first.missing
    ]
    for entry in failed:
        console.print(f"{entry.provider} failed: {entry.reason}", style="bold red", highlight=False, markup=False)
    same = len(found) - len(worse) - len(peers) - len(better)
    console.print(f"{len(worse)} worse, {len(better)} better, {same} within the noise", highlight=False)
    context.exit(1 if worse or failed else 0)


def _percent(change: Change) -> str:
    return f"{change.share:+.1%}" if change.before else "new"
