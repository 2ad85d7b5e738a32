"""Rotary position embedding in two dimensions: a table of cosines and sines, and the rotation of q and k.

A row at ``(y, x)`` of its frame has the angles ``[y * f, x * f]`` with ``f_i = theta ** (-2i / (head_dim / 2))``,
``i < head_dim / 4``. Component ``d`` of a head pairs with ``d + head_dim / 2`` and the pair turns by angle ``d``:

    first' = first * cos - second * sin        second' = second * cos + first * sin

The table is made once a forward pass; it replaces the position grids, outer products, cosines and sines that
PyTorch makes image by image. The rotation replaces splits, casts, ``rotate_half`` and additions (five passes over
q and k in plain PyTorch) by one pass in place: ``8 * heads * head_dim`` bytes a row at 16 bits. Angles and
arithmetic are float32 whatever the dtype of q and k; one rounding, at the end.
"""

from functools import cache

import torch
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.dispatch import require_triton


def rotary_table(
    cu_seqlens: Tensor, frame_sizes: Tensor, *, num_rows: int, head_dim: int, theta: float = 10000.0
) -> Tensor:
    """Cosines and sines of each row's angles.

    Args:
        cu_seqlens: int32 ``[max_sequences + 1]``, the first row of each frame and the end of the last; padded by
            repeating the last value, which is the number of live rows. Frames may be empty.
        frame_sizes: int32 ``[max_sequences, 2]``, contiguous: height and width of each frame in patches, both
            even. Rows of a frame come 2x2 window by window, row-major, and row-major inside.
        num_rows: rows of the table, at least the live ones.
        head_dim: a multiple of 4.
        theta: base of the frequencies.

    Returns:
        fp32 ``[num_rows, 2, head_dim // 2]``: cosines, sines. Rows past the live ones are uninitialised.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: Triton does not run on the device.
    """
    check_tensor("cu_seqlens", cu_seqlens, shape=[None], dtypes=[torch.int32], device=cu_seqlens.device)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens: expected at least 1 value, got 0")
    sequences = cu_seqlens.shape[0] - 1
    check_tensor("frame_sizes", frame_sizes, shape=[sequences, 2], dtypes=[torch.int32], device=cu_seqlens.device)
    if not frame_sizes.is_contiguous():
        raise ValueError(f"frame_sizes: expected a contiguous tensor, got strides {frame_sizes.stride()}")
    if num_rows < 0:
        raise ValueError(f"num_rows: expected at least 0, got {num_rows}")
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f"head_dim: expected a multiple of 4, got {head_dim}")
    table: Tensor = torch.ops.ernie_vit.rotary_table.default(cu_seqlens, frame_sizes, num_rows, head_dim, theta)
    return table


def apply_rotary(qkv: Tensor, table: Tensor, *, num_rows: Tensor | None = None) -> Tensor:
    """Rotate q and k of each live row, in place; v is not touched.

    Args:
        qkv: ``[rows, 3, heads, head_dim]``, bf16, fp16 or fp32; the stride between rows is free, the rest is
            contiguous.
        table: fp32 ``[rows, 2, head_dim // 2]``, contiguous, from ``rotary_table``.
        num_rows: int32 ``[1]``, how many rows are live; None: all. Rows past it are not read and not written.

    Returns:
        ``qkv``.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    check_tensor("qkv", qkv, shape=[None, 3, None, None], dtypes=FLOAT_DTYPES, device=qkv.device)
    rows, _, heads, head_dim = qkv.shape
    if head_dim % 2:
        raise ValueError(f"qkv: expected an even head_dim, got {head_dim}")
    if rows and qkv.stride()[1:] != (heads * head_dim, head_dim, 1):
        raise ValueError(
            f"qkv: expected strides {[heads * head_dim, head_dim, 1]} inside a row, got {list(qkv.stride()[1:])}"
        )
    if rows > 1 and qkv.stride(0) < 3 * heads * head_dim:
        raise ValueError(f"qkv: expected rows that do not overlap, got a row stride of {qkv.stride(0)}")
    check_table(table, rows, head_dim, qkv.device)
    check_num_rows(num_rows, qkv.device)
    refuse_gradient("apply_rotary", qkv, table)
    torch.ops.ernie_vit.apply_rotary.default(qkv, table, num_rows)
    return qkv


def check_table(table: Tensor, rows: int, head_dim: int, device: torch.device) -> None:
    """Check a table for ``rows`` rows of heads of ``head_dim``."""
    check_tensor("table", table, shape=(rows, 2, head_dim // 2), dtypes=(torch.float32,), device=device)
    if not table.is_contiguous():
        raise ValueError(f"table: expected a contiguous tensor, got strides {list(table.stride())}")


def rotary_table_ref(
    cu_seqlens: Tensor, frame_sizes: Tensor, *, num_rows: int, head_dim: int, theta: float = 10000.0
) -> Tensor:
    """The same in plain PyTorch, on any device. Rows past the live ones are finite and mean nothing."""
    positions = row_positions(cu_seqlens, frame_sizes, num_rows)
    frequencies = inverse_frequencies(head_dim, theta, cu_seqlens.device)
    angles = (positions.unsqueeze(-1).float() * frequencies).flatten(1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def apply_rotary_ref(
    qkv: Tensor,
    table: Tensor,
    *,
    num_rows: Tensor | None = None,  # noqa: ARG001  all rows are computed
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype; returns a new tensor."""
    q_and_k, v = qkv.split([2, 1], dim=1)
    compute = torch.promote_types(qkv.dtype, torch.float32)
    cos, sin = table.to(compute)[:, :, None, None].unbind(1)  # [rows, 1, 1, head_dim // 2]
    first, second = q_and_k.to(compute).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(qkv.dtype), v), dim=1)


def row_positions(cu_seqlens: Tensor, frame_sizes: Tensor, num_rows: int) -> Tensor:
    """Position ``(y, x)`` of each row in its frame, int64 ``[num_rows, 2]``; arguments as of ``rotary_table``."""
    rows = torch.arange(num_rows, device=cu_seqlens.device)
    frame = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)  # frames that end at or before the row
    frame = frame.clamp_max(frame_sizes.shape[0] - 1)  # rows past the live ones
    window_columns = frame_sizes[frame, 1].long().clamp_min(2) // 2  # a padded frame has no width
    row_in_frame = rows - cu_seqlens[frame]
    window, row_in_window = row_in_frame // 4, row_in_frame % 4
    y = window // window_columns * 2 + row_in_window // 2
    x = window % window_columns * 2 + row_in_window % 2
    return torch.stack((y, x), dim=-1)


def inverse_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """``theta ** (-2i / (head_dim / 2))`` for ``i < head_dim / 4``, fp32; on a CPU the bits of transformers."""
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    return 1.0 / theta**exponents


def rotate(qkv: Tensor, table: Tensor, num_rows: Tensor | None) -> None:
    """Rotate q and k of the live rows in place; checked arguments."""
    from ernie_vit.kernels.triton.rotary import launch_apply

    if qkv.numel():
        launch_apply(qkv, table, num_rows)


@cache
def _frequency_constants(head_dim: int, theta: float) -> tuple[float, ...]:
    return tuple(inverse_frequencies(head_dim, theta, torch.device("cpu")).tolist())


torch.library.define(
    "ernie_vit::rotary_table",
    "(Tensor cu_seqlens, Tensor frame_sizes, SymInt num_rows, int head_dim, float theta) -> Tensor",
)
torch.library.define("ernie_vit::apply_rotary", "(Tensor(a!) qkv, Tensor table, Tensor? num_rows) -> ()")


@torch.library.impl("ernie_vit::rotary_table", ["cpu", "cuda"])
def _run_table(cu_seqlens: Tensor, frame_sizes: Tensor, num_rows: int, head_dim: int, theta: float) -> Tensor:
    require_triton("rotary_table", cu_seqlens.device)
    from ernie_vit.kernels.triton.rotary import launch_table

    table = torch.empty((num_rows, 2, head_dim // 2), dtype=torch.float32, device=cu_seqlens.device)
    if num_rows:
        launch_table(cu_seqlens, frame_sizes, table, _frequency_constants(head_dim, theta))
    return table


@torch.library.impl("ernie_vit::apply_rotary", ["cpu", "cuda"])
def _run_apply(qkv: Tensor, table: Tensor, num_rows: Tensor | None) -> None:
    require_triton("apply_rotary", qkv.device)
    rotate(qkv, table, num_rows)


@torch.library.register_fake("ernie_vit::rotary_table")
def _fake_table(
    cu_seqlens: Tensor,
    frame_sizes: Tensor,  # noqa: ARG001
    num_rows: int,
    head_dim: int,
    theta: float,  # noqa: ARG001
) -> Tensor:
    return cu_seqlens.new_empty((num_rows, 2, head_dim // 2), dtype=torch.float32)


@torch.library.register_fake("ernie_vit::apply_rotary")
def _fake_apply(qkv: Tensor, table: Tensor, num_rows: Tensor | None) -> None:  # noqa: ARG001
    return None
