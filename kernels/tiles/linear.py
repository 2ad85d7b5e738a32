"""Tiles of the linears: which shape serves which weight and how many rows, per architecture.

Every tile gives the same bits, so a choice here decides the time alone. It follows the rows a call has room for
(the capacity), never the live ones, which the host does not know. ``bench/tune_linear.py`` chose them by the time of
the tower that they stand in, and prints rows for these tables.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch

from ernie_vit.kernels.dispatch import EARLY_ROWS, architecture, launches_early, why_not_hopper


@dataclass(frozen=True)
class TritonTile:
    """A tile of the plain Triton kernel.

    Attributes:
        rows, columns: of the output that one program computes at a time; powers of two.
        block_k: columns of x and weight a step.
        num_warps: of a program.
        num_stages: steps that are loaded ahead, the current one included.
        programs_per_sm: programs a multiprocessor in the persistent launch.
    """

    rows: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


@dataclass(frozen=True)
class HopperTile:
    """A tile of the Gluon kernel.

    Attributes:
        rows, columns: of the output that a tile covers; columns: a power of two, or two (160 = 128 + 32).
        groups: groups of four warps that multiply.
        stages: steps in the shared-memory ring.
        ping_pong: each group has tiles of its own; otherwise they share one, in row blocks of 64.
        block_k: columns of x and weight a step.
        group_rows: rows of tiles that are walked together for one column of tiles, which shares weights in the
            second-level cache; 0: row by row, so that the first tile's place needs no live count and its weights
            can be fetched before the kernel before has ended.
        pdl: launch before the kernel before has ended (programmatic dependent launch).
    """

    rows: int
    columns: int
    groups: int
    stages: int
    ping_pong: bool = False
    block_k: int = 64
    group_rows: int = 8
    pdl: bool = False

    @property
    def block_rows(self) -> int:
        """Rows of the blocks that a group multiplies, one at a time."""
        return self.rows if self.ping_pong else 64

    @property
    def row_blocks(self) -> int:
        """Blocks that the groups hold together; more than groups: the first ones hold two."""
        return self.groups if self.ping_pong else self.rows // self.block_rows

    @property
    def column_parts(self) -> tuple[int, int]:
        """The columns as a power of two and the rest, another one or 0: shapes in Triton are powers of two."""
        main = 1 << (self.columns.bit_length() - 1)
        return main, self.columns - main

    @cache  # noqa: B019  the few tiles there are
    def late(self) -> "HopperTile":
        """The same, started and its weights fetched only when the kernel before has ended."""
        return replace(self, **LATE._asdict())


Tile = TypeVar("Tile", TritonTile, HopperTile)


@dataclass(frozen=True)
class Regimes(Generic[Tile]):
    """Tiles by rows: ``tiles[i]`` serves up to ``bounds[i]`` rows, the last one any number above."""

    bounds: tuple[int, ...]
    tiles: tuple[Tile, ...]

    def __post_init__(self) -> None:
        if len(self.tiles) != len(self.bounds) + 1:
            raise ValueError(f"tiles: expected one more than {len(self.bounds)} bounds, got {len(self.tiles)}")

    def at(self, rows: int) -> Tile:
        """The tile for a call with room for ``rows`` rows."""
        return self.tiles[bisect_left(self.bounds, rows)]


class Order(NamedTuple):
    """How the tiles of a call are walked, and when it is launched: two of ``HopperTile``'s attributes."""

    group_rows: int
    pdl: bool


AHEAD = Order(0, pdl=True)  # early, and the first weights are fetched before the kernel before has ended
EARLY = Order(8, pdl=True)
LATE = Order(8, pdl=False)


def _cooperative(rows: int, columns: int, groups: int, stages: int, order: Order, *, block_k: int = 64) -> HopperTile:
    return HopperTile(rows, columns, groups, stages, block_k=block_k, **order._asdict())


def _ping_pong(rows: int, columns: int, stages: int, order: Order) -> HopperTile:
    return HopperTile(rows, columns, 2, stages, ping_pong=True, **order._asdict())


# Where ceil(tiles / 132) * tile area, which explains most of the ranking on 132 multiprocessors, changes its winner.
# Measured at 256, 576, 1296, 1728, 3996, 6912, 10368 and 16060 rows, one size in each regime.
HOPPER_BOUNDS = (384, 832, 1536, 2560, 5376, 8448, 12288)

# (columns of the output, columns of x) -> tiles. The figures: milliseconds of eight blocks of the tower at the size
# named above, on one H200 (triton 3.6.0, bf16; cad8d19, 37d51cf and 70349d5), with this tile and with the best of
# another shape. They differ by 1 % from run to run, and by 2 % where the GPU is at its power limit, from 1,296 rows on.
HOPPER_TILES: dict[tuple[int, int], Regimes[HopperTile]] = {
    # qkv: bias, rotary
    (3840, 1280): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(128, 64, 2, 8, AHEAD),  # 0.399, 0.400
            _cooperative(128, 160, 2, 5, EARLY),  # 0.611, 0.608
            _ping_pong(128, 160, 4, EARLY),  # 1.133, 1.136
            _ping_pong(64, 160, 6, Order(14, pdl=False)),  # 1.501, 1.541
            _cooperative(192, 128, 3, 4, AHEAD),  # 3.762, 3.752
            _cooperative(320, 128, 3, 3, AHEAD),  # 7.778, 7.790
            _cooperative(192, 128, 3, 4, LATE),  # 7.240, 7.350
            _cooperative(192, 128, 3, 4, LATE),  # 28.92, 28.72
        ),
    ),
    # proj: bias, residual
    (1280, 1280): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(64, 64, 1, 6, AHEAD, block_k=128),  # 0.400
            _cooperative(64, 128, 1, 7, EARLY),  # 0.594, 0.598
            _cooperative(128, 128, 2, 6, EARLY),  # 1.134, 1.146
            _cooperative(128, 144, 2, 5, EARLY),  # 1.464, 1.469
            _cooperative(320, 128, 3, 3, AHEAD),  # 3.784, 3.776
            _cooperative(192, 128, 3, 4, AHEAD),  # 7.774, 7.848
            _cooperative(128, 160, 2, 5, AHEAD),  # 7.284, 7.267
            _cooperative(320, 128, 3, 3, AHEAD),  # 28.46, 28.85
        ),
    ),
    # fc1: bias, quick_gelu
    (5120, 1280): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(64, 160, 1, 6, AHEAD),  # 0.410, 0.410
            _cooperative(192, 128, 3, 4, AHEAD),  # 0.614, 0.638
            _cooperative(192, 144, 3, 4, AHEAD),  # 1.103, 1.112
            _cooperative(192, 128, 3, 4, AHEAD),  # 1.481, 1.487
            _ping_pong(128, 128, 5, LATE),  # 3.759, 3.822
            _ping_pong(128, 128, 5, LATE),  # 7.733, 7.758
            _ping_pong(128, 128, 5, LATE),  # 7.321, 7.408
            _ping_pong(128, 128, 5, LATE),  # 28.95, 28.87
        ),
    ),
    # fc2: bias, residual
    (1280, 5120): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(64, 64, 1, 6, AHEAD, block_k=128),  # 0.409
            _cooperative(64, 128, 1, 7, LATE),  # 0.605, 0.612
            _cooperative(128, 128, 2, 6, LATE),  # 1.144, 1.149
            _cooperative(192, 96, 3, 5, AHEAD),  # 1.525, 1.526
            _cooperative(320, 128, 3, 3, AHEAD),  # 3.776, 3.822
            _cooperative(192, 128, 3, 4, AHEAD),  # 7.725, 7.863
            _cooperative(128, 160, 2, 5, LATE),  # 7.381, 7.289
            _cooperative(128, 256, 2, 3, LATE),  # 28.64, 28.96
        ),
    ),
}

# Any other weight: small tiles while few of them fill the GPU, then the best all-rounder of the four.
HOPPER_DEFAULT = Regimes(
    (384, 1536),
    (
        _cooperative(64, 64, 1, 6, AHEAD, block_k=128),
        _cooperative(128, 128, 2, 5, AHEAD),
        _cooperative(192, 128, 3, 4, LATE),
    ),
)

# Plain Triton, 16-bit inputs. Two regimes: few rows are bound by how many tiles there are, many by the tile's area.
# sm_90: serves what the Gluon kernel does not (rows that are no multiple of 16 bytes, newer Triton releases); its
# bound is one of the Gluon kernel's, so that those are all.
_SMALL = TritonTile(64, 64, 64, num_warps=4, num_stages=3)
_MIDDLE = TritonTile(128, 64, 64, num_warps=4, num_stages=3)
TRITON_TILES: dict[str, Regimes[TritonTile]] = {
    "sm_80": Regimes(
        (1024,),
        (
            TritonTile(64, 128, 64, num_warps=4, num_stages=4),
            TritonTile(128, 128, 64, num_warps=8, num_stages=4),
        ),
    ),
    # 99 KB of shared memory
    "sm_86": Regimes((1024,), (_SMALL, _MIDDLE)),
    "sm_89": Regimes((1024,), (_SMALL, _MIDDLE)),
    "sm_90": Regimes(
        (832,),
        (
            TritonTile(64, 128, 64, num_warps=4, num_stages=4),
            TritonTile(128, 128, 64, num_warps=8, num_stages=4),
        ),
    ),
    "sm_100": Regimes(
        (1024,),
        (
            TritonTile(64, 128, 64, num_warps=4, num_stages=4),
            TritonTile(128, 128, 64, num_warps=8, num_stages=3),
        ),
    ),
    "sm_120": Regimes((1024,), (_SMALL, _MIDDLE)),
    # 64 KB of local data share; no copies behind the registers, so two stages
    "gfx942": Regimes(
        (1024,),
        (
            TritonTile(64, 64, 64, num_warps=4, num_stages=2),
            TritonTile(128, 128, 64, num_warps=8, num_stages=2),
        ),
    ),
}
# Fits into 64 KB, the least that any GPU which Triton serves has.
TRITON_DEFAULT = Regimes((), (TritonTile(64, 64, 64, num_warps=4, num_stages=2),))
# fp32 multiplies in registers without matrix units, for exactness; the tile that does not spill anywhere.
TRITON_FLOAT32 = Regimes((), (TritonTile(64, 64, 16, num_warps=8, num_stages=2),))


def hopper_regimes(n: int, k: int) -> Regimes[HopperTile]:
    """Tiles of the Gluon kernel for a weight ``[n, k]``."""
    return HOPPER_TILES.get((n, k), HOPPER_DEFAULT)


@cache
def rotary_fits(n: int, k: int, head_dim: int) -> bool:
    """Whether each Gluon tile of a qkv weight ``[n, k]`` can rotate q and k in its epilogue.

    Heads consist of groups of 16 columns, a step of the sum is a row of swizzled shared memory (64 numbers), and no
    tile lies half in v.
    """
    return head_dim % 16 == 0 and all(
        tile.block_k == 64 and n // 3 * 2 % tile.columns == 0 for tile in hopper_regimes(n, k).tiles
    )


def triton_regimes(arch: str, *, float32: bool) -> Regimes[TritonTile]:
    """Tiles of the plain Triton kernel on ``arch`` (``"sm_90"``, ``"gfx942"``; unknown names get the default)."""
    return TRITON_FLOAT32 if float32 else TRITON_TILES.get(arch, TRITON_DEFAULT)


def row_regimes(device: torch.device) -> tuple[int, ...]:
    """The row counts up to which every linear and every small kernel keeps its variant on ``device``, ascending.

    A pass with room for each of these many rows, and one with room for more than the last, run every tile that a
    model of one dtype and shape can come to on the device.
    """
    bounds = triton_regimes(architecture(device), float32=False).bounds
    if why_not_hopper(device, torch.bfloat16) is None:
        bounds = HOPPER_BOUNDS
    return tuple(sorted({*bounds, EARLY_ROWS})) if launches_early(device) else bounds
