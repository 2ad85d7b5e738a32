"""Layer norm over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

Replaces ``F.layer_norm``, and a gather of rows behind it, for live rows only. Reads and writes each live row once:
``4 * width`` bytes a row at 16 bits. Statistics in float32 in two passes over registers (the mean, then the mean square
of the differences, so that a mean far from zero costs no digits); one rounding, at the end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.dispatch import require_triton

MAX_WIDTH = 16384  # a program holds a whole row in registers


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    num_rows: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Layer norm of each live row, or of the rows of ``x`` that ``index`` names.

    Args:
        x: ``[rows, width]``, bf16, fp16 or fp32; the stride between rows is free.
        weight: ``[width]``, dtype of ``x``. Not what one of our kernels has just computed: weight and bias may be
            fetched while the kernels before still run.
        bias: ``[width]``, dtype of ``x``.
        eps: added to the variance; it belongs to the config of each norm (1e-6 and 1e-5 are both in use).
        num_rows: int32 ``[1]``, how many rows of the result are live; None: all. Those past it do not count, whatever
            ``x`` holds there, and are not written.
        index: int32 ``[rows of the result]``, for each the row of ``x`` that it is the norm of, each below the rows of
            ``x`` (not checked: it is data); those past the live ones are not read. None: the same row.

    Returns:
        ``[rows, width]``, dtype of ``x``, with ``index`` as many rows as it has; rows past the live ones are
        uninitialised.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    check_tensor("x", x, shape=[None, None], dtypes=FLOAT_DTYPES, device=x.device)
    width = x.shape[1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"x: expected 1 to {MAX_WIDTH} columns, got {width}")
    check_tensor("weight", weight, shape=[width], dtypes=[x.dtype], device=x.device)
    check_tensor("bias", bias, shape=[width], dtypes=[x.dtype], device=x.device)
    check_num_rows(num_rows, x.device)
    if index is not None:
        check_tensor("index", index, shape=[None], dtypes=[torch.int32], device=x.device)
    refuse_gradient("layer_norm", x, weight, bias)
    out: Tensor = torch.ops.ernie_vit.layer_norm.default(x, weight, bias, eps, num_rows, index)
    return out


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    num_rows: Tensor | None = None,  # noqa: ARG001  all rows are computed
    index: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype."""
    normed = F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return normed if index is None else normed.index_select(0, index)


torch.library.define(
    "ernie_vit::layer_norm",
    "(Tensor x, Tensor weight, Tensor bias, float eps, Tensor? num_rows, Tensor? index=None) -> Tensor",
)


@torch.library.impl("ernie_vit::layer_norm", ["cpu", "cuda"])
def _run(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, num_rows: Tensor | None, index: Tensor | None = None
) -> Tensor:
    require_triton("layer_norm", x.device)
    from ernie_vit.kernels.triton.layer_norm import launch

    rows = x.shape[0] if index is None else index.shape[0]
    out = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    if rows:
        launch(x, weight, bias, out, num_rows, eps, index)
    return out


@torch.library.register_fake("ernie_vit::layer_norm")
def _fake(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001  the output's shape depends on x and index alone
    bias: Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    num_rows: Tensor | None,  # noqa: ARG001
    index: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0] if index is None else index.shape[0], x.shape[1]))
