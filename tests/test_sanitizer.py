"""The kernels of a small tower read and write nothing out of bounds, and the plain ones race for nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # the end of a tensor is then the end of a block
    run = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, "sanitized_tower.py", tool],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
