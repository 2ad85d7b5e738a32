"""Which kernels serve which device, on made-up machines."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from ernie_vit.kernels import dispatch

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
Machine = Callable[..., None]


def test_hopper_runs_gluon(machine: Machine) -> None:
    machine()
    assert dispatch.why_not_triton(GPU) is None
    assert dispatch.why_not_hopper(GPU, torch.bfloat16) is None
    assert dispatch.why_not_hopper(GPU, torch.float16) is None


def test_hopper_runs_plain_triton_at_float32(machine: Machine) -> None:
    machine()
    assert "torch.float32" in str(dispatch.why_not_hopper(GPU, torch.float32))


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA A100", (8, 0)), ("NVIDIA L4", (8, 9)), ("NVIDIA B200", (10, 0)), ("RTX 5090", (12, 0))],
)
def test_other_gpus_run_plain_triton(machine: Machine, name: str, capability: tuple[int, int]) -> None:
    machine(name=name, capability=capability)
    assert dispatch.why_not_triton(GPU) is None
    assert dispatch.why_not_hopper(GPU, torch.bfloat16) == f"{name} is not a Hopper GPU"
    assert dispatch.architecture(GPU) == "sm_{}{}".format(*capability)


def test_amd_runs_plain_triton(machine: Machine) -> None:
    machine(name="AMD Instinct MI300X", hip="6.4", capability=(9, 4))
    assert dispatch.why_not_triton(GPU) is None
    assert "not a Hopper GPU" in str(dispatch.why_not_hopper(GPU, torch.bfloat16))
    assert dispatch.architecture(GPU) == "gfx942"
    machine(name="gfx900", hip="6.4", capability=(9, 0))  # the number of a Hopper, on another make
    assert "not a Hopper GPU" in str(dispatch.why_not_hopper(GPU, torch.bfloat16))


def test_old_gpu_runs_neither(machine: Machine) -> None:
    machine(name="Tesla T4", capability=(7, 5))
    reason = "Tesla T4 is older than compute capability 8.0"
    assert dispatch.why_not_triton(GPU) == reason
    assert dispatch.why_not_hopper(GPU, torch.bfloat16) == reason


@pytest.mark.parametrize(
    ("version", "soaked"), [("3.6.0", True), ("3.60.1", True), ("3.7.1", False), ("3.61.0", False)]
)
def test_gluon_only_with_the_triton_it_was_soaked_with(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, soaked: bool
) -> None:
    monkeypatch.setattr(dispatch, "HOPPER_TRITON", ("3.6", "3.60"))
    machine(triton=version)
    assert dispatch.why_not_triton(GPU) is None
    assert dispatch.why_not_gluon(GPU, torch.bfloat16) is None  # so that it can be soaked
    reason = dispatch.why_not_hopper(GPU, torch.bfloat16)
    assert reason == (None if soaked else f"the Gluon kernels were soaked with triton 3.6 and 3.60, not with {version}")


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "triton is not installed"), ("3.5.1", "older than 3.6"), ("2.9.0", "older than 3.6")],
)
def test_triton_missing_or_old(machine: Machine, version: str | None, reason: str) -> None:
    machine(triton=version)
    assert reason in str(dispatch.why_not_triton(GPU))
    assert reason in str(dispatch.why_not_hopper(GPU, torch.bfloat16))


def test_cpu_runs_kernels_only_interpreted(machine: Machine) -> None:
    machine()
    assert "TRITON_INTERPRET=1" in str(dispatch.why_not_triton(CPU))
    machine(interpreted=True)
    assert dispatch.why_not_triton(CPU) is None
    assert dispatch.why_not_hopper(CPU, torch.bfloat16) == "Gluon kernels cannot be interpreted"


def test_other_devices_run_neither(machine: Machine) -> None:
    machine()
    assert dispatch.why_not_triton(torch.device("meta")) == "the device is meta, not CUDA"


@pytest.mark.parametrize(
    ("capability", "hip", "early"),
    [((9, 0), None, True), ((10, 0), None, True), ((12, 0), None, True), ((8, 9), None, False), ((9, 4), "6.4", False)],
)
def test_small_kernels_start_early_up_to_a_bound(
    machine: Machine, capability: tuple[int, int], hip: str | None, early: bool
) -> None:
    machine(capability=capability, hip=hip)
    assert dispatch.small_kernel_launches_early(GPU, dispatch.EARLY_ROWS) is early
    assert not dispatch.small_kernel_launches_early(GPU, dispatch.EARLY_ROWS + 1)
    assert not dispatch.small_kernel_launches_early(CPU, 1)


def test_without_triton_references_compute_and_kernels_say_what_is_missing() -> None:
    # an empty entry in sys.modules makes `import triton` fail, as if it were not installed
    script = """
import sys
sys.modules["triton"] = None
import torch
from ernie_vit.kernels.linear import linear, linear_ref
x = torch.ones(2, 3)
assert linear_ref(x, x).eq(3).all()
try:
    linear(x, x)
except RuntimeError as error:
    print(error)
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout == 'linear: triton is not installed; backend="torch" runs everywhere\n'
