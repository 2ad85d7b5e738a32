"""The kernels' benchmarks from end to end on stand-ins: every case of the smallest size, in process and by pytest."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import kernels
from bench.records import Kernel, Missing
from bench.sizes import QUICK_SIZES

ROOT = Path(__file__).resolve().parents[2]


def pretended(*arguments: str) -> str:
    # a process of its own, not a worker of this session: pytest-benchmark measures nothing in those
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "-m", "pretended_measure", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(pretended().strip().splitlines()[-1])


def test_every_case_is_measured_with_its_peers(found: dict[str, Any]) -> None:
    measured = [Kernel(**kernel) for kernel in found["kernels"]]
    providers: dict[tuple[str, str], list[str]] = {}
    for kernel in measured:
        providers.setdefault((kernel.kernel, kernel.case), []).append(kernel.provider)
        assert kernel.rows == 256
        assert kernel.microseconds > 0
        assert kernel.error <= 2 * kernel.plain_error
    ours = ["ours", "ours, 1/8 live"]
    cublas = ["cuBLAS, bias only", "cuBLAS + eager epilogue"]
    assert providers == {
        ("linear", "qkv"): [*ours, cublas[0]],
        ("linear", "proj"): [*ours, *cublas],
        ("linear", "fc1"): [*ours, *cublas],
        ("linear", "fc2"): [*ours, *cublas],
        ("linear", "patch_embed"): [*ours, "cast + cuBLAS"],
        ("mlp", "mlp"): [*ours, "eager"],
        ("layer_norm", "1280"): ["F.layer_norm"],
        ("rotary", "table"): ["ours", "eager"],
        ("rotary", "rotation"): [*ours, "eager"],
        ("rotary", "projection"): [*ours, "ours, linear then rotary", "cuBLAS + eager rotation"],
        ("tower", "1 image"): ["ours", "eager pieces, right"],
        ("attention", "256"): [*ours, "right"],
    }


def test_what_was_not_measured_is_told_once_with_its_reason(found: dict[str, Any]) -> None:
    missing = [Missing(**peer) for peer in found["missing"]]
    assert sorted(peer.provider for peer in missing) == ["absent", "failing", "ours", "ours, 1/8 live", "wrong"]
    reasons = {peer.provider: peer.reason for peer in missing}
    assert reasons["absent"] == "ModuleNotFoundError: No module named 'peer'"
    assert reasons["wrong"].startswith("wrong by value: relative error 1.0")
    assert reasons["wrong"].endswith("(attention 256, 256 rows)")
    assert reasons["failing"].startswith("RuntimeError: ")
    assert reasons["ours"].endswith("(layer_norm 1280, 256 rows)")


def test_compiling_ahead_measures_nothing(found: dict[str, Any]) -> None:
    assert found["only compiled"] == [0, 0]


def test_jobs_for_other_processes() -> None:
    every, few = (pickle.loads(pickle.dumps(kernels.compilations(quick=quick))) for quick in (False, True))
    assert [job.args for job in few] == [(file, size) for file in kernels.COMPILED_AHEAD for size in QUICK_SIZES]
    assert {job.args for job in few} < {job.args for job in every}


def test_a_session_that_cannot_start_is_told(found: dict[str, Any]) -> None:
    (broken,) = found["broken"]
    assert broken["provider"] == "kernels"
    assert broken["reason"].startswith("pytest ended with USAGE_ERROR")


def test_pytest_alone_shows_the_tables() -> None:
    options = ["--benchmark-only", "--tb=no", "--show-capture=no", "-q", "-p", "no:logging"]
    files = [str(ROOT / "bench" / f"bench_{name}.py") for name in ("linear", "layer_norm")]
    # the wrong kernel fails, the right one does not
    shown = pretended(*files, *options, "-k", "(patch_embed or layer_norm) and 256")
    assert "1 failed, 1 passed" in shown
    for text in ("Kernel linear", "cast + cuBLAS", "Kernel layer_norm", "Not measured", "wrong by value"):
        assert text in shown


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not_measured", lambda: "needs a CUDA GPU")
    assert kernels.measure_kernels(quick=False) == ([], [Missing("kernels", "needs a CUDA GPU")])
