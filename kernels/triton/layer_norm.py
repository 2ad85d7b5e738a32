"""The Triton kernel of ``ernie_vit.kernels.layer_norm``, and its launcher."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ernie_vit.kernels.triton.grid import persistent_programs

PROGRAMS_PER_MULTIPROCESSOR = 16


@triton.jit(
    do_not_specialize=["x_row_units", "rows"],
    do_not_specialize_on_alignment=["num_rows_ptr"],
)
def _layer_norm_kernel(
    x_ptr,  # [rows, WIDTH], rows UNIT * x_row_units elements apart
    weight_ptr,  # [WIDTH]
    bias_ptr,  # [WIDTH]
    out_ptr,  # [rows, WIDTH], contiguous
    num_rows_ptr,  # [1] int32, or None
    x_row_units,
    rows,
    eps,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,  # a factor of the row stride, stated so that loads of this many elements are aligned
    BLOCK: tl.constexpr,
):
    live = rows if num_rows_ptr is None else tl.minimum(tl.load(num_rows_ptr), rows)

    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH

    for row in range(tl.program_id(0), live, tl.num_programs(0)):
        x_row = x_ptr + tl.cast(row, tl.int64) * x_row_units * UNIT
        x = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
        # Again for each row, from L1: kept in registers over the loop they spill.
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)

        mean = tl.sum(x, axis=0) / WIDTH
        centred = tl.where(mask, x - mean, 0.0)  # padded columns count neither here nor in the mean
        variance = tl.sum(centred * centred, axis=0) / WIDTH
        out = centred * tl.rsqrt(variance + eps) * weight + bias

        out_row = out_ptr + tl.cast(row, tl.int64) * WIDTH
        tl.store(out_row + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def num_warps(width: int) -> int:
    """Warps a row; a function of the width alone, because the order of a row's sum follows it."""
    return int(min(max(triton.next_power_of_2(width) // 512, 1), 8))


def launch(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, num_rows: Tensor | None, eps: float) -> None:
    """Write the layer norm of the live rows of ``x`` to ``out``; checked arguments, at least one row."""
    rows, width = x.shape
    unit = math.gcd(x.stride(0), 16)
    programs = persistent_programs(rows, x.device, per_multiprocessor=PROGRAMS_PER_MULTIPROCESSOR)
    with torch.cuda.device_of(x):
        _layer_norm_kernel[(programs,)](
            x,
            weight,
            bias,
            out,
            num_rows,
            x.stride(0) // unit,
            rows,
            eps,
            WIDTH=width,
            UNIT=unit,
            BLOCK=triton.next_power_of_2(width),
            num_warps=num_warps(width),
        )
