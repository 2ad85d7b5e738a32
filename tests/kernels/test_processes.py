"""Workers that are forked or spawned by a process that has imported the kernels can run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_encodes(device: str, method: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, str(TESTS / "processes.py"), method, device]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
