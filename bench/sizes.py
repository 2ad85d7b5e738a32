"""The inputs that every benchmark uses: frames of images, in patches of 14 pixels."""

from typing import Any

import torch

# rows -> frames (height, width): square images of 224, 336 and 504 pixels, then 672 x 504, 1036 x 756, 1344 x 1008,
# eight of 504 and 2044 x 1540
FRAMES = {
    256: [(16, 16)],
    576: [(24, 24)],
    1296: [(36, 36)],
    1728: [(36, 48)],
    3996: [(54, 74)],
    6912: [(72, 96)],
    10368: [(36, 36)] * 8,
    16060: [(110, 146)],
}
QUICK_SIZES = ("1296",)
HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, PIXELS, DEPTH = 1280, 16, 80, 5120, 588, 32
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU: for tests of the benchmark itself


def live(rows: int) -> torch.Tensor:
    """A count of live rows, as the kernels read it from the device."""
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def drawn(seed: int, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    """Arguments of ``torch.randn`` for a kernel's inputs.

    The generator is not PyTorch's own, which a capture that fails leaves unusable.
    """
    return {"device": DEVICE, "dtype": dtype, "generator": torch.Generator(DEVICE).manual_seed(seed)}
