"""What this machine has, and which device, precision and backend the command line takes for it."""

import platform
from collections.abc import Iterator
from importlib.metadata import version

import torch

from ernie_vit import __version__
from ernie_vit.encoder import choose_backend
from ernie_vit.kernels.dispatch import triton_version, why_not_hopper


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device that ``name`` stands for ("auto": a CUDA GPU where there is one), and why it is taken.

    Raises:
        ValueError: ``name`` is no device, or one that is not here.
    """
    lacking = why_no_gpu()
    if name == "auto":
        if lacking is not None:
            return torch.device("cpu"), lacking
        return torch.device("cuda", torch.cuda.current_device()), "the first CUDA GPU here"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda":
        if lacking is not None:
            raise ValueError(f"device: {name} cannot be used: {lacking}")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device: {name} is not here; GPUs here: {torch.cuda.device_count()}")
    return device, "as asked"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision that ``name`` stands for; "auto": bfloat16 on a GPU, float32 on a CPU, faster there."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def why_no_gpu() -> str | None:
    """None if torch can use a CUDA GPU here, else the reason why it cannot."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs only"
    return f"torch {torch.__version__} finds no CUDA GPU"


def describe_device(device: torch.device) -> str:
    """``cuda:0, NVIDIA H200`` or ``cpu``."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return str(device)


def describe_versions() -> Iterator[tuple[str, str]]:
    """Names and versions of what the encoder stands on."""
    yield "ernie-vit", __version__
    yield "Python", platform.python_version()
    yield "torch", torch.__version__
    yield "triton", triton_version() or "not installed"
    yield "transformers", version("transformers")


def describe_gpus() -> Iterator[str]:
    """A line for each GPU, or one that says why there is none."""
    lacking = why_no_gpu()
    if lacking is not None:
        yield f"none: {lacking}"
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        yield f"{index}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory:.0f} GiB"


def describe_backends() -> Iterator[tuple[str, str, str, str]]:
    """Device, precision, the backend that would run there and why; each device at its usual precision."""
    devices = [torch.device("cpu")]
    if why_no_gpu() is None:
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        dtype = choose_dtype("auto", device)
        backend, reason = choose_backend("auto", device, dtype)
        if backend == "triton":
            no_gluon = why_not_hopper(device, dtype)
            reason += f"; Gluon kernels: {'yes' if no_gluon is None else f'no, {no_gluon}'}"
        yield str(device), dtype_name(dtype), backend, reason


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
