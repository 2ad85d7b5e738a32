"""Copies of pixel rows and of the patch embedding's weight, as wide loads and TMA want them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ernie_vit.kernels.triton.grid import persistent_programs
from ernie_vit.kernels.triton.launch import Launcher, row_alignment

# Neither was tuned: with the linear behind it, a call of 1,296 rows takes 11 us on an H200.
BLOCK_ROWS = 4
PROGRAMS_PER_MULTIPROCESSOR = 16


@triton.jit
def _copy(
    x_ptr,
    out_ptr,
    block,
    rows,
    stride,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A block of rows, cast, with zeros from column K on."""
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    live = row < rows
    x_ptrs = tl.multiple_of(x_ptr + row.to(tl.int64) * stride + column, (1, ALIGN))
    x = tl.load(x_ptrs, mask=live & (column < K), other=0.0)
    out_ptrs = out_ptr + row.to(tl.int64) * PADDED + column
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=live & (column < PADDED))


@triton.jit(
    do_not_specialize=["rows", "stride_pixels", "stride_weight"],
    do_not_specialize_on_alignment=["pixels_ptr", "weight_ptr", "num_rows_ptr"],
)
def align_kernel(
    pixels_ptr,  # [rows, K], last dimension contiguous, any float dtype
    weight_ptr,  # [N, K], last dimension contiguous
    pixels_out_ptr,  # [rows, PADDED], contiguous, dtype of the weight
    weight_out_ptr,  # [N, PADDED], contiguous
    num_rows_ptr,  # [1] int32 or None
    rows,
    stride_pixels,
    stride_weight,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN_PIXELS: tl.constexpr,  # bytes that divide the address of every row
    ALIGN_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    live = rows
    if num_rows_ptr is not None:
        live = tl.minimum(tl.load(num_rows_ptr), rows)
    WEIGHT_BLOCKS: tl.constexpr = (N + BLOCK_ROWS - 1) // BLOCK_ROWS

    for block in range(tl.program_id(0), WEIGHT_BLOCKS + tl.cdiv(live, BLOCK_ROWS), tl.num_programs(0)):
        if block < WEIGHT_BLOCKS:
            _copy(
                weight_ptr, weight_out_ptr, block, N, stride_weight, K, PADDED, ALIGN_WEIGHT, BLOCK_ROWS, BLOCK_COLUMNS
            )
        else:
            _copy(
                pixels_ptr,
                pixels_out_ptr,
                block - WEIGHT_BLOCKS,
                live,
                stride_pixels,
                K,
                PADDED,
                ALIGN_PIXELS,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )


_launch = Launcher(align_kernel)


def aligned_copies(pixel_values: Tensor, weight: Tensor, num_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both matrices at the weight's dtype, with zero columns behind until a row is a multiple of 16 bytes.

    Args:
        pixel_values: ``[rows, pixels]``, rows > 0.
        weight: ``[width, pixels]``.
        num_rows: int32 ``[1]`` on the device, or None for all rows; pixel rows past it are not copied.
    """
    rows, pixels = pixel_values.shape
    width, itemsize = len(weight), weight.element_size()
    padded = -(-pixels * itemsize // 16) * 16 // itemsize
    pixels_out = torch.empty((rows, padded), dtype=weight.dtype, device=weight.device)
    weight_out = torch.empty((width, padded), dtype=weight.dtype, device=weight.device)
    blocks = -(-width // BLOCK_ROWS) + -(-rows // BLOCK_ROWS)
    _launch(
        persistent_programs(blocks, weight.device, per_multiprocessor=PROGRAMS_PER_MULTIPROCESSOR),
        weight.device,
        (pixel_values, weight, pixels_out, weight_out, num_rows, rows, pixel_values.stride(0), weight.stride(0)),
        (
            width,
            pixels,
            padded,
            row_alignment(pixel_values),
            row_alignment(weight),
            BLOCK_ROWS,
            triton.next_power_of_2(padded),
        ),
        num_warps=4,
    )
    return pixels_out, weight_out
