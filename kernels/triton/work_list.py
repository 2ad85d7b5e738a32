"""The kernel that lays out attention's work: which query rows of which sequence and head, longest first."""

import triton
import triton.language as tl
from torch import Tensor

# cu_seqlens entries read at once; a program reads all of them to find its place in the list
SCAN = 1024
# items written at once
CHUNK = 128


@triton.jit
def _lengths(
    cu_seqlens_ptr,
    offs_s,  # [SCAN] sequences
    num_sequences,
    num_rows,
):
    """Lengths of the sequences, 0 past the last; offsets outside of the rows are cut so that no item leaves them."""
    mask_s = offs_s < num_sequences
    first = tl.load(cu_seqlens_ptr + offs_s, mask=mask_s, other=0)
    end = tl.load(cu_seqlens_ptr + offs_s + 1, mask=mask_s, other=0)
    return tl.maximum(tl.minimum(end, num_rows) - tl.maximum(first, 0), 0)


@triton.jit(
    do_not_specialize=["num_sequences", "num_rows", "num_heads", "max_items"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr"],
)
def work_list_kernel(
    cu_seqlens_ptr,  # [num_sequences + 1] int32
    work_list_ptr,  # [1 + max_items, 4] int32
    num_sequences,
    num_rows,
    num_heads,
    max_items,
    TILE_ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a sequence: counts the tiles of the sequences that precede its own, then writes its items.

    No sort and no atomics: a place in the list follows from the lengths alone.
    """
    sequence = tl.program_id(0)
    first = tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0)
    end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1), num_rows)
    length = end - first

    if (length > 0) | (sequence == 0):
        preceding = 0
        total = 0
        for start in range(0, num_sequences, SCAN):
            offs_s = start + tl.arange(0, SCAN)  # [SCAN]
            lengths = _lengths(cu_seqlens_ptr, offs_s, num_sequences, num_rows)
            tiles = (lengths + TILE_ROWS - 1) // TILE_ROWS
            precedes = (lengths > length) | ((lengths == length) & (offs_s < sequence))
            preceding += tl.sum(tl.where(precedes, tiles, 0))
            total += tl.sum(tiles)

        if sequence == 0:
            header = tl.arange(0, 4)
            count = tl.minimum(total * num_heads, max_items)
            tl.store(work_list_ptr + header, tl.where(header == 0, count, 0))

        tiles = (tl.maximum(length, 0) + TILE_ROWS - 1) // TILE_ROWS
        for start in range(0, tiles * num_heads, CHUNK):
            offs_i = start + tl.arange(0, CHUNK)  # [CHUNK] items of this sequence: head by head, tile by tile
            head = offs_i // tiles
            row = first + (offs_i - head * tiles) * TILE_ROWS
            place = preceding * num_heads + offs_i
            item_ptr = work_list_ptr + (1 + place.to(tl.int64)) * 4
            mask_i = (offs_i < tiles * num_heads) & (place < max_items)
            tl.store(item_ptr, row, mask=mask_i)
            tl.store(item_ptr + 1, first, mask=mask_i)
            tl.store(item_ptr + 2, end, mask=mask_i)
            tl.store(item_ptr + 3, head, mask=mask_i)


def launch_work_list(cu_seqlens: Tensor, work_list: Tensor, *, num_rows: int, num_heads: int, tile_rows: int) -> None:
    """Fill ``work_list``, int32 ``[1 + items, 4]`` on the current device; its shape says how many items fit."""
    num_sequences = cu_seqlens.shape[0] - 1
    if num_sequences == 0:
        work_list[0].zero_()
        return
    work_list_kernel[(num_sequences,)](
        cu_seqlens,
        work_list,
        num_sequences,
        num_rows,
        num_heads,
        work_list.shape[0] - 1,
        TILE_ROWS=tile_rows,
        SCAN=SCAN,
        CHUNK=CHUNK,
        num_warps=4,
    )
