"""Full attention inside each sequence of a batch of rows.

For a sequence of rows ``i, j`` and each head: ``out_i = sum_j softmax_j(scale * q_i . k_j) v_j``. One kernel
stands for the loop over sequences of ``F.scaled_dot_product_attention`` with its copies to and from ``[heads,
rows, head_dim]``: it reads q, k and v where the projection left them, writes each output once, and keeps the
scores in registers.

Sequences are row ranges between neighbouring entries of ``cu_seqlens``, which stays on the device. A forward
pass lays out the work once, in a list of (first query row and the one after the last, the same of the sequence,
head), longest sequences first and the tiles of one head next to each other, so that its keys and values stay in the
L2 cache; items of a last round that would leave processors idle are cut. All blocks of the tower use the one list.

Rounding: products and softmax in float32; the weights ``exp(s - max)`` are rounded to the input's dtype before
they meet v, their sum is taken unrounded; one rounding of the result. A row's bits depend on its own sequence
alone: where its key blocks start follows from the sequence, and they are equally long in every tile of a backend.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.kernels import dispatch
from ernie_vit.kernels.checks import FLOAT_DTYPES, check_tensor, refuse_gradient
from ernie_vit.kernels.tiles.attention import (
    PIECE_ROWS,
    HopperTile,
    PlainTile,
    attention_tile,
    items_at_once,
    plain_tile,
    work_list_shape,
)

HEAD_DIMS = range(16, 129, 8)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    work_list: Tensor | None = None,
) -> Tensor:
    """Attention inside each sequence, ``[rows, heads, head_dim]`` (contiguous).

    Args:
        q, k, v: ``[rows, heads, head_dim]``, bfloat16, float16 or float32; head_dim a multiple of 8 from 16 to 128.
            The last dimension is contiguous, other strides are free: slices of one fused projection are read in place.
        cu_seqlens: int32 ``[sequences + 1]`` on the same device: 0, then each sequence's end. Equal neighbours are an
            empty sequence. Rows past the last entry are not written, and what they hold reaches no result.
        max_seqlen: upper bound of the sequences' lengths; helps to choose the tile, never decides what is computed.
        scale: factor of the scores, positive; default ``head_dim ** -0.5``.
        work_list: ``attention_work_list`` of the same arguments, for use by many calls; default: made by this call.

    Raises:
        TypeError: a dtype or the type of ``max_seqlen``.
        ValueError: shapes, devices, strides, ``scale``; offsets that do not start at 0, decrease or pass ``rows`` or
            ``max_seqlen``, where they lie on the CPU; a work list made for other sizes.
        RuntimeError: a gradient would be needed, or Triton does not run on the device.
    """
    _check_inputs(q, k, v, max_seqlen, scale)
    _check_cu_seqlens(cu_seqlens, q.device)
    if work_list is not None:
        check_tensor("work_list", work_list, shape=[None, 5], dtypes=[torch.int32], device=q.device)
    refuse_gradient("attention", q, k, v)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.ernie_vit.attention(q, k, v, cu_seqlens, max_seqlen, scale, work_list)
    return out


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    work_list: Tensor | None = None,
) -> Tensor:
    """``attention`` in plain PyTorch: differentiable, any device, exact for float64; rows outside of sequences are 0.

    ``cu_seqlens`` is read on the host and may lie on the CPU. ``work_list`` is accepted and ignored.
    """
    del work_list
    _check_inputs(q, k, v, max_seqlen, scale, dtypes=(*FLOAT_DTYPES, torch.float64))
    offsets = cu_seqlens.tolist()
    _check_offsets(offsets, q.shape[0], max_seqlen)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, rows, head_dim]
    outputs = [
        F.scaled_dot_product_attention(q[:, :, first:end], k[:, :, first:end], v[:, :, first:end], scale=scale)
        for first, end in pairwise(offsets)
        if end > first
    ]
    outputs.append(q.new_zeros(q[:, :, offsets[-1] :].shape))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def attention_work_list(
    cu_seqlens: Tensor, *, num_rows: int, max_seqlen: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """Lay out the work of ``attention`` on q, k, v ``[num_rows, num_heads, head_dim]`` of ``dtype``, on the device.

    Returns:
        int32 ``[1 + items, 5]``: row 0 holds the count of items that ``cu_seqlens`` has, the next ``count`` rows one
        item each: first query row and the one after the last, first row of its sequence and the one after the last,
        head. The shape follows from the host integers, the shape of ``cu_seqlens`` and the device; rows past the count
        are not written.

    Raises:
        TypeError, ValueError: as ``attention``.
    """
    _check_sizes(max_seqlen, head_dim, dtype)
    _check_cu_seqlens(cu_seqlens, cu_seqlens.device)
    work_list: Tensor = torch.ops.ernie_vit.attention_work_list(
        cu_seqlens, num_rows, max_seqlen, num_heads, head_dim, dtype
    )
    return work_list


def attention_work_list_ref(
    cu_seqlens: Tensor, *, num_rows: int, max_seqlen: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """``attention_work_list`` in plain Python; rows past the count are zero."""
    _check_sizes(max_seqlen, head_dim, dtype)
    offsets = cu_seqlens.tolist()
    _check_offsets(offsets, num_rows, max_seqlen)
    tile = _tile(cu_seqlens, dtype, head_dim, num_rows, max_seqlen)
    at_once = items_at_once(tile, cu_seqlens.device)
    items = items_ref(offsets, num_heads, tile.rows, at_once)
    shape = work_list_shape(num_rows, len(offsets) - 1, num_heads, tile.rows, at_once)
    work_list = torch.zeros(shape, dtype=torch.int32, device=cu_seqlens.device)
    work_list[: 1 + len(items)] = torch.tensor([(len(items), 0, 0, 0, 0), *items], dtype=torch.int32)
    return work_list


def items_ref(
    offsets: Sequence[int], num_heads: int, tile_rows: int, at_once: int
) -> list[tuple[int, int, int, int, int]]:
    """The items of a work list. ``at_once`` of them make a round; those of the last are cut if all pieces fit in it."""
    longest_first = sorted(pairwise(offsets), key=lambda sequence: sequence[0] - sequence[1])
    items = [
        (row, min(row + tile_rows, end), first, end, head)
        for first, end in longest_first
        for head in range(num_heads)
        for row in range(first, end, tile_rows)
    ]
    last = len(items) % at_once
    whole = len(items) - last
    most = -(-tile_rows // PIECE_ROWS)
    pieces = min(most, at_once // max(last, 1))
    rows = -(-most // pieces) * PIECE_ROWS
    cut = [
        (row + piece * rows, min(row + (piece + 1) * rows, row_end), first, end, head)
        for row, row_end, first, end, head in items[whole:]
        for piece in range(pieces)
    ]
    return [*items[:whole], *cut]


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen: int,
    scale: float | None,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
) -> None:
    check_tensor("q", q, shape=[None, None, None], dtypes=dtypes, device=q.device)
    check_tensor("k", k, shape=q.shape, dtypes=[q.dtype], device=q.device)
    check_tensor("v", v, shape=q.shape, dtypes=[q.dtype], device=q.device)
    _check_sizes(max_seqlen, q.shape[2], q.dtype, dtypes)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")


def _check_sizes(
    max_seqlen: int, head_dim: int, dtype: torch.dtype, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES
) -> None:
    if not isinstance(max_seqlen, int):
        raise TypeError(f"max_seqlen: expected an int, got {type(max_seqlen).__name__}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected a multiple of 8 from 16 to 128, got {head_dim}")
    if dtype not in dtypes:
        raise TypeError(f"dtype: expected {' or '.join(map(str, dtypes))}, got {dtype}")


def _check_cu_seqlens(cu_seqlens: Tensor, device: torch.device) -> None:
    check_tensor("cu_seqlens", cu_seqlens, shape=[None], dtypes=[torch.int32], device=device)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens: expected at least 1 value, got 0")


def _check_offsets(offsets: Sequence[int], num_rows: int, max_seqlen: int) -> None:
    if not offsets or offsets[0] != 0 or any(end < first for first, end in pairwise(offsets)):
        raise ValueError(f"cu_seqlens: expected offsets that start at 0 and do not decrease, got {offsets}")
    if offsets[-1] > num_rows:
        raise ValueError(f"cu_seqlens: expected offsets up to the {num_rows} rows, got {offsets}")
    longest = max((end - first for first, end in pairwise(offsets)), default=0)
    if longest > max_seqlen:
        raise ValueError(f"max_seqlen: expected at least the longest sequence's {longest} rows, got {max_seqlen}")


def _tile(
    cu_seqlens: Tensor, dtype: torch.dtype, head_dim: int, num_rows: int, max_seqlen: int
) -> PlainTile | HopperTile:
    """The tile by what the host knows. A work list's maker and its user ask here, so that they agree on it."""
    num_sequences = cu_seqlens.shape[0] - 1
    return attention_tile(
        cu_seqlens.device, dtype, head_dim, num_rows=num_rows, max_seqlen=max_seqlen, num_sequences=num_sequences
    )


def _on_device(device: torch.device) -> AbstractContextManager[None]:
    """The context to launch in, with ``device`` the current one."""
    dispatch.require_triton("attention", device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


torch.library.define(
    "ernie_vit::attention_work_list",
    "(Tensor cu_seqlens, int num_rows, int max_seqlen, int num_heads, int head_dim, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "ernie_vit::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen, float scale, Tensor? work_list) -> Tensor",
)


@torch.library.impl("ernie_vit::attention_work_list", ["cpu", "cuda"])
def _run_work_list(
    cu_seqlens: Tensor, num_rows: int, max_seqlen: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    if cu_seqlens.device.type == "cpu":
        _check_offsets(cu_seqlens.tolist(), num_rows, max_seqlen)
    tile = _tile(cu_seqlens, dtype, head_dim, num_rows, max_seqlen)
    with _on_device(cu_seqlens.device):
        from ernie_vit.kernels.triton.work_list import make_work_list

        return make_work_list(cu_seqlens, tile, num_rows=num_rows, num_heads=num_heads)


@torch.library.register_fake("ernie_vit::attention_work_list")
def _fake_work_list(
    cu_seqlens: Tensor, num_rows: int, max_seqlen: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    tile = _tile(cu_seqlens, dtype, head_dim, num_rows, max_seqlen)
    at_once = items_at_once(tile, cu_seqlens.device)
    return cu_seqlens.new_empty(work_list_shape(num_rows, cu_seqlens.shape[0] - 1, num_heads, tile.rows, at_once))


@torch.library.impl("ernie_vit::attention", ["cpu", "cuda"])
def _run(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, work_list: Tensor | None
) -> Tensor:
    rows, heads, head_dim = q.shape
    if q.device.type == "cpu":
        _check_offsets(cu_seqlens.tolist(), rows, max_seqlen)
    tile = _tile(cu_seqlens, q.dtype, head_dim, rows, max_seqlen)
    shape = work_list_shape(rows, cu_seqlens.shape[0] - 1, heads, tile.rows, items_at_once(tile, q.device))
    if work_list is not None and tuple(work_list.shape) != shape:
        raise ValueError(
            f"work_list: expected shape {list(shape)} for these rows, sequences and heads, got {list(work_list.shape)}"
        )

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with _on_device(q.device):
        from ernie_vit.kernels.triton.work_list import make_work_list

        if isinstance(tile, HopperTile):
            from ernie_vit.kernels.hopper.attention import launch_attention, readable

            if all(readable(x) for x in (q, k, v)):
                if work_list is None:
                    work_list = make_work_list(cu_seqlens, tile, num_rows=rows, num_heads=heads)
                launch_attention(q, k, v, out, work_list, scale=scale, tile=tile)
                return out
            # TMA cannot describe these strides. Plain Triton can, but its items have another height.
            tile, work_list = plain_tile(dispatch.architecture(q.device), q.dtype), None

        from ernie_vit.kernels.triton.attention import launch_attention as launch_plain_attention

        if work_list is None:
            work_list = make_work_list(cu_seqlens, tile, num_rows=rows, num_heads=heads)
        launch_plain_attention(q, k, v, out, work_list, scale=scale, tile=tile)
    return out


@torch.library.register_fake("ernie_vit::attention")
def _fake(
    q: Tensor,
    k: Tensor,  # noqa: ARG001  the shape function needs q alone
    v: Tensor,  # noqa: ARG001
    cu_seqlens: Tensor,  # noqa: ARG001
    max_seqlen: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    work_list: Tensor | None,  # noqa: ARG001
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
