"""The counter of compilations, and what it proves: after one call of each, no input of the small kernels compiles."""

import pytest
import torch
import triton
import triton.language as tl

from ernie_vit.kernels import compilation
from ernie_vit.kernels.compilation import compilations
from ernie_vit.kernels.dispatch import EARLY_ROWS
from ernie_vit.kernels.layer_norm import layer_norm
from ernie_vit.kernels.rotary import apply_rotary, rotary_table

HEAD_DIM = 80


@triton.jit
def _fill(out_ptr, value, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), value)


@pytest.mark.compile
@pytest.mark.usefixtures("pretended_gpu")
def test_counts_each_variant_once() -> None:
    before = compilations()
    for block in (16, 32, 16, 32):
        _fill.warmup(torch.float32, 1.0, BLOCK=block, grid=(1,))
    assert compilations() - before == 2


@pytest.mark.compile
@pytest.mark.usefixtures("pretended_gpu")
def test_leaves_an_earlier_hook_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **k: names.append(k["fn"].name))
    monkeypatch.setattr(compilation, "_counting", False)
    before = compilations()
    _fill.warmup(torch.float32, 1.0, BLOCK=64, grid=(1,))
    assert compilations() - before == 1
    assert len(names) == 1


def small_kernels(rows: int, live: int, sequences: int) -> None:
    num_rows = torch.tensor([live], dtype=torch.int32, device="cuda")
    x = torch.randn(rows, 1280, device="cuda", dtype=torch.bfloat16)
    layer_norm(x, x[0], x[0], eps=1e-6, num_rows=num_rows)
    cu_seqlens = torch.full((sequences + 1,), live, dtype=torch.int32, device="cuda")
    cu_seqlens[0] = 0
    sizes = torch.tensor([[2, live // 2]], dtype=torch.int32, device="cuda").repeat(sequences, 1)
    table = rotary_table(cu_seqlens, sizes, num_rows=rows, head_dim=HEAD_DIM)
    qkv = torch.randn(rows, 3, 16, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    # a view of one offset: its address is a multiple of 4 only
    apply_rotary(qkv, table, num_rows=cu_seqlens[-1:])


@pytest.mark.gpu
def test_no_input_compiles_after_the_first() -> None:
    small_kernels(64, 48, 3)
    small_kernels(EARLY_ROWS + 1, 48, 3)  # no early launch
    before = compilations()
    for rows, live, sequences in [(1, 0, 1), (4, 4, 1), (16, 16, 4), (17, 8, 2), (4096, 1000, 64), (20000, 20000, 7)]:
        small_kernels(rows, live, sequences)
    assert compilations() == before
