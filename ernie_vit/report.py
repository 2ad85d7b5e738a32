"""What the command line prints: the table of what was encoded, and what this machine has."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.encoding import Encoded
from ernie_vit.machine import describe_backends, describe_gpus, describe_versions, dtype_name

# Rich takes 80 columns where it writes to a file or a pipe, too few for the table.
WIDTH_OF_A_PIPE = 120


def make_console() -> Console:
    """A console on standard output that does not colour numbers."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_PIPE
    return console


def encoded_table(results: Sequence[Encoded], encoder: ErnieVisionEncoder) -> Table:
    """A row for each image or video; the caption says what the milliseconds hold."""
    warm_up = "no warm-up" if encoder.device.type == "cpu" else "the first ran once before, untimed"
    table = Table(
        caption=f"ms: pixel rows to tokens, one file at a time, without reading it; {warm_up}",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("file", overflow="fold")
    for column in ("size", "grid_thw"):
        table.add_column(column, no_wrap=True)
    for column in ("patches", "tokens", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("device", "dtype", "backend"):
        table.add_column(column, no_wrap=True)
    for result in results:
        width, height = result.size
        table.add_row(
            result.source.path.name,
            f"{width}x{height}",
            str(list(result.grid_thw)),
            str(result.patches),
            str(len(result.tokens)),
            f"{result.milliseconds:.{1 if result.milliseconds < 1000 else 0}f}",
            str(encoder.device),
            dtype_name(encoder.dtype),
            encoder.backend,
        )
    return table


def print_info(console: Console) -> None:
    """Versions, GPUs, and which backend runs on which device and why."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, version in describe_versions():
        facts.add_row(name, version)
    for gpu in describe_gpus():
        facts.add_row("GPU", gpu)
    backends = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("device", "dtype", "backend", "why"):
        backends.add_column(column, overflow="fold")
    for row in describe_backends():
        backends.add_row(*row)
    console.print(facts)
    console.print()
    console.print(backends)
