"""A whole run on the CPU with a tiny encoder, and what becomes of it when something fails or somebody stops it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from bench import run as running
from bench.__main__ import main
from bench.encoders.encoder import Encoder
from bench.machine import describe
from bench.plan import choose_plan
from bench.records import Bits, Capture, Missing, Run
from bench.run import Notebook
from ernie_vit import ErnieVisionEncoder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny encoder is measured, on the CPU")

KERNELS = [Missing("every kernel", "needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are measured by tests of their own."""
    kernels = SimpleNamespace(measure_kernels=lambda _quick: ([], KERNELS))
    monkeypatch.setitem(__import__("sys").modules, "bench.kernels", kernels)


def bench(folder: Path, *options: str) -> tuple[Result, Run]:
    result = CliRunner().invoke(main, ["run", "--quick", "--out", str(folder), *options])
    (file,) = folder.glob("*.json")
    return result, Run.read(file)


def test_a_whole_run(tmp_path: Path) -> None:
    result, run = bench(tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("No GPU")
    assert result.stdout.index("Error of the tokens") < result.stdout.index("Whole calls")
    plan = choose_plan(quick=True)
    assert list(dict.fromkeys(call.input for call in run.calls)) == [*plan.inputs, "mix"]
    for name in (*plan.inputs, "mix"):
        found = {call.provider for call in run.calls if call.input == name}
        assert found == {"ours eager", "ours eager again", "transformers"}
    assert {entry.input for entry in run.accuracy if entry.block is None} == set(plan.checked)
    assert {entry.provider for entry in run.accuracy if entry.block == 2} == {
        "plain PyTorch",
        "ours eager",
        "transformers",
    }
    assert {(entry.provider, entry.situation) for entry in run.bits if entry.equal == entry.of} >= {
        ("ours eager", "again"),
        ("transformers", "again"),
    }
    assert {host.provider for host in run.hosts} == {"ours eager", "transformers"}
    missing = {entry.provider: entry.reason for entry in run.missing}
    assert missing.keys() == {"vLLM", "torch.compile", "ours graph", "ours with resampler", "every kernel"}
    assert "vllm" in missing["vLLM"]
    assert run.seconds > 0
    assert run.quick
    assert not (tmp_path / running.UNFINISHED).exists()


@contextmanager
def open_wrong(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    yield Encoder("wrong", "wrong", lambda rows, grid: weights(rows, grid) * 1.01)


@contextmanager
def open_fragile(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    def encode(rows: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        if len(grid) > 1:
            raise RuntimeError("one image only\nand more about it")
        return weights(rows, grid)

    yield Encoder("fragile", "fragile", encode)


def test_who_fails_is_named_and_the_rest_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PEERS", {"wrong": open_wrong, "fragile": open_fragile})
    result, run = bench(tmp_path)
    assert result.exit_code == 0, result.output
    missing = {entry.provider: entry.reason for entry in run.missing}
    assert missing["wrong"].startswith("wrong by value: 16: error 1.00e-02, allowed")
    assert "not timed: wrong" in result.stdout
    assert not [call for call in run.calls if call.provider == "wrong"]
    # a peer that cannot take an input is left out there, and nobody else is
    assert missing["fragile, 2 x 64"] == "RuntimeError: one image only"
    assert {call.input for call in run.calls if call.provider == "fragile"} == {"16", "video 4 x 16"}
    assert {call.input for call in run.calls if call.provider == "ours eager"} >= {"16", "2 x 64", "mix"}


@contextmanager
def open_with_graphs(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    def run(rows: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        # image by image: a CPU's matrix products round by their size
        parts = rows.split(grid.prod(1).tolist())
        return torch.cat([weights(part, size[None]) for part, size in zip(parts, grid, strict=True)])

    @contextmanager
    def graphs(capacities: Sequence[tuple[int, int]] | None) -> Iterator[Encoder]:
        opened.append(capacities)
        yield Encoder("peer graph", "peer", run, videos=False, capture=Capture("peer graph", 3, 0.5, 20.0))
        opened.remove(capacities)

    opened: list[Sequence[tuple[int, int]] | None] = []
    yield Encoder("peer eager", "peer", run, graphs={"peer graph": graphs})
    assert opened == []


def test_graphs_are_measured_in_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PEERS", {"peer": open_with_graphs})
    result, run = bench(tmp_path)
    assert result.exit_code == 0, result.output
    plan = choose_plan(quick=True)
    assert run.captures == [Capture("peer graph", 3, 0.5, 20.0)]
    # graphs come first, and the first of all is measured twice
    assert [call.provider for call in run.calls if call.input == "16"] == [
        "peer graph",
        "peer graph again",
        "ours eager",
        "peer eager",
    ]
    assert "peer graph" not in {call.provider for call in run.calls if call.input.startswith("video")}
    images = len(plan.images)
    assert [entry for entry in run.bits if entry.provider.startswith("peer")] == [
        Bits("peer eager", "again", images, images),
        Bits("peer eager", "packed", images, images),
        Bits("peer graph", "in a graph", images, images),
        Bits("peer graph", "packed", images, images),
        Bits("peer graph", "padded", images, images),
    ]
    assert {entry.provider for entry in run.padding} == {"peer graph"}
    assert {(entry.rows, entry.capacity) for entry in run.padding} == {(16, 256), (64, 256), (64, 64)}
    assert {host.provider for host in run.hosts} == {"ours eager", "peer eager", "peer graph"}


def test_stopping_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "measure_mix", stop)
    result, run = bench(tmp_path)
    assert result.exit_code == running.STOPPED
    assert {call.input for call in run.calls} == set(choose_plan(quick=True).inputs)
    assert "Whole calls" in result.stdout


def test_a_section_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    notebook = Notebook(Run(describe(), quick=True), tmp_path / "run.json", Console(quiet=True))
    with notebook.section("first"):
        notebook.run.missing.append(Missing("a", "because"))
    assert [entry["provider"] for entry in json.loads(notebook.path.read_text())["missing"]] == ["a"]
    with notebook.section("second"):
        notebook.run.missing.append(Missing("b", "because"))
        raise ValueError("no\nmore")
    assert Run.read(notebook.path).missing == [
        Missing("a", "because"),
        Missing("b", "because"),
        Missing("second", "ValueError: no"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("run", "compare", "readme"))
    assert CliRunner().invoke(main, ["walk"]).exit_code == 2
