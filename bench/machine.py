"""Which machine, driver and software a run belongs to."""

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from bench.measure import ceilings
from bench.records import NO_GPU, Machine

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
