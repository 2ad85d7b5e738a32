"""Root mean square norm over the last dimension: ``weight * x / sqrt(mean(x^2) + eps)``.

Replaces the two operations of PyTorch that ``rms_norm_ref`` shows, for live rows only. Reads and writes each live row
once: ``4 * width`` bytes a row at 16 bits. The mean in float32; one rounding, at the end (plain PyTorch rounds before
the weight too).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.dispatch import require_triton
from ernie_vit.kernels.layer_norm import MAX_WIDTH


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, num_rows: Tensor | None = None) -> Tensor:
    """Root mean square norm of each live row.

    Args:
        x: ``[rows, width]``, bf16, fp16 or fp32; the stride between rows is free.
        weight: ``[width]``, dtype of ``x``.
        eps: added to the mean square.
        num_rows: int32 ``[1]``, how many rows are live; None: all. Rows past it are not read and not written.

    Returns:
        ``[rows, width]``, dtype of ``x``; rows past the live ones are uninitialised.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    check_tensor("x", x, shape=[None, None], dtypes=FLOAT_DTYPES, device=x.device)
    width = x.shape[1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"x: expected 1 to {MAX_WIDTH} columns, got {width}")
    check_tensor("weight", weight, shape=[width], dtypes=[x.dtype], device=x.device)
    check_num_rows(num_rows, x.device)
    refuse_gradient("rms_norm", x, weight)
    out: Tensor = torch.ops.ernie_vit.rms_norm.default(x, weight, eps, num_rows)
    return out


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    num_rows: Tensor | None = None,  # noqa: ARG001  all rows are computed
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype; rounds before the weight too."""
    return weight * F.rms_norm(x, (x.shape[-1],), eps=eps)  # counts in float32 where x has 16 bits


torch.library.define("ernie_vit::rms_norm", "(Tensor x, Tensor weight, float eps, Tensor? num_rows) -> Tensor")


@torch.library.impl("ernie_vit::rms_norm", ["cpu", "cuda"])
def _run(x: Tensor, weight: Tensor, eps: float, num_rows: Tensor | None) -> Tensor:
    require_triton("rms_norm", x.device)
    from ernie_vit.kernels.triton.layer_norm import launch

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        launch(x, weight, None, out, num_rows, eps)
    return out


@torch.library.register_fake("ernie_vit::rms_norm")
def _fake(x: Tensor, weight: Tensor, eps: float, num_rows: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)
