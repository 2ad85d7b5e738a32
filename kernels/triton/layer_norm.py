"""The Triton kernel of ``ernie_vit.kernels.layer_norm`` and ``rms_norm``, and its launcher."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ernie_vit.kernels.dispatch import small_kernel_launches_early
from ernie_vit.kernels.triton.grid import persistent_programs
from ernie_vit.kernels.triton.launch import Launcher

# Few warps a row: in one (the tower's width at 16 bits) the sums are shuffles, without a barrier, and the programs in
# flight hide the loads.
PROGRAMS_PER_MULTIPROCESSOR = 32


@triton.jit
def _load_row(row_ptr, WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Both blocks of a row, zeros past its end; volatile: where it stands, not behind the branch that uses it."""
    tail = MAIN + tl.arange(0, TAIL)
    main_part = tl.load(row_ptr + tl.arange(0, MAIN), volatile=VOLATILE)
    return main_part, tl.load(row_ptr + tail, mask=tail < WIDTH, other=0.0, volatile=VOLATILE)


@triton.jit
def _store_norm(
    out_row, x_main, x_tail, weight_main, weight_tail, bias_main, bias_tail, eps,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The norm of a loaded row. All loads stand before the stores, past which the compiler could move none."""
    tail = MAIN + tl.arange(0, TAIL)
    mask_tail = tail < WIDTH
    x_main = x_main.to(tl.float32)
    x_tail = x_tail.to(tl.float32)
    if HAS_BIAS:
        mean = (tl.sum(x_main, axis=0) + tl.sum(x_tail, axis=0)) / WIDTH
        x_main -= mean
        x_tail = tl.where(mask_tail, x_tail - mean, 0.0)  # padded columns count neither here nor in the mean
    variance = (tl.sum(x_main * x_main, axis=0) + tl.sum(x_tail * x_tail, axis=0)) / WIDTH
    scale = tl.rsqrt(variance + eps)
    x_main *= scale
    x_tail *= scale
    x_main *= weight_main.to(tl.float32)
    x_tail *= weight_tail.to(tl.float32)
    if HAS_BIAS:
        x_main += bias_main.to(tl.float32)
        x_tail += bias_tail.to(tl.float32)
    tl.store(out_row + tl.arange(0, MAIN), x_main.to(out_row.dtype.element_ty))
    tl.store(out_row + tail, x_tail.to(out_row.dtype.element_ty), mask=mask_tail)


@triton.jit(
    do_not_specialize=["x_row_units", "rows"],
    do_not_specialize_on_alignment=["num_rows_ptr", "index_ptr"],
)
def _layer_norm_kernel(
    x_ptr,  # [rows of x, WIDTH], rows UNIT * x_row_units elements apart
    weight_ptr,  # [WIDTH]
    bias_ptr,  # [WIDTH], or None: the root mean square norm, which takes no mean off
    out_ptr,  # [rows, WIDTH], contiguous
    num_rows_ptr,  # [1] int32, or None
    index_ptr,  # [rows] int32, the row of x for each row of out, or None: the same
    x_row_units,
    rows,
    eps,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,  # a factor of the row stride, stated so that loads of this many elements are aligned
    MAIN: tl.constexpr,  # columns of the first block, a power of two
    TAIL: tl.constexpr,  # columns of the second block, which holds the rest: 1280 = 1024 + 256 leaves no lane idle
    EARLY: tl.constexpr,  # launched before the kernel before has ended, a program a row; without an index
):
    HAS_BIAS: tl.constexpr = bias_ptr is not None
    bias_or_weight_ptr = bias_ptr if HAS_BIAS else weight_ptr
    if EARLY:
        gdc_launch_dependents()
        # While the kernel before ends: no kernel of ours writes them, and they come from memory, not from a cache.
        weight_main, weight_tail = _load_row(weight_ptr, WIDTH, MAIN, TAIL)
        bias_main, bias_tail = _load_row(bias_or_weight_ptr, WIDTH, MAIN, TAIL)
        gdc_wait()
        row = tl.program_id(0)
        live = rows if num_rows_ptr is None else tl.minimum(tl.load(num_rows_ptr), rows)
        x_row = x_ptr + tl.cast(row, tl.int64) * x_row_units * UNIT
        x_main, x_tail = _load_row(x_row, WIDTH, MAIN, TAIL, VOLATILE=True)  # beside the count, whether live or not
        if row < live:
            out_row = out_ptr + tl.cast(row, tl.int64) * WIDTH
            _store_norm(
                out_row, x_main, x_tail, weight_main, weight_tail, bias_main, bias_tail,
                eps, WIDTH, MAIN, TAIL, HAS_BIAS,
            )  # fmt: skip
    else:
        live = rows if num_rows_ptr is None else tl.minimum(tl.load(num_rows_ptr), rows)
        for row in range(tl.program_id(0), live, tl.num_programs(0)):
            source = row if index_ptr is None else tl.load(index_ptr + row)
            x_main, x_tail = _load_row(x_ptr + tl.cast(source, tl.int64) * x_row_units * UNIT, WIDTH, MAIN, TAIL)
            # again for each row, from L1: kept in registers over the loop they spill
            weight_main, weight_tail = _load_row(weight_ptr, WIDTH, MAIN, TAIL)
            bias_main, bias_tail = _load_row(bias_or_weight_ptr, WIDTH, MAIN, TAIL)
            out_row = out_ptr + tl.cast(row, tl.int64) * WIDTH
            _store_norm(
                out_row, x_main, x_tail, weight_main, weight_tail, bias_main, bias_tail,
                eps, WIDTH, MAIN, TAIL, HAS_BIAS,
            )  # fmt: skip


_launch = Launcher(_layer_norm_kernel)


@cache
def blocks(width: int) -> tuple[int, int]:
    """Columns of the two blocks that hold a row: the largest power of two, and one for the rest (1 if none is left)."""
    main = 1 << (width.bit_length() - 1)
    return main, max(triton.next_power_of_2(width - main), 1)


@cache
def num_warps(width: int, dtype: torch.dtype) -> int:
    """Warps a row: of the width and dtype alone, because the order of a row's sum follows it."""
    return max(blocks(width)[0] * dtype.itemsize // 2048, 1)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    num_rows: Tensor | None,
    eps: float,
    index: Tensor | None = None,
) -> None:
    """Write the layer norm of the live rows to ``out``, without a bias their root mean square norm.

    Checked arguments, at least one row. ``index`` as of ``layer_norm``.
    """
    rows, width = out.shape
    unit = math.gcd(x.stride(0), 16)
    main, tail = blocks(width)
    early = index is None and small_kernel_launches_early(x.device, rows)  # an index may name any row where it is dead
    programs = rows
    if not early:
        programs = persistent_programs(rows, x.device, per_multiprocessor=PROGRAMS_PER_MULTIPROCESSOR)
    _launch(
        programs,
        x.device,
        (x, weight, bias, out, num_rows, index, x.stride(0) // unit, rows, eps),
        (width, unit, main, tail, early),
        num_warps=num_warps(width, x.dtype),
        launch_pdl=early,
    )
