"""Linear with its epilogue: ``residual + act(x @ weight.T + bias)``, where ``act`` is quick_gelu, gelu or nothing.

Replaces ``F.linear``, the activation and the residual addition, for live rows only. The output is written once: at 16
bits the eager pieces move ``4 * N`` bytes a row more for gelu or a residual, which write and read it once more, and
``14 * N`` for quick_gelu's three operations. Accumulation and epilogue in fp32, ONE rounding, at the end; the sum over
K is never split, so a row's bits depend on nothing but the row. fp16 overflows as plain PyTorch does: a result above
65,504 is infinite, and the activation of minus infinity is NaN. gelu is the exact one, by the error function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.dispatch import architecture, require_triton, why_not_hopper
from ernie_vit.kernels.tiles.linear import hopper_regimes, triton_regimes


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Linear of each live row, with bias, activation and residual.

    Args:
        x: ``[rows, K]``, bf16, fp16 or fp32; the stride between rows is free.
        weight: ``[N, K]``, dtype of ``x``; the stride between rows is free. Not what one of our kernels has just
            computed: it may be fetched while the kernels before still run.
        bias: ``[N]``, dtype of ``x``, or None.
        activation: ``"quick_gelu"`` (``x * sigmoid(1.702 x)``), ``"gelu"`` (exact, by the error function) or None.
        residual: ``[rows, N]``, dtype of ``x``, added last; the stride between rows is free.
        num_rows: int32 ``[1]``, how many rows are live; None: all. Rows past it are not written and reach no live
            row.

    Returns:
        ``[rows, N]``, dtype of ``x``; rows past the live ones are uninitialised.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    check_tensor("x", x, shape=[None, None], dtypes=FLOAT_DTYPES, device=x.device)
    rows, k = x.shape
    check_tensor("weight", weight, shape=[None, k], dtypes=[x.dtype], device=x.device)
    if 0 in weight.shape:
        raise ValueError(f"weight: expected at least one row and one column, got {list(weight.shape)}")
    n = weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, shape=[n], dtypes=[x.dtype], device=x.device)
    if activation not in (None, "quick_gelu", "gelu"):
        raise ValueError(f'activation: expected "quick_gelu", "gelu" or None, got {activation!r}')
    if residual is not None:
        check_tensor("residual", residual, shape=[rows, n], dtypes=[x.dtype], device=x.device)
    check_num_rows(num_rows, x.device)
    refuse_gradient("linear", x, weight, bias, residual)
    out: Tensor = torch.ops.ernie_vit.linear.default(x, weight, bias, activation, residual, num_rows)
    return out


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,  # noqa: ARG001  all rows are computed
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype; rounds after each step."""
    out = F.linear(x, weight, bias)
    if activation == "quick_gelu":
        out = out * torch.sigmoid(1.702 * out)
    elif activation == "gelu":
        out = F.gelu(out)
    return out if residual is None else residual + out


def _rows_aligned(dtype: torch.dtype, n: int, k: int) -> bool:
    """Whether contiguous rows of x, weight and output start at multiples of 16 bytes, as TMA asks."""
    return n * dtype.itemsize % 16 == 0 and k * dtype.itemsize % 16 == 0


def _takes_tma(matrix: Tensor | None) -> bool:
    if matrix is None:
        return True
    stride = matrix.stride(0)
    return (
        matrix.data_ptr() % 16 == 0
        and stride * matrix.itemsize % 16 == 0
        # a row repeated by expand() has no stride that a descriptor can state
        and stride >= matrix.shape[1]
    )


def runs_on_hopper(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Whether the Gluon kernel serves these tensors; depends on nothing that follows the number of rows."""
    return (
        why_not_hopper(x.device, x.dtype) is None
        and _rows_aligned(x.dtype, *weight.shape)
        and _takes_tma(x)
        and _takes_tma(weight)
        and _takes_tma(residual)
    )


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    *,
    hopper: bool,
    activation: str | None = None,
    table: Tensor | None = None,
    fresh_weight: bool = False,
) -> Tensor:
    """Allocate the output and launch a kernel on the device of ``x``, on its current stream.

    Args:
        x, weight, bias, residual, num_rows: as of ``linear``, checked.
        hopper: ``runs_on_hopper`` of the tensors: which kernel runs. Which tile, depends on the rows as well.
        activation: as of ``linear``.
        table: of a qkv projection whose epilogue rotates q and k; only with ``hopper``, where ``rotary_fits``.
        fresh_weight: the kernel before writes the weight, which must not be fetched before that has ended.
    """
    require_triton("linear", x.device)
    n, k = weight.shape
    out = torch.empty((x.shape[0], n), dtype=weight.dtype, device=x.device)
    if not x.shape[0]:
        return out
    if hopper:
        from ernie_vit.kernels.hopper.linear import launch_linear

        tile = hopper_regimes(n, k).at(x.shape[0])
        if fresh_weight:
            tile = tile.late()
        launch_linear(x, weight, bias, residual, num_rows, out, activation=activation, tile=tile, table=table)
    else:
        _launch_triton(x, weight, bias, residual, num_rows, out, activation)
    return out


def _launch_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    activation: str | None,
) -> None:
    from ernie_vit.kernels.triton.linear import launch_linear

    regimes = triton_regimes(architecture(x.device), float32=weight.dtype == torch.float32)
    tile = regimes.at(x.shape[0])
    launch_linear(x, weight, bias, residual, num_rows, out, activation=activation, tile=tile)


torch.library.define(
    "ernie_vit::linear",
    "(Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? residual, Tensor? num_rows) -> Tensor",
)


@torch.library.impl("ernie_vit::linear", ["cpu", "cuda"])
def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
) -> Tensor:
    hopper = runs_on_hopper(x, weight, residual)
    return launch(x, weight, bias, residual, num_rows, hopper=hopper, activation=activation)


@torch.library.register_fake("ernie_vit::linear")
def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001  the output's shape does not depend on it, nor on what follows
    activation: str | None,  # noqa: ARG001
    residual: Tensor | None,  # noqa: ARG001
    num_rows: Tensor | None,  # noqa: ARG001
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
