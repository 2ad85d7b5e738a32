"""README.md's table and picture of whole calls, from the newest run in ``bench/results/``."""

import re
from pathlib import Path

import click

from bench import derived
from bench.markdown import filled, render_rows
from bench.records import NO_GPU, Run
from bench.report import RESULTS
from bench.tables import NOTHING, milliseconds

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- python -m bench readme writes from here -->", "<!-- to here -->"


def newest(folder: Path) -> tuple[Path, Run] | None:
    """The last full run on a GPU, by its date, and of one day by its number; None without one.

    Files that hold something else, as those from before there were runs, are passed over.
    """
    found = []
    for path in folder.glob("*.json"):
        try:
            run = Run.read(path)
        except ValueError:
            continue
        if run.calls and run.machine.gpu != NO_GPU and not run.quick:
            # "...-2" after none, "...-10" after "...-9"
            order = [int(digits) for digits in re.findall(r"\d+", path.stem)]
            found.append((run.machine.date, len(order), order, path, run))
    return max(found, key=lambda entry: entry[:3])[3:] if found else None


def section(path: Path, run: Run) -> str:
    """What stands between the markers.

    Args:
        path: the run's JSON file; its report and pictures lie beside it.
    """
    folder = path.parent.relative_to(ROOT) if path.is_relative_to(ROOT) else path.parent
    inputs = derived.by_input(run)
    rows = []
    for provider in derived.providers(run.calls):
        times = (milliseconds(derived.headline(of[provider])) if provider in of else NOTHING for of in inputs.values())
        rows.append((provider.replace("ours", "ernie-vit", 1) if derived.is_ours(provider) else provider, *times))
    report, picture = folder / f"{path.stem}.md", folder / f"{path.stem}-latency.png"
    conditions = (
        "Milliseconds of a whole call, pixel rows to tokens, resampler and host included (medians; the mix of calls:"
        f" mean), bf16, random weights, one process; {derived.conditions(run)}. All figures: [{report.name}]({report})."
    )
    parts = [render_rows(("patches in a call", *inputs), "l" + "r" * len(inputs), rows), filled(conditions)]
    if path.with_name(picture.name).exists():
        parts.append(f"![Milliseconds of a whole call over the patches of one image]({picture})")
    return "\n\n".join(parts)


def rewritten(text: str, new: str) -> str:
    """``text`` with ``new`` between its markers.

    Raises:
        click.ClickException: it does not have each marker once, in their order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise click.ClickException(f"README.md: expected one line {BEGIN!r} and one line {END!r} below it")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if README.md is not up to date.")
def readme(check: bool) -> None:
    """Write README.md's figures from the newest run in bench/results/ that is a full one on a GPU."""
    run = newest(RESULTS)
    if run is None:
        raise click.ClickException(f"{RESULTS} has no full run on a GPU")
    file = ROOT / "README.md"
    text = file.read_text(encoding="utf-8")
    new = rewritten(text, section(*run))
    if check and new != text:
        raise click.ClickException(f"README.md is not that of {run[0].name}: run python -m bench readme")
    if not check:
        file.write_text(new, encoding="utf-8")
        click.echo(f"README.md shows {run[0].name}")
