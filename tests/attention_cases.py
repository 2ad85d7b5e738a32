"""Inputs of attention tests, their comparison with float64, and attention by one tile of one backend."""

import math
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from accuracy import assert_within_budget, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention, attention_ref
from ernie_vit.kernels.tiles.attention import (
    HOPPER_TILES,
    HopperTile,
    PlainTile,
    plain_tile,
)

NAN = float("nan")
# Fewer values than this are compared over several draws: two errors of 5,000 values differ by a percent by luck alone.
VALUES = 40_000
MOST_DRAWS = 12
FUSED_RATIO = 1.05


def offsets(lengths: list[int], device: str, padded: int = 0) -> Tensor:
    return torch.tensor([0, *lengths, *[0] * padded]).cumsum(0).to(torch.int32).to(device)


def fused(
    rows: int, device: str, dtype: torch.dtype = torch.bfloat16, heads: int = 2, head_dim: int = 80
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as slices of one buffer, as the projection leaves them."""
    return torch.randn(rows, 3, heads, head_dim).to(dtype).to(device).unbind(1)


def poison(like: Tensor) -> None:
    """Leave memory full of NaN to the allocator, which hands it out for the next result of this size."""
    torch.full(like.shape, NAN, dtype=like.dtype, device=like.device)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, _max_seqlen: int, *, scale: float | None = None
) -> Tensor:
    """The formula in plain PyTorch at the inputs' dtype, as transformers' eager attention; the budget of an error.

    Scores are rounded, scaled and rounded again; weights are rounded, after a softmax in float32.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for first, end in pairwise(cu_seqlens.tolist()):
        queries, keys, values = (x[first:end].transpose(0, 1) for x in (q, k, v))  # [heads, rows, head_dim]
        scores = queries @ keys.mT * scale
        out[first:end] = (scores.float().softmax(-1).to(q.dtype) @ values).transpose(0, 1)
    return out


def fused_backend(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """PyTorch's fused attention with our rounding points, on CUDA.

    Left to itself it takes its math backend for few rows, which keeps the weights of a 16-bit input in float32: another
    computation. Its flash backend rounds them before they meet v, as we do, and FlashAttention after it.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH if dtype in (torch.float32, torch.float64) else SDPBackend.FLASH_ATTENTION)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: float) -> Tensor:
    """Fused attention of PyTorch at the inputs' dtype; on copies, because its kernels do not take every alignment."""
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    with fused_backend(q.device, q.dtype):
        return attention_ref(*copies, cu_seqlens, max_seqlen, **options)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: float) -> Tensor:
    """Attention in float64, a head at a time: the scores of 16,384 rows take 2 GiB a head."""
    heads = zip(*(x.split(1, dim=1) for x in (q, k, v)), strict=True)
    outputs = [attention_ref(*(x.double() for x in head), cu_seqlens, max_seqlen, **options) for head in heads]
    return torch.cat(outputs, dim=1)


REFERENCES = (eager_attention, fused_attention, exact_attention)


def assert_as_accurate(out: Tensor, eager: Tensor, fused: Tensor, exact: Tensor) -> None:
    """``out`` is no farther from ``exact`` than the formula in plain PyTorch, nor than its fused attention by 5 %.

    The fused one has our rounding points, but for few blocks of 64 query rows it splits the keys, and each part's
    largest weight is exactly 1: measured 2.152e-3 against our 2.212e-3 (2 heads of 1,296 rows, bf16), where the formula
    has 5.9e-3. Float32 rounds nothing between, so there the formula alone counts.
    """
    assert_within_budget(out, eager, exact)
    if out.dtype != torch.float32:
        error, same_points = relative_error(out, exact), relative_error(fused, exact)
        assert error <= FUSED_RATIO * same_points, f"relative error {error:.3e}, fused attention's {same_points:.3e}"


def assert_accurate(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: float) -> Tensor:
    """Compare the live rows with float64, ``assert_as_accurate``; return them.

    Where they are few, v's signs are drawn again for further comparisons: other sums, of the same magnitudes.
    """
    live = int(cu_seqlens[-1])
    draws = min(math.ceil(VALUES / max(q[:live].numel(), 1)), MOST_DRAWS)
    compared = []
    for _ in range(draws):
        poison(q)
        compared.append([f(q, k, v, cu_seqlens, max_seqlen, **options)[:live] for f in (attention, *REFERENCES)])
        v = v * torch.randint(0, 2, v.shape, device=v.device).mul(2).sub(1).to(v.dtype)
    assert_as_accurate(*(torch.cat(outputs) for outputs in zip(*compared, strict=True)))
    return compared[0][0]


def with_tile(
    tile: PlainTile | HopperTile, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor | None = None
) -> Tensor:
    """Attention by one tile, into a buffer of NaN."""
    from ernie_vit.kernels.triton.work_list import make_work_list

    if isinstance(tile, HopperTile):
        from ernie_vit.kernels.hopper.attention import launch_attention
    else:
        from ernie_vit.kernels.triton.attention import launch_attention
    rows, heads, head_dim = q.shape
    work_list = make_work_list(cu_seqlens, tile, num_rows=rows, num_heads=heads)
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=q.device) if out is None else out
    launch_attention(q, k, v, out, work_list, scale=head_dim**-0.5, tile=tile)
    return out


def backends(device: str, dtype: torch.dtype) -> list[list[PlainTile | HopperTile]]:
    """For each backend that serves ``device``: its tiles, the shipped ones first."""
    shipped = plain_tile(dispatch.architecture(torch.device(device)), dtype)
    found: list[list[PlainTile | HopperTile]] = [[shipped, PlainTile(128, shipped.keys, 8, 2, programs=1)]]
    if device == "cuda" and dispatch.why_not_hopper(torch.device("cuda"), dtype) is None:
        found.append(list(HOPPER_TILES))
    return found
