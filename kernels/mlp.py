"""The MLP of a block: ``residual + fc2(quick_gelu(fc1(x)))``.

Two linears with their epilogues, which replace two ``F.linear``, the activation and the addition; the hidden rows are
rounded once, after the activation. Not an operator of its own: each linear is one, and the hidden rows have to pass
through memory between them.
"""

from torch import Tensor

from ernie_vit.kernels.linear import linear, linear_ref


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
        TypeError, ValueError, RuntimeError: as ``linear``.
    """
    hidden = linear(x, fc1_weight, fc1_bias, activation="quick_gelu", num_rows=num_rows)
    return linear(hidden, fc2_weight, fc2_bias, residual=residual, num_rows=num_rows)


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
