"""Which kernels serve a device: Gluon on Hopper, plain Triton elsewhere, and the reason for it."""

import os
from functools import cache

import torch

# Gluon is experimental: its kernels are used with the Triton releases that they were soaked with on a GPU.
HOPPER_TRITON = ("3.6", "3.8")
OLDEST_TRITON = (3, 6)

# Rows up to which the norms and the rotation start early. On an H200 a pass was faster so at 1,296 rows, and not at
# 3,996 and above, where programs that wait take room from the linear that still runs.
EARLY_ROWS = 2560


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def triton_version() -> str | None:
    """The installed Triton's version, or None without Triton."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


@cache
def why_not_triton(device: torch.device) -> str | None:
    """None if the Triton kernels run on ``device``, else the reason why they do not."""
    version = triton_version()
    if version is None:
        return "triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if device.type == "cpu":
        return None if interpreting() else "the device is a CPU (TRITON_INTERPRET=1 interprets the kernels there)"
    if device.type != "cuda":
        return f"the device is {device.type}, not CUDA"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


@cache
def why_not_gluon(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the Gluon kernels can run on ``device`` at ``dtype``, soaked or not, else the reason why they cannot."""
    reason = why_not_triton(device)
    if reason is not None:
        return reason
    if device.type == "cpu":
        return "Gluon kernels cannot be interpreted"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the Gluon kernels take bfloat16 and float16, not {dtype}"
    return None


@cache
def why_not_hopper(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the Gluon kernels serve ``device`` at ``dtype``, else the reason why plain Triton does.

    Depends on nothing else, so that one model gets one backend, and with it one set of bits, for every input.
    """
    reason = why_not_gluon(device, dtype)
    if reason is None and not soaked_triton():
        return f"the Gluon kernels were soaked with triton {' and '.join(HOPPER_TRITON)}, not with {triton_version()}"
    return reason


def require_triton(op: str, device: torch.device) -> None:
    """Refuse a device on which the Triton kernels do not run.

    Raises:
        RuntimeError: the reason, and the backend that runs everywhere.
    """
    reason = why_not_triton(device)
    if reason is not None:
        raise RuntimeError(f'{op}: {reason}; backend="torch" runs everywhere')


@cache
def architecture(device: torch.device) -> str:
    """The key of a device in the tile tables: ``"sm_90"``, ``"gfx942"``; ``"cpu"`` where kernels are interpreted."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def soaked_triton() -> bool:
    """Whether the installed Triton is one that the Gluon kernels were soaked with."""
    return ".".join(str(triton_version()).split(".")[:2]) in HOPPER_TRITON


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels on ``device`` may start before the kernel before them has ended, as Hopper and newer can.

    Such a kernel (programmatic dependent launch) lets the next one start at once, and waits for the one before
    (``gdc_wait``) before it reads or writes what another kernel writes or reads. Every program waits: a kernel that
    has waited for this one has then waited for all before it. A kernel that does not start early begins when all
    before it have ended.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def small_kernel_launches_early(device: torch.device, rows: int) -> bool:
    """Whether the norms and the rotation start early on ``device``, in a call with room for ``rows`` rows."""
    return rows <= EARLY_ROWS and launches_early(device)
