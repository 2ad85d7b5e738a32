"""Programmatic dependent launch: the linear starts before the kernel that writes its inputs has written them."""

import pytest
import torch
from torch import Tensor

from ernie_vit.kernels.dispatch import why_not_hopper
from ernie_vit.kernels.linear import linear
from ernie_vit.kernels.tiles.linear import HOPPER_TILES

triton = pytest.importorskip("triton")
tl = triton.language
gdc_launch_dependents = pytest.importorskip("triton.language.extra.cuda").gdc_launch_dependents


# Few, so that the linear's programs, which take a multiprocessor's whole register file, find free ones beside them.
PROGRAMS = 4


@triton.jit
def _write_late(source_ptr, target_ptr, live_ptr, num_rows_ptr, numel, BLOCK: tl.constexpr):
    """Let the next kernel start, wait, and only then write its count of live rows and its x."""
    gdc_launch_dependents()
    nanoseconds = tl.full((BLOCK,), 400_000, tl.int32)  # longer than the host takes for the next launch
    zero = tl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.b32 $0, 0;", "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1
    )
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK) + zero
        mask = offsets < numel
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(num_rows_ptr, tl.load(live_ptr))


def write_late(source: Tensor, target: Tensor, live: Tensor, num_rows: Tensor) -> None:
    _write_late[(PROGRAMS,)](source, target, live, num_rows, source.numel(), BLOCK=128)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 576, 1296, 2000])
@pytest.mark.parametrize(("n", "k"), list(HOPPER_TILES))
def test_nothing_is_read_before_the_kernel_before_has_written_it(n: int, k: int, rows: int) -> None:
    # the epilogues of the tower, whose kernels other tests compile too
    reason = why_not_hopper(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    epilogue = {
        "bias": torch.randn(n, device="cuda").bfloat16(),
        "activation": "quick_gelu" if n == 5120 else None,
        "residual": torch.randn(rows, n, device="cuda").bfloat16() if n == 1280 else None,
    }
    full = linear(x, weight, **epilogue, num_rows=torch.tensor([rows], dtype=torch.int32, device="cuda"))
    late, num_rows = torch.empty_like(x), torch.zeros(1, dtype=torch.int32, device="cuda")
    lives = torch.arange(40, dtype=torch.int32, device="cuda") * 389 % (rows + 1)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(len(lives)):
        # more live rows than before, or fewer: what was fetched ahead by the old count is right, or is dropped
        num_rows.fill_(rows - lives[step])
        late.fill_(float("nan"))
        torch.cuda.synchronize()  # the old count is there, and the two launches below follow each other at once
        write_late(x, late, lives[step : step + 1], num_rows)
        out = linear(late, weight, **epilogue, num_rows=num_rows)
        live = torch.arange(rows, device="cuda")[:, None] < lives[step]
        wrong += ((out != full) & live).sum()
    assert wrong.item() == 0
