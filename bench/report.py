"""What is shown of a run and what is kept: tables in the terminal; JSON, Markdown and pictures in a folder."""

import re
from itertools import count
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from bench import charts, derived, markdown
from bench.records import Run
from bench.tables import Table, tables

RESULTS = Path(__file__).parent / "results"
WIDTH_OF_A_PIPE = 150  # rich takes 80 columns where it writes to a file or a pipe, too few for the tables
BRANDS = {"nvidia", "geforce", "amd", "instinct"}


def show(run: Run, console: Console) -> None:
    """Print every table that has rows, correctness before speed, each with its conditions."""
    widened(console)
    conditions = derived.conditions(run)
    for table in tables(run):
        console.print(rich_table(table))
        for line in filter(None, (table.note, conditions)):
            console.print(line, style="dim", highlight=False, markup=False)
        console.print()
    console.print(f"{run.seconds:.0f} s in all", highlight=False)


def widened(console: Console) -> Console:
    """The console, with room for the tables where it writes to no terminal."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH_OF_A_PIPE)
    return console


def rich_table(table: Table) -> RichTable:
    shown = RichTable(title=escape(table.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, side in zip(table.headings, table.align, strict=True):
        shown.add_column(escape(heading), justify="right" if side == "r" else "left", overflow="fold")
    for starts, row in table.grouped():
        if starts and table.group:
            shown.add_section()
        shown.add_row(*map(escape, row))
    return shown


def write(run: Run, folder: Path) -> list[Path]:
    """Keep a run as ``DATE-GPU.json``, ``.md`` and pictures: ``2026-11-30-h200.json``, ``-2`` where that is taken.

    Returns:
        What was written, the JSON first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(run, folder)
    data, text = folder / f"{stem}.json", folder / f"{stem}.md"
    run.write(data)
    pictures = charts.draw(run, folder, stem)
    text.write_text(markdown.render(run, {title: path.name for title, path in pictures.items()}), encoding="utf-8")
    return [data, text, *pictures.values()]


def free_stem(run: Run, folder: Path) -> str:
    name = f"{run.machine.date}-{slug(run.machine.gpu)}" + ("-quick" if run.quick else "")
    stems = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(stem for stem in stems if not any((folder / f"{stem}{end}").exists() for end in (".json", ".md")))


def slug(gpu: str) -> str:
    """A GPU's model for file names: ``NVIDIA H100 80GB HBM3`` is ``h100``, ``NVIDIA GeForce RTX 4090`` ``rtx-4090``."""
    words = [word for word in re.findall(r"[a-z0-9]+", gpu.lower()) if word not in BRANDS]
    until = next((place for place, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "-".join(words[: until + 1])
