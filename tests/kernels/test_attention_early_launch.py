"""Programmatic dependent launch: attention starts before the kernel that writes q, k, v and the work list has ended."""

from dataclasses import replace

import pytest
import torch
from attention_cases import NAN, fused, offsets
from torch import Tensor

from ernie_vit.kernels.dispatch import why_not_hopper
from ernie_vit.kernels.tiles.attention import HOPPER_TILES, HopperTile

triton = pytest.importorskip("triton")
tl = triton.language
gdc_launch_dependents = pytest.importorskip("triton.language.extra.cuda").gdc_launch_dependents

pytestmark = pytest.mark.gpu

# those that ship without it must be ready for it too
EARLY_TILES = sorted(
    {replace(tile, early=True) for tile in HOPPER_TILES}, key=lambda tile: (tile.rows, tile.persistent)
)
# Few, so that attention, whose programs take a multiprocessor's whole register file, finds free ones beside them.
PROGRAMS = 4


@triton.jit
def _write_late(source_ptr, target_ptr, list_ptr, late_list_ptr, numel, list_numel, BLOCK: tl.constexpr):
    """Let the next kernel start, wait, and only then copy the two sources, of elements of one size each."""
    gdc_launch_dependents()
    nanoseconds = tl.full((BLOCK,), 400_000, tl.int32)  # longer than the host takes for the next launch
    zero = tl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.b32 $0, 0;", "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1
    )
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK) + zero
        tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < numel), mask=offs < numel)
    for start in range(tl.program_id(0) * BLOCK, list_numel, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK) + zero
        tl.store(late_list_ptr + offs, tl.load(list_ptr + offs, mask=offs < list_numel), mask=offs < list_numel)


def work_list_of(lengths: list[int], rows: int, heads: int, tile: HopperTile) -> Tensor:
    from ernie_vit.kernels.triton.work_list import make_work_list

    cu_seqlens = offsets(lengths, "cuda", padded=4 - len(lengths))
    return make_work_list(cu_seqlens, tile, num_rows=rows, num_heads=heads)


@pytest.mark.parametrize("tile", EARLY_TILES, ids=lambda tile: f"{tile.rows} rows{' persistent' * tile.persistent}")
def test_nothing_is_read_before_the_kernel_before_has_written_it(tile):
    reason = why_not_hopper(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    from ernie_vit.kernels.hopper.attention import launch_attention

    rows, heads = 1296, 2
    qkv = torch.stack(fused(rows, "cuda", heads=heads), dim=1)
    late, late_out = torch.empty_like(qkv), torch.empty_like(qkv[:, 0])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    old: list[int] = []
    # more items than before, or fewer: an old count or an old item shows
    for lengths in [[1296], [64], [400, 300, 596], [1], [700, 500], [], [1296], [130] * 4]:
        work_list = work_list_of(lengths, rows, heads, tile)
        out = torch.full_like(late_out, NAN)
        launch_attention(*qkv.unbind(1), out, work_list, scale=0.1, tile=tile)
        late_list = work_list_of(old, rows, heads, tile)
        late.fill_(NAN)
        late_out.fill_(NAN)
        torch.cuda.synchronize()  # the old list is there, and the two launches below follow each other at once
        _write_late[(PROGRAMS,)](qkv, late, work_list, late_list, qkv.numel(), work_list.numel(), BLOCK=128)
        launch_attention(*late.unbind(1), late_out, late_list, scale=0.1, tile=tile)
        wrong += (late_out.view(torch.int16) != out.view(torch.int16)).sum()
        old = lengths
    assert wrong.item() == 0
