"""Inputs of attention tests, their comparison with float64, and attention by one tile of one backend."""

import torch
from accuracy import assert_within_budget
from torch import Tensor

from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention, attention_ref
from ernie_vit.kernels.tiles.attention import (
    HOPPER_TILES,
    HopperTile,
    PlainTile,
    architecture,
    plain_tile,
    work_list_shape,
)

NAN = float("nan")


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


def assert_accurate(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: float) -> Tensor:
    """Compare the live rows with float64, within the error of plain PyTorch; return them."""
    live = int(cu_seqlens[-1])
    poison(q)
    out = attention(q, k, v, cu_seqlens, max_seqlen, **options)[:live]
    plain = attention_ref(q, k, v, cu_seqlens, max_seqlen, **options)[:live]
    exact = attention_ref(q.double(), k.double(), v.double(), cu_seqlens, max_seqlen, **options)[:live]
    assert_within_budget(out, plain, exact)
    return out


def with_tile(
    tile: PlainTile | HopperTile, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor | None = None
) -> Tensor:
    """Attention by one tile, into a buffer of NaN."""
    from ernie_vit.kernels.triton.work_list import launch_work_list

    if isinstance(tile, HopperTile):
        from ernie_vit.kernels.hopper.attention import launch_attention
    else:
        from ernie_vit.kernels.triton.attention import launch_attention
    rows, heads, head_dim = q.shape
    shape = work_list_shape(rows, len(cu_seqlens) - 1, heads, tile.rows)
    work_list = torch.empty(shape, dtype=torch.int32, device=q.device)
    launch_work_list(cu_seqlens, work_list, num_rows=rows, num_heads=heads, tile_rows=tile.rows)
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=q.device) if out is None else out
    launch_attention(q, k, v, out, work_list, scale=head_dim**-0.5, tile=tile)
    return out


def backends(device: str, dtype: torch.dtype) -> list[list[PlainTile | HopperTile]]:
    """For each backend that serves ``device``: its tiles, the shipped ones first."""
    shipped = plain_tile(architecture(torch.device(device)), dtype)
    found: list[list[PlainTile | HopperTile]] = [[shipped, PlainTile(128, shipped.keys, 8, 2, programs=1)]]
    if device == "cuda" and dispatch.why_not_hopper(torch.device("cuda"), dtype) is None:
        found.append(list(HOPPER_TILES))
    return found
