"""The MLP of a block: ``residual + fc2(quick_gelu(fc1(x)))``.

Two linears with their epilogues, which replace two ``F.linear``, the activation and the addition; the hidden rows are
rounded once, after the activation. Not an operator of its own: each linear is one, and the hidden rows have to pass
through memory between them. In fp16 a hidden number above 65,504 is infinite, as in plain PyTorch; bf16 holds it.
"""

import torch
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.linear import linear_ref


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """The MLP of each live row.

    Args:
        x: ``[rows, width]``, bf16, fp16 or fp32; the stride between rows is free.
        fc1_weight: ``[hidden, width]``, dtype of ``x`` as all.
        fc1_bias: ``[hidden]`` or None.
        fc2_weight: ``[out, hidden]``.
        fc2_bias: ``[out]`` or None.
        residual: ``[rows, out]``, added last.
        num_rows: int32 ``[1]``, how many rows are live; None: all.

    Returns:
        ``[rows, out]``, dtype of ``x``; rows past the live ones are uninitialised.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES, device=x.device)
    rows, width = x.shape
    dtypes, device = (x.dtype,), x.device
    check_tensor("fc1_weight", fc1_weight, shape=(None, width), dtypes=dtypes, device=device)
    hidden_width = fc1_weight.shape[0]
    check_tensor("fc2_weight", fc2_weight, shape=(None, hidden_width), dtypes=dtypes, device=device)
    out_width = fc2_weight.shape[0]
    for name, weight in (("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
        if 0 in weight.shape:
            raise ValueError(f"{name}: expected at least one row and one column, got {list(weight.shape)}")
    for name, bias, size in (("fc1_bias", fc1_bias, hidden_width), ("fc2_bias", fc2_bias, out_width)):
        if bias is not None:
            check_tensor(name, bias, shape=(size,), dtypes=dtypes, device=device)
    if residual is not None:
        check_tensor("residual", residual, shape=(rows, out_width), dtypes=dtypes, device=device)
    check_num_rows(num_rows, device)
    refuse_gradient("mlp", x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual)
    linear = torch.ops.ernie_vit.linear.default
    hidden = linear(x, fc1_weight, fc1_bias, "quick_gelu", None, num_rows)
    out: Tensor = linear(hidden, fc2_weight, fc2_bias, None, residual, num_rows)
    return out


def mlp_ref(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype."""
    hidden = linear_ref(x, fc1_weight, fc1_bias, activation="quick_gelu", num_rows=num_rows)
    return linear_ref(hidden, fc2_weight, fc2_bias, residual=residual, num_rows=num_rows)
