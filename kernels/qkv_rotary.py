"""The qkv projection of a block with q and k rotated: ``rotary(x @ weight.T + bias)``.

One function for what ``linear`` and ``apply_rotary`` compute one after the other. On Hopper, for weights whose tiles
suit, it is one kernel: q and k are rotated in the projection's epilogue, in fp32 before the only rounding, and are not
read and written once more (``8 * heads * head_dim`` bytes a row at 16 bits). Elsewhere it is the two kernels.
"""

import torch
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.linear import launch, linear_ref, runs_on_hopper
from ernie_vit.kernels.rotary import apply_rotary_ref, check_table, rotate
from ernie_vit.kernels.tiles.linear import rotary_fits


def qkv_rotary(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    *,
    num_heads: int,
    num_rows: Tensor | None = None,
) -> Tensor:
    """q, k and v of each live row, q and k rotated.

    Args:
        x: ``[rows, K]``, bf16, fp16 or fp32; the stride between rows is free.
        weight: ``[3 * num_heads * head_dim, K]``, dtype of ``x``: q's heads, k's, v's; head_dim even.
        bias: ``[3 * num_heads * head_dim]``, dtype of ``x``, or None.
        table: fp32 ``[rows, 2, head_dim // 2]``, contiguous, from ``rotary_table``.
        num_heads: of each of q, k and v.
        num_rows: int32 ``[1]``, how many rows are live; None: all. Rows past it are not written and reach no live row.

    Returns:
        ``[rows, 3, num_heads, head_dim]``, dtype of ``x``; rows past the live ones are uninitialised. The channels
        inside each head of q and k, the same for both and so without effect on ``q . k``, are in natural order, or,
        where ``leaves_paired``, in paired order: channel ``i`` of every 16 of a head's, number ``g``, is for
        ``i < 8`` the natural channel ``8 g + i`` and for the others ``head_dim / 2 + 8 g + i - 8``. v is in natural
        order.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES, device=x.device)
    rows, k = x.shape
    check_tensor("weight", weight, shape=(None, k), dtypes=(x.dtype,), device=x.device)
    n = weight.shape[0]
    if num_heads < 1 or n == 0 or n % (6 * num_heads):
        raise ValueError(f"weight: expected 3 * {num_heads} heads of an even width, got {n} rows")
    if k == 0:
        raise ValueError("weight: expected at least one column, got 0")
    if bias is not None:
        check_tensor("bias", bias, shape=(n,), dtypes=(x.dtype,), device=x.device)
    check_table(table, rows, n // (3 * num_heads), x.device)
    check_num_rows(num_rows, x.device)
    refuse_gradient("qkv_rotary", x, weight, bias, table)
    out: Tensor = torch.ops.ernie_vit.qkv_rotary.default(x, weight, bias, table, num_heads, num_rows)
    return out


def qkv_rotary_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    *,
    num_heads: int,
    num_rows: Tensor | None = None,  # noqa: ARG001  all rows are computed
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype; all channels in natural order."""
    return apply_rotary_ref(linear_ref(x, weight, bias).unflatten(1, (3, num_heads, -1)), table)


def leaves_paired(x: Tensor, weight: Tensor, num_heads: int) -> bool:
    """Whether ``qkv_rotary`` of these tensors is one kernel, and q and k leave it in paired order.

    Depends on the device, dtype, shape of the weight, alignment and strides; never on the number of rows.
    """
    n, k = weight.shape
    return rotary_fits(n, k, n // (3 * num_heads)) and runs_on_hopper(x, weight)


def natural_order(qkv: Tensor) -> Tensor:
    """A copy of what ``qkv_rotary`` returned in paired order, with the channels of q and k in natural order."""
    q_and_k, v = qkv.split([2, 1], dim=1)
    q_and_k = q_and_k.unflatten(-1, (-1, 2, 8)).transpose(-3, -2).flatten(-3)
    return torch.cat((q_and_k, v), dim=1)


torch.library.define(
    "ernie_vit::qkv_rotary",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor table, int num_heads, Tensor? num_rows) -> Tensor",
)


@torch.library.impl("ernie_vit::qkv_rotary", ["cpu", "cuda"])
def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, num_heads: int, num_rows: Tensor | None
) -> Tensor:
    n, k = weight.shape
    head_dim = n // (3 * num_heads)
    hopper = runs_on_hopper(x, weight)
    fused = hopper and rotary_fits(n, k, head_dim)
    out = launch(x, weight, bias, None, num_rows, hopper=hopper, table=table if fused else None)
    qkv = out.view(x.shape[0], 3, num_heads, head_dim)
    if not fused:
        rotate(qkv, table, num_rows)
    return qkv


@torch.library.register_fake("ernie_vit::qkv_rotary")
def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001  the output's shape does not depend on it, nor on the two below
    table: Tensor,  # noqa: ARG001
    num_heads: int,
    num_rows: Tensor | None,  # noqa: ARG001
) -> Tensor:
    return x.new_empty((x.shape[0], 3, num_heads, weight.shape[0] // (3 * num_heads)))
