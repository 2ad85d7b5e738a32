"""A run as Markdown that reads well raw: padded columns, numbers to the right, conditions under each table."""

import textwrap
from collections.abc import Mapping, Sequence

from bench import derived
from bench.records import Run
from bench.tables import Table, tables

WIDTH = 120


def render(run: Run, pictures: Mapping[str, str]) -> str:
    """The whole report.

    Args:
        pictures: file names, relative to the report, by what they show.
    """
    conditions = filled(derived.conditions(run))
    parts = [
        f"# {run.machine.gpu}, {run.machine.date}" + (" (quick run)" if run.quick else ""),
        f"{conditions}\n\nThe run took {run.seconds:.0f} s.",
        *(f"## {table.title}\n\n{render_table(table)}\n\n{_under(table, conditions)}" for table in tables(run)),
        *(["## Pictures"] if pictures else []),
        *(f"![{title}]({file})" for title, file in pictures.items()),
    ]
    return "\n\n".join(parts) + "\n"


def render_table(table: Table) -> str:
    shown = [row for _, row in table.grouped()]
    return render_rows(table.headings, table.align, shown)


def render_rows(headings: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> str:
    """A table whose raw columns line up; ``align`` has a letter a column, l or r."""
    cells = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in (headings, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * (width - 1) + (":" if side == "r" else "-") for width, side in zip(widths, align, strict=True)]
    lines = [
        [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ]
        for row in cells
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def filled(text: str) -> str:
    """Lines of a width that reads well raw."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _under(table: Table, conditions: str) -> str:
    return f"{filled(table.note)}\n\n{conditions}" if table.note else conditions
