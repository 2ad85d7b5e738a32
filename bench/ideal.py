"""What tiles allow: a GPU is done when its busiest multiprocessor is.

A matrix product is cut into tiles of equal cost, and attention into items of one tile of query rows and a sequence's
keys. ``padded_flops`` is what all multiprocessors could have computed in the time that the busiest needs for its own:
whole rounds of tiles, overhanging edges included. The tiles are those that our kernels have at this size; that every
multiprocessor works at its share of the large product's rate is the ideal.
"""

import heapq
from collections.abc import Iterable, Sequence

from bench.sizes import DEVICE, DTYPE, HEAD_DIM, HEADS
from ernie_vit.kernels.dispatch import architecture, why_not_hopper
from ernie_vit.kernels.tiles.attention import attention_tile
from ernie_vit.kernels.tiles.linear import HopperTile, TritonTile, hopper_regimes, triton_regimes
from ernie_vit.kernels.triton.grid import multiprocessors


def linear_flops(rows: int, n: int, k: int, *, capacity: int | None = None) -> float:
    """Padded FLOPs of ``[rows, k] @ [k, n]`` in the tiles of a call with room for ``capacity`` rows (default: rows)."""
    tile = linear_tile(rows if capacity is None else capacity, n, k)
    tiles = -(-rows // tile.rows) * -(-n // tile.columns)
    at_once = multiprocessors(DEVICE)
    return -(-tiles // at_once) * at_once * 2.0 * tile.rows * tile.columns * k


def linear_tile(rows: int, n: int, k: int) -> HopperTile | TritonTile:
    if why_not_hopper(DEVICE, DTYPE) is None:
        return hopper_regimes(n, k).at(rows)
    return triton_regimes(architecture(DEVICE), float32=False).at(rows)


def attention_flops(lengths: Sequence[int], *, capacity: int | None = None, max_seqlen: int | None = None) -> float:
    """Padded FLOPs of attention, each multiprocessor taking the longest item that is left. Items are not cut here."""
    tile = attention_tile(
        DEVICE,
        DTYPE,
        HEAD_DIM,
        num_rows=sum(lengths) if capacity is None else capacity,
        max_seqlen=max(lengths) if max_seqlen is None else max_seqlen,
        num_sequences=len(lengths),
    )
    items = (4.0 * tile.rows * n * HEAD_DIM for n in lengths for _ in range(HEADS * -(-n // tile.rows)))
    return busiest(items, multiprocessors(DEVICE)) * multiprocessors(DEVICE)


def busiest(items: Iterable[float], workers: int) -> float:
    """The load of the busiest of ``workers`` when each takes the largest item left as soon as it is free."""
    loads = [0.0] * workers
    for item in sorted(items, reverse=True):
        heapq.heapreplace(loads, loads[0] + item)
    return max(loads)
