"""The kernel that lays out attention's work: which query rows of which sequence and head, longest first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ernie_vit.kernels.tiles.attention import (
    PIECE_ROWS,
    HopperTile,
    PlainTile,
    items_at_once,
    work_list_shape,
)

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
    do_not_specialize=["num_sequences", "num_rows", "num_heads", "max_items", "at_once"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr"],
)
def work_list_kernel(
    cu_seqlens_ptr,  # [num_sequences + 1] int32
    work_list_ptr,  # [1 + max_items, 5] int32
    num_sequences,
    num_rows,
    num_heads,
    max_items,
    at_once,  # items of a round; 1: the last round is full
    TILE_ROWS: tl.constexpr,
    PIECE_ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a sequence: counts the tiles of the sequences that precede its own, then writes its items.

    No sort and no atomics: a place in the list follows from the lengths alone. Items of a last round that leaves
    processors idle are cut into as many pieces as find room beside each other.
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

        last = total * num_heads % at_once
        whole = total * num_heads - last
        pieces = tl.minimum(tl.cdiv(TILE_ROWS, PIECE_ROWS), at_once // tl.maximum(last, 1))
        piece_rows = tl.cdiv(tl.cdiv(TILE_ROWS, PIECE_ROWS), pieces) * PIECE_ROWS

        if sequence == 0:
            header = tl.arange(0, 8)
            count = tl.minimum(whole + last * pieces, max_items)
            tl.store(work_list_ptr + header, tl.where(header == 0, count, 0), mask=header < 5)

        tiles = (tl.maximum(length, 0) + TILE_ROWS - 1) // TILE_ROWS
        for start in range(0, tiles * num_heads, CHUNK):
            offs_i = start + tl.arange(0, CHUNK)  # [CHUNK] items of this sequence: head by head, tile by tile
            head = offs_i // tiles
            row = first + (offs_i - head * tiles) * TILE_ROWS
            row_end = tl.minimum(row + TILE_ROWS, end)
            place = preceding * num_heads + offs_i
            is_cut = place >= whole
            rows = tl.where(is_cut, piece_rows, TILE_ROWS)
            place = tl.where(is_cut, whole + (place - whole) * pieces, place)
            for piece in range(pieces):
                piece_row = row + piece * rows
                item_ptr = work_list_ptr + (1 + (place + piece).to(tl.int64)) * 5
                mask_i = (offs_i < tiles * num_heads) & (place + piece < max_items) & (is_cut | (piece == 0))
                tl.store(item_ptr, piece_row, mask=mask_i)
                tl.store(item_ptr + 1, tl.minimum(piece_row + rows, row_end), mask=mask_i)
                tl.store(item_ptr + 2, first, mask=mask_i)
                tl.store(item_ptr + 3, end, mask=mask_i)
                tl.store(item_ptr + 4, head, mask=mask_i)


def make_work_list(cu_seqlens: Tensor, tile: PlainTile | HopperTile, *, num_rows: int, num_heads: int) -> Tensor:
    """The work list for ``tile``, on the current device; rows past its count are not written."""
    at_once = items_at_once(tile, cu_seqlens.device)
    shape = work_list_shape(num_rows, cu_seqlens.shape[0] - 1, num_heads, tile.rows, at_once)
    work_list = torch.empty(shape, dtype=torch.int32, device=cu_seqlens.device)
    launch_work_list(
        cu_seqlens, work_list, num_rows=num_rows, num_heads=num_heads, tile_rows=tile.rows, at_once=at_once
    )
    return work_list


def launch_work_list(
    cu_seqlens: Tensor, work_list: Tensor, *, num_rows: int, num_heads: int, tile_rows: int, at_once: int
) -> None:
    """Fill ``work_list``, int32 ``[1 + items, 5]`` on the current device; its shape says how many items fit.

    ``at_once`` items make a round; with 1 none is cut.
    """
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
        at_once,
        TILE_ROWS=tile_rows,
        PIECE_ROWS=PIECE_ROWS,
        SCAN=SCAN,
        CHUNK=CHUNK,
        num_warps=4,
    )
