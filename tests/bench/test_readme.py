"""README.md's section follows the newest run."""

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from synthetic_run import INPUTS, run_without_gpu, synthetic_run

from bench import readme as module
from bench.readme import BEGIN, END, newest, readme, rewritten, section
from bench.report import write

TEXT = f"# title\n\n{BEGIN}\n\nold figures\n\n{END}\n\n## more\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a README.md and a run, which the command takes for the checkout."""
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "bench" / "results")
    (tmp_path / "README.md").write_text(TEXT)
    write(replace(synthetic_run(), kernels=[], padding=[], accuracy=[]), module.RESULTS)
    return tmp_path


def test_newest_is_the_last_full_run_on_a_gpu(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    small = {"kernels": [], "padding": [], "accuracy": []}
    names = {
        "2031-01-31-h200.json": synthetic_run(date="2031-01-31"),
        "2031-02-03-h200.json": synthetic_run(),
        "2031-02-03-h200-9.json": synthetic_run(),
        "2031-02-03-h200-10.json": synthetic_run(),
        "2031-02-04-no-gpu.json": run_without_gpu(),
        "2031-02-05-h200-quick.json": synthetic_run(date="2031-02-05", quick=True),
        "2031-02-06-h200.json": replace(synthetic_run(date="2031-02-06"), calls=[]),
    }
    for name, run in names.items():
        replace(run, **small).write(tmp_path / name)
    (tmp_path / "2031-02-07-h200-calls.json").write_text(json.dumps({"header": {}, "calls": {"256": {}}}))
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "2031-02-03-h200-10.json"


def test_command_writes_the_figures_once(checkout: Path) -> None:
    file = checkout / "README.md"
    stale = CliRunner().invoke(readme, ["--check"])
    assert stale.exit_code == 1
    assert "python -m bench readme" in stale.output
    assert file.read_text() == TEXT

    assert CliRunner().invoke(readme).exit_code == 0
    written = file.read_text(encoding="utf-8")
    assert written.startswith("# title\n")
    assert written.endswith("\n## more\n")
    assert "old figures" not in written
    assert CliRunner().invoke(readme, ["--check"]).exit_code == 0
    assert CliRunner().invoke(readme).exit_code == 0
    assert file.read_text(encoding="utf-8") == written


def test_section_has_table_conditions_and_picture(checkout: Path) -> None:
    found = newest(module.RESULTS)
    assert found is not None
    path, run = found
    text = section(path, run)
    lines = text.splitlines()
    assert lines[0].split("|")[1:-1] != lines[1].split("|")[1:-1]
    assert [cell.strip() for cell in lines[0].split("|")[2:-1]] == list(INPUTS)
    ours = next(line for line in lines if line.startswith("| ernie-vit graph"))
    mix = next(call for call in run.calls if (call.input, call.provider) == ("mix", "ours graph"))
    assert ours.split("|")[-2].strip() == f"{mix.mean:.2f}"
    assert "NVIDIA H200" in text
    assert "commit 0123abc" in text.replace("\n", " ")
    assert max(map(len, lines)) < 140
    for target in ("bench/results/2031-02-03-h200.md", "bench/results/2031-02-03-h200-latency.png"):
        assert f"({target})" in text
        assert (checkout / target).exists()


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", TEXT + TEXT, TEXT + BEGIN, END + TEXT])
def test_markers_that_are_not_a_pair(text: str) -> None:
    with pytest.raises(click.ClickException, match="README"):
        rewritten(text, "new")


def test_without_a_run_nothing_is_written(checkout: Path) -> None:
    for path in module.RESULTS.glob("*.json"):
        path.unlink()
    result = CliRunner().invoke(readme)
    assert result.exit_code == 1
    assert "no full run on a GPU" in result.output
    assert (checkout / "README.md").read_text() == TEXT


def test_this_readme_has_the_markers() -> None:
    text = (module.ROOT / "README.md").read_text(encoding="utf-8")
    assert "new figures" in rewritten(text, "new figures")


def test_this_readme_is_up_to_date() -> None:
    if newest(module.RESULTS) is None:
        pytest.skip("bench/results/ has no full run on a GPU yet")
    result = CliRunner().invoke(readme, ["--check"])
    assert result.exit_code == 0, result.output
