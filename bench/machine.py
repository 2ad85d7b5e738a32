"""Which machine, driver and software a run belongs to, and the GPU's clocks while it measures."""

import ctypes
import datetime
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.measure import ceilings
from bench.records import NO_GPU, Clocks, Machine

# Distributions whose version is told where they are installed.
DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "vllm",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "numpy",
)
CONDITIONS = ("driver_version", "clocks.max.sm", "clocks.mem", "power.limit", "persistence_mode", "compute_mode")
# Of NVML's interface: the SM clock, and the sensor on the die.
SM_CLOCK, DIE = 1, 0


def describe() -> Machine:
    """This machine, its ceilings measured where there is a GPU."""
    gpu = torch.cuda.is_available()
    return Machine(
        date=datetime.date.today().isoformat(),
        gpu=torch.cuda.get_device_name() if gpu else NO_GPU,
        versions=_versions(),
        commit=_output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        copy=ceilings().copy if gpu else 0.0,
        product=ceilings().product if gpu else 0.0,
        conditions=_conditions() if gpu else {"processor": platform.machine(), "threads": str(torch.get_num_threads())},
    )


class Sensors:
    """Reads the clocks of the current GPU by the driver's library, in microseconds; None where there is neither.

    Args:
        library: NVML, as ctypes loads it; default: the driver's.
    """

    def __init__(self, library: Any = None) -> None:
        self._library, self._gpu = library, ctypes.c_void_p()
        if not torch.cuda.is_available() and library is None:
            return
        try:
            self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
            self._must(self._library.nvmlInit_v2())
            self._must(self._library.nvmlDeviceGetHandleByUUID(self._uuid(), ctypes.byref(self._gpu)))
        except (OSError, AttributeError):
            self._library = None

    def read(self) -> Clocks | None:
        if self._library is None:
            return None
        sm, milliwatts, celsius = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        try:
            self._must(self._library.nvmlDeviceGetClockInfo(self._gpu, SM_CLOCK, ctypes.byref(sm)))
            self._must(self._library.nvmlDeviceGetPowerUsage(self._gpu, ctypes.byref(milliwatts)))
            self._must(self._library.nvmlDeviceGetTemperature(self._gpu, DIE, ctypes.byref(celsius)))
        except OSError:
            self._library = None  # it will not know the next time either
            return None
        return Clocks(sm=float(sm.value), power=milliwatts.value / 1e3, temperature=float(celsius.value))

    @staticmethod
    def _uuid() -> bytes:
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()

    @staticmethod
    def _must(status: int) -> None:
        if status != 0:
            raise OSError(f"NVML: status {status}")


def middle(clocks: Iterable[Clocks | None]) -> Clocks | None:
    """The median of each reading; None if nothing was read."""
    read = [clock for clock in clocks if clock is not None]
    if not read:
        return None
    return Clocks(*(median(getattr(clock, name) for clock in read) for name in ("sm", "power", "temperature")))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    found |= {name: _version(name) for name in DISTRIBUTIONS}
    return {name: version for name, version in found.items() if version is not None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _conditions() -> dict[str, str]:
    values = _output("nvidia-smi", "--id=0", f"--query-gpu={','.join(CONDITIONS)}", "--format=csv,noheader").split(", ")
    return dict(zip(CONDITIONS, values, strict=True)) if len(values) == len(CONDITIONS) else {}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
