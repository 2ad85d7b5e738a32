"""What is told of the machine."""

import pytest
import torch

from bench.machine import describe
from bench.records import NO_GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_a_machine_without_a_gpu() -> None:
    machine = describe()
    assert machine.gpu == NO_GPU
    assert machine.versions["torch"] == torch.__version__
    assert len(machine.date.split("-")) == 3
    assert (machine.copy, machine.product) == (0.0, 0.0)
