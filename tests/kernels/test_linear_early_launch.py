"""Programmatic dependent launch: the linear starts before the kernel that writes its inputs has written them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ernie_vit.kernels.dispatch import why_not_hopper
from ernie_vit.kernels.linear import linear
from ernie_vit.kernels.qkv_rotary import qkv_rotary
from ernie_vit.kernels.tiles.linear import HOPPER_TILES

triton = pytest.importorskip("triton")
tl = triton.language
gdc_launch_dependents = pytest.importorskip("triton.language.extra.cuda").gdc_launch_dependents


# Few, so that the linear's programs, which take a multiprocessor's whole register file, find free ones beside them.
PROGRAMS = 4
HEAD_DIM = 80


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


def projection(n: int, k: int, rows: int, *, rotary: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """x ``[rows, k]`` and the live rows to ``[rows, n]``, with the tower's epilogue: other tests compile it too."""
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    bias = torch.randn(n, device="cuda").bfloat16()
    if rotary:
        angles = torch.randn(rows, HEAD_DIM // 2, device="cuda")
        table = torch.stack((angles.cos(), angles.sin()), dim=1)
        num_heads = n // (3 * HEAD_DIM)
        return lambda x, num_rows: qkv_rotary(x, weight, bias, table, num_heads=num_heads, num_rows=num_rows).flatten(1)
    activation = "quick_gelu" if n == 5120 else None
    residual = torch.randn(rows, n, device="cuda").bfloat16() if n == 1280 else None
    return lambda x, num_rows: linear(x, weight, bias, activation=activation, residual=residual, num_rows=num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 576, 1296, 2000, 3000])
@pytest.mark.parametrize(
    ("n", "k", "rotary"), [*((*shape, False) for shape in HOPPER_TILES), (3840, 1280, True)], ids=str
)
def test_nothing_is_read_before_the_kernel_before_has_written_it(n: int, k: int, rotary: bool, rows: int) -> None:
    reason = why_not_hopper(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    project = projection(n, k, rows, rotary=rotary)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    full = project(x, torch.tensor([rows], dtype=torch.int32, device="cuda"))
    late, num_rows = torch.empty_like(x), torch.zeros(1, dtype=torch.int32, device="cuda")
    lives = torch.arange(40, dtype=torch.int32, device="cuda") * 389 % (rows + 1)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(len(lives)):
        # more live rows than before, or fewer: what was fetched ahead by the old count is right, or is dropped
        num_rows.fill_(rows - lives[step])
        late.fill_(float("nan"))
        torch.cuda.synchronize()  # the old count is there, and the two launches below follow each other at once
        write_late(x, late, lives[step : step + 1], num_rows)
        out = project(late, num_rows)
        live = torch.arange(rows, device="cuda")[:, None] < lives[step]
        wrong += ((out != full) & live).sum()
    assert wrong.item() == 0
