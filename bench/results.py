"""Where the measurements go: a table on the screen, CSV and JSON under ``bench/results/``."""

import csv
import json
import platform
import subprocess
from dataclasses import asdict, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import Row, ceilings

FOLDER = Path(__file__).parent / "results"


def header() -> dict[str, str]:
    """The machine and the software that the figures belong to."""
    import triton

    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    return {
        "gpu": torch.cuda.get_device_name(0),
        query: _output("nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "commit": _output("git", "-C", str(FOLDER), "describe", "--always", "--dirty"),
        "copy": f"{ceilings().copy / 1e9:.0f} GB/s, read and written",
        "product": f"{ceilings().product / 1e12:.0f} TFLOP/s, 8192-cubed bf16, random data",
    }


class Results:
    """Rows of one session; each is on disk before the next is measured."""

    def __init__(self) -> None:
        self.header = header()
        self.rows: list[Row] = []

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        FOLDER.mkdir(exist_ok=True)
        for kernel in {row.kernel for row in rows}:
            of_kernel = [asdict(row) for row in self.rows if row.kernel == kernel]
            with (FOLDER / f"{kernel}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, [field.name for field in fields(Row)])
                writer.writeheader()
                writer.writerows({key: _short(value) for key, value in row.items()} for row in of_kernel)
            text = json.dumps({"header": self.header, "rows": of_kernel}, indent=1)
            (FOLDER / f"{kernel}.json").write_text(text + "\n")

    def print(self) -> None:
        console = Console(width=140)
        console.print(*(f"{name}: {value}" for name, value in self.header.items()), sep="\n", highlight=False)
        for kernel in dict.fromkeys(row.kernel for row in self.rows):
            table = Table("case", "rows", "provider", title=kernel)
            for column in ("us", "/ ours", "TFLOP/s", "GB/s", "of ceiling", "error", "plain error", "noise"):
                table.add_column(column, justify="right")
            shown = ""
            for row in (row for row in self.rows if row.kernel == kernel):
                case = f"{row.name} {row.rows}"
                if case != shown:
                    table.add_section()
                table.add_row(
                    row.name if case != shown else "",
                    f"{row.rows:,}" if case != shown else "",
                    row.provider,
                    f"{row.microseconds:.1f}",
                    f"{row.of_ours:.2f}",
                    f"{row.tflops:.0f}",
                    f"{row.gigabytes_per_second:.0f}",
                    f"{row.of_ceiling:.0%}",
                    f"{row.error:.2e}",
                    f"{row.plain_error:.2e}",
                    f"{row.noise:.1%}" if case != shown else "",
                )
                shown = case
            console.print(table)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
