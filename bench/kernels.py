"""The kernels' part of a run of the benchmark: the pytest files beside this one, run in this process."""

import contextlib
import io
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from bench.findings import Findings
from bench.measure import why_not_measured
from bench.records import Kernel, Missing
from bench.sizes import FRAMES, QUICK_SIZES

HERE = Path(__file__).parent
# Attention comes last: importing vLLM, one of its peers, changes settings of torch.compile.
FILES = ("bench_linear", "bench_mlp", "bench_layer_norm", "bench_rotary", "bench_tower", "bench_attention")
# Whose variants are all that is worth compiling in parallel; the other files need few more.
COMPILED_AHEAD = ("bench_linear", "bench_rotary", "bench_attention")


def measure_kernels(quick: bool) -> tuple[list[Kernel], list[Missing]]:
    """Check and time every kernel beside its peers; see ``bench/README.md``.

    A peer that is not there, fails or is wrong is missing with its reason, and so is ours; neither ends the run.

    Args:
        quick: one size, fewer rounds, and no peer that takes seconds to import or compile.

    Raises:
        KeyboardInterrupt: while it ran.
    """
    why_not = why_not_measured()
    if why_not:
        return [], [Missing("kernels", why_not)]
    findings = Findings(quick=quick)
    run_files(FILES, findings)
    return findings.kernels, findings.missing


def compilations(*, quick: bool) -> list[partial[None]]:
    """Jobs for ``compile_ahead``: a file at a size each. What they leave out is compiled where it is measured."""
    sizes = QUICK_SIZES if quick else tuple(map(str, FRAMES))
    return [partial(compile_ours, file, size) for file, size in product(COMPILED_AHEAD, sizes)]


def compile_ours(file: str, size: str) -> None:
    """Compile our kernels as a file uses them at a size; what fails will do so again where it is measured."""
    run_files([file], Findings(sizes=[size], only_compile=True))


def run_files(files: Sequence[str], findings: Findings) -> None:
    """Run pytest files of this folder quietly.

    Raises:
        KeyboardInterrupt: while they ran.
    """
    root, output = HERE.parent, io.StringIO()
    options = ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), "--continue-on-collection-errors"]
    options += ["-p", "no:logging", "-p", "no:benchmark"]
    paths = [str(HERE / f"{file}.py") for file in files]
    with contextlib.redirect_stdout(output):
        code = pytest.main([*options, *paths], plugins=[findings])
    if findings.interrupt:
        raise findings.interrupt
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        last = output.getvalue().strip().splitlines()[-1:]
        findings.miss("kernels", " ".join([f"pytest ended with {pytest.ExitCode(code).name}", *last]))
