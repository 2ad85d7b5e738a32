"""The tables of a run, correctness before speed: text that the terminal and Markdown show alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import derived
from bench.records import Call, Kernel, Padding, Run

NOTHING = "-"
SHOWN_BLOCKS = 4  # every fourth block's error is in the table, all of them in the picture and the JSON


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        headings: with units.
        align: a letter a column: l left, r right.
        rows: finished text.
        note: what has to be known to read it.
        group: rows whose first ``group`` cells are equal belong together, and show these cells once.
    """

    title: str
    headings: tuple[str, ...]
    align: str
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    group: int = 0

    def grouped(self) -> Iterator[tuple[bool, tuple[str, ...]]]:
        """Each row as it is shown, and whether it starts a group."""
        before: tuple[str, ...] | None = None
        for row in self.rows:
            head = row[: self.group]
            yield head != before, row if head != before else ("",) * self.group + row[self.group :]
            before = head


def tables(run: Run) -> list[Table]:
    """All that have rows."""
    every = [
        token_errors(run),
        block_errors(run),
        bits(run),
        missing(run),
        calls(run),
        speed_ups(run),
        call_details(run),
        hosts(run),
        captures(run),
        padding(run),
        *(kernel(name, run) for name in dict.fromkeys(kernel.kernel for kernel in run.kernels)),
    ]
    return [table for table in every if table.rows]


def token_errors(run: Run) -> Table:
    cells = {(error.input, error.provider): f"{error.error:.2e}" for error in run.accuracy if error.block is None}
    return _crossed("Error of the tokens against float64", "input", cells, "Relative: ||out - exact|| / ||exact||.")


def block_errors(run: Run) -> Table:
    cells = {
        (error.input, f"{error.block}", error.provider): f"{error.error:.2e}"
        for error in run.accuracy
        if error.block is not None and error.block % SHOWN_BLOCKS == 0
    }
    names = dict.fromkeys(name for _, _, name in cells)
    rows = dict.fromkeys((where, block) for where, block, _ in cells)
    return Table(
        "Error after a block, against float64",
        ("input", "block", *names),
        "lr" + "r" * len(names),
        [(*row, *(cells.get((*row, name), NOTHING) for name in names)) for row in rows],
        "Block 0: after patch embedding.",
        group=1,
    )


def bits(run: Run) -> Table:
    cells = {(entry.provider, entry.situation): f"{entry.equal} of {entry.of}" for entry in run.bits}
    return _crossed("Images that have the bits of the call alone and eager", "provider", cells)


def missing(run: Run) -> Table:
    return Table(
        "Not measured",
        ("peer", "why"),
        "ll",
        [(entry.provider, " ".join(entry.reason.split())) for entry in run.missing],
    )


def calls(run: Run) -> Table:
    inputs, names, noise = derived.by_input(run), derived.providers(run.calls), derived.noise(run)
    rows = []
    for name, of in inputs.items():
        some = next(iter(of.values()))
        times = (milliseconds(derived.headline(of[key])) if key in of else NOTHING for key in names)
        differ = f"{noise[name]:.1%}" if name in noise else NOTHING
        rows.append((name, f"{some.patches:,}", f"{some.images:,}", *times, differ))
    crossing = [f"{encoder}: {words}" for encoder, words in derived.crossovers(run).items()]
    return Table(
        "Whole calls, ms",
        ("input", "patches", "images", *names, "noise"),
        "l" + "r" * (3 + len(names)),
        rows,
        _sentences(
            "Pixel rows to tokens, host included: median; of the mix the mean.",
            "Noise: how far two measurements of one encoder in this run differ." if noise else "",
            f"Faster as graph or eager, by images of one call: {'; '.join(crossing)}." if crossing else "",
            _meanwhile(run.calls),
        ),
    )


def speed_ups(run: Run) -> Table:
    cells = {
        (name, peer): f"{gain:.2f}" for name, peers in derived.speed_ups(run).items() for peer, gain in peers.items()
    }
    return _crossed(f"Time of a peer over that of {derived.our_encoder(run)}", "input", cells)


def call_details(run: Run) -> Table:
    rows = [
        (
            call.input,
            call.provider,
            *map(milliseconds, (call.median, call.mean, call.p99, call.host)),
            NOTHING if call.device is None else milliseconds(call.device),
            f"{call.images_per_second:,.0f}",
            f"{call.spread:.1%}",
            *((f"{call.clocks.sm:,.0f}", f"{call.clocks.power:,.0f}") if call.clocks else (NOTHING, NOTHING)),
        )
        for of in derived.by_input(run).values()
        for call in of.values()
    ]
    headings = "median ms", "mean ms", "P99 ms", "host ms", "GPU ms", "images/s", "spread", "SM MHz", "W"
    return Table(
        "Whole calls, all figures",
        ("input", "provider", *headings),
        "ll" + "r" * len(headings),
        rows,
        "P99: of fewer than 100 calls the slowest. Host: until the call returns. GPU: its work on a call, the host"
        " being ahead; in a call that itself waits for the GPU the host cannot be, and the figure has the gaps, up to"
        " all of the host's time. Images/s: by the mean. Spread: how far the medians of two halves of the samples are"
        " apart (of the mix: the means of its passes).",
        group=1,
    )


def hosts(run: Run) -> Table:
    known = {True: "sizes met before", False: "new sizes"}
    cells = {(host.provider, known[host.met_before]): f"{host.microseconds:,.0f}" for host in run.hosts}
    return _crossed("Host time of a call, µs", "provider", cells, "Until the call returns: median.")


def captures(run: Run) -> Table:
    return Table(
        "Capturing graphs",
        ("provider", "graphs", "s", "MiB", "MiB foretold"),
        "lrrrr",
        [
            (
                cost.provider,
                f"{cost.graphs}",
                f"{cost.seconds:.2f}",
                f"{cost.mebibytes:,.0f}",
                NOTHING if cost.estimate is None else f"{cost.estimate:,.0f}",
            )
            for cost in run.captures
        ],
        "When everything has been compiled."
        + (" Of ours the few that a quick run needs." if run.quick else " Each one's default set for 4,096 tokens."),
    )


def padding(run: Run) -> Table:
    cells = {(f"{p.rows:,}", f"{p.capacity:,}", p.provider): milliseconds(p.milliseconds) for p in run.padding}
    names = dict.fromkeys(name for _, _, name in cells)
    rows = dict.fromkeys((live, capacity) for live, capacity, _ in cells)
    return Table(
        "Padding: calls in graphs that are larger, ms",
        ("rows", "capacity", *names),
        "rr" + "r" * len(names),
        [(*row, *(cells.get((*row, name), NOTHING) for name in names)) for row in rows],
        _sentences("Whole calls: median.", _meanwhile(run.padding)),
    )


def kernel(name: str, run: Run) -> Table:
    entries = [entry for entry in run.kernels if entry.kernel == name]
    ours = {(entry.case, entry.rows): entry.microseconds for entry in entries if entry.provider == "ours"}
    headings = "µs", "/ ours", "TFLOP/s", "GB/s", "of ceiling", "of ideal", "error", "plain error", "noise"
    return Table(
        f"Kernel {name}",
        ("case", "rows", "provider", *headings),
        "lrl" + "r" * len(headings),
        [
            (entry.case, f"{entry.rows:,}", entry.provider, *_kernel_figures(entry, ours.get((entry.case, entry.rows))))
            for entry in entries
        ],
        _sentences(_ceilings(run), "Plain error: that of plain PyTorch at the same dtype.", _meanwhile(entries)),
        group=2,
    )


def _kernel_figures(entry: Kernel, ours: float | None) -> Iterator[str]:
    yield f"{entry.microseconds:,.1f}"
    yield NOTHING if ours is None else f"{entry.microseconds / ours:.2f}"
    yield f"{entry.tflops:,.0f}"
    yield f"{entry.gigabytes_per_second:,.0f}"
    yield f"{entry.of_ceiling:.0%}"
    yield NOTHING if entry.of_ideal is None else f"{entry.of_ideal:.0%}"
    yield f"{entry.error:.2e}"
    yield f"{entry.plain_error:.2e}"
    yield f"{entry.noise:.1%}"


def _ceilings(run: Run) -> str:
    copy, product = run.machine.copy / 1e12, run.machine.product / 1e12
    return f"Ceilings of this run: copy {copy:.2f} TB/s, product {product:.0f} TFLOP/s." if copy else ""


def _meanwhile(timed: Sequence[Call | Kernel | Padding]) -> str:
    clocks = derived.clocks(timed)
    return f"Meanwhile {clocks}." if clocks else ""


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _crossed(title: str, corner: str, cells: dict[tuple[str, str], str], note: str = "") -> Table:
    """A table of one record a cell: the keys' first parts down, the second across."""
    down, across = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    rows = [(row, *(cells.get((row, column), NOTHING) for column in across)) for row in down]
    return Table(title, (corner, *across), "l" + "r" * len(across), rows, note)


def _sentences(*parts: str) -> str:
    return " ".join(part for part in parts if part)
