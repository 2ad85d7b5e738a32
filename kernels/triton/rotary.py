"""The Triton kernels of ``ernie_vit.kernels.rotary``, and their launchers."""

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ernie_vit.kernels.dispatch import small_kernel_launches_early
from ernie_vit.kernels.triton.grid import persistent_programs
from ernie_vit.kernels.triton.launch import Launcher

PROGRAMS_PER_MULTIPROCESSOR = 8
TABLE_ROWS = 8  # a program
TABLE_WARPS = 8  # fewer warps spill around the slow path of the cosines on some architectures
CUTS = 128  # offsets compared at once
PAIRS = 1024  # elements of the first halves that a program rotates at once


@triton.jit(
    do_not_specialize=["sequences", "rows"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "frame_sizes_ptr"],
)
def _rotary_table_kernel(
    cu_seqlens_ptr,  # [sequences + 1] int32
    frame_sizes_ptr,  # [sequences, 2] int32, contiguous
    table_ptr,  # [rows, 2, 2 * len(FREQUENCIES)] fp32, contiguous
    sequences,
    rows,
    FREQUENCIES: tl.constexpr,  # head_dim // 4 numbers
    COUNT: tl.constexpr,  # of them
    BLOCK_ANGLES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CUTS: tl.constexpr,
):
    live = tl.minimum(tl.load(cu_seqlens_ptr + sequences), rows)

    angles = tl.arange(0, BLOCK_ANGLES)
    frequency = tl.zeros([BLOCK_ANGLES], tl.float32)
    for i in tl.static_range(COUNT):
        frequency = tl.where(angles % COUNT == i, FREQUENCIES[i], frequency)

    for start in range(tl.program_id(0) * BLOCK_ROWS, live, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask_row = row < live

        # A row's frame is the number of frames that end at or before it; zero-length frames count as ended.
        frame = tl.zeros([BLOCK_ROWS], tl.int32)
        for cut in range(0, sequences, BLOCK_CUTS):
            cuts = cut + tl.arange(0, BLOCK_CUTS)
            ends = tl.load(cu_seqlens_ptr + 1 + cuts, mask=cuts < sequences, other=2147483647)
            frame += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)

        first = tl.load(cu_seqlens_ptr + frame, mask=mask_row, other=0)
        width = tl.load(frame_sizes_ptr + 2 * frame + 1, mask=mask_row, other=2)
        window = (row - first) // 4
        inside = (row - first) % 4
        y = window // (width // 2) * 2 + inside // 2
        x = window % (width // 2) * 2 + inside % 2

        position = tl.where(angles[None, :] < COUNT, y[:, None], x[:, None])
        angle = position.to(tl.float32) * frequency[None, :]
        cos_ptr = table_ptr + row.to(tl.int64)[:, None] * (4 * COUNT) + angles[None, :]
        mask = mask_row[:, None] & (angles < 2 * COUNT)[None, :]
        tl.store(cos_ptr, tl.cos(angle), mask=mask)
        tl.store(cos_ptr + 2 * COUNT, tl.sin(angle), mask=mask)


@triton.jit(
    do_not_specialize=["qkv_row_units", "rows"],
    do_not_specialize_on_alignment=["num_rows_ptr"],
)
def _apply_rotary_kernel(
    qkv_ptr,  # [rows, 3, HEADS, 2 * HALF], rows UNIT * qkv_row_units elements apart, the rest contiguous
    table_ptr,  # [rows, 2, HALF] fp32, contiguous
    num_rows_ptr,  # [1] int32, or None
    qkv_row_units,
    rows,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,  # a factor of HALF and of the row stride: elements that are loaded together
    BLOCK: tl.constexpr,  # units a program takes at once
    EARLY: tl.constexpr,  # launched before the kernel before has ended
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    live = rows if num_rows_ptr is None else tl.minimum(tl.load(num_rows_ptr), rows)

    # Units of the first halves of a row's q and k heads, which lie one behind the other, are numbered through: as
    # HALF is no power of two, a block of its own for each head would leave many lanes idle.
    HALF_UNITS: tl.constexpr = HALF // UNIT
    ROW_UNITS: tl.constexpr = 2 * HEADS * HALF_UNITS
    total = live.to(tl.int64) * ROW_UNITS

    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, total, tl.num_programs(0) * BLOCK):
        first_row = start // ROW_UNITS  # one division at 64 bits a block; the rest fits into 32
        unit = (start - first_row * ROW_UNITS).to(tl.int32) + tl.arange(0, BLOCK)
        row = first_row + unit // ROW_UNITS
        in_row = unit % ROW_UNITS
        head = in_row // HALF_UNITS
        column = (in_row % HALF_UNITS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        mask = (row < live)[:, None]

        cos_ptr = table_ptr + row[:, None] * (2 * HALF) + column
        cos = tl.load(cos_ptr, mask=mask, other=0.0)
        sin = tl.load(cos_ptr + HALF, mask=mask, other=0.0)
        first_ptr = qkv_ptr + (row * qkv_row_units)[:, None] * UNIT + head[:, None] * (2 * HALF) + column
        first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)

        dtype = qkv_ptr.dtype.element_ty
        tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(first_ptr + HALF, (second * cos + first * sin).to(dtype), mask=mask)


_launch_table = Launcher(_rotary_table_kernel)
_launch_apply = Launcher(_apply_rotary_kernel)


def launch_table(cu_seqlens: Tensor, frame_sizes: Tensor, table: Tensor, frequencies: tuple[float, ...]) -> None:
    """Write the live rows of ``table``; checked arguments, at least one row."""
    rows, count = table.shape[0], len(frequencies)
    programs = persistent_programs(
        triton.cdiv(rows, TABLE_ROWS), table.device, per_multiprocessor=PROGRAMS_PER_MULTIPROCESSOR
    )
    _launch_table(
        programs,
        table.device,
        (cu_seqlens, frame_sizes, table, frame_sizes.shape[0], rows),
        (frequencies, count, triton.next_power_of_2(2 * count), TABLE_ROWS, CUTS),
        num_warps=TABLE_WARPS,
    )


def launch_apply(qkv: Tensor, table: Tensor, num_rows: Tensor | None) -> None:
    """Rotate q and k of the live rows in place; checked arguments, at least one row."""
    rows, _, heads, head_dim = qkv.shape
    half, stride = head_dim // 2, qkv.stride(0)
    unit = math.gcd(half, stride, 8)
    block = PAIRS // (1 << (unit - 1).bit_length())
    early = small_kernel_launches_early(qkv.device, rows)
    programs = persistent_programs(
        -(-rows * 2 * heads * half // unit // block),
        qkv.device,
        per_multiprocessor=PROGRAMS_PER_MULTIPROCESSOR,
    )
    _launch_apply(
        programs,
        qkv.device,
        (qkv, table, num_rows, stride // unit, rows),
        (heads, half, unit, block, early),
        num_warps=4,
        launch_pdl=early,
    )
