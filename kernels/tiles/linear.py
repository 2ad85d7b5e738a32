"""Tiles of the linears: which shape serves which weight and how many rows, per architecture.

Every tile gives the same bits, so a choice here decides the time alone. It follows the rows a call has room for
(the capacity), never the live ones, which the host does not know. Times are microseconds on one H200 in a CUDA graph,
bf16, epilogue included, taken on the prototype of the Gluon kernel, which walked all its tiles in groups of rows; those
of this kernel are not measured one by one yet. ``bench/tune_linear.py`` does, and prints rows for these tables.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

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


def _cooperative(rows: int, columns: int, groups: int, stages: int, *, pdl: bool, block_k: int = 64) -> HopperTile:
    order = 0 if pdl else 8
    return HopperTile(rows, columns, groups, stages, block_k=block_k, group_rows=order, pdl=pdl)


def _ping_pong(rows: int, columns: int, stages: int, *, pdl: bool, group_rows: int = 8) -> HopperTile:
    return HopperTile(rows, columns, 2, stages, ping_pong=True, group_rows=0 if pdl else group_rows, pdl=pdl)


# Where ceil(tiles / 132) * tile area, which explains most of the ranking on 132 multiprocessors, changes its winner.
# Measured at 256, 576, 1296, 1728, 3996, 6912 and 10368 rows, one size in each regime.
HOPPER_BOUNDS = (384, 832, 1536, 2560, 5376, 8448)

# (columns of the output, columns of x) -> tiles; the figure is the time of one call at the size named above.
HOPPER_TILES: dict[tuple[int, int], Regimes[HopperTile]] = {
    # qkv: bias
    (3840, 1280): Regimes(
        HOPPER_BOUNDS,
        (
            _ping_pong(64, 128, 6, pdl=True),  # 7.5 with 128 columns of x a step
            _cooperative(192, 128, 3, 4, pdl=True),  # 12.9
            _cooperative(128, 160, 2, 5, pdl=True),  # 23.8, ping-pong without early launch
            _ping_pong(64, 160, 6, pdl=False, group_rows=14),  # 28.6
            _cooperative(192, 128, 3, 4, pdl=True),  # 56.4
            _cooperative(320, 128, 3, 3, pdl=True),  # 94.4
            _cooperative(192, 128, 3, 4, pdl=False),  # 145.1
        ),
    ),
    # proj: bias, residual
    (1280, 1280): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(64, 64, 1, 6, block_k=128, pdl=True),  # 4.5
            _ping_pong(64, 128, 6, pdl=True),  # 6.4
            _ping_pong(128, 128, 5, pdl=True),  # 10.6
            _cooperative(192, 96, 3, 5, pdl=True),  # 13.0
            _cooperative(320, 128, 3, 3, pdl=True),  # 22.7
            _cooperative(192, 128, 3, 4, pdl=True),  # 38.3
            _cooperative(128, 160, 2, 5, pdl=True),  # 56.1
        ),
    ),
    # fc1: bias, quick_gelu
    (5120, 1280): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(64, 160, 1, 6, pdl=True),  # 9.6
            _cooperative(192, 128, 3, 4, pdl=True),  # 15.2
            _ping_pong(128, 160, 4, pdl=True),  # 32.3
            _ping_pong(64, 160, 6, pdl=False, group_rows=14),  # 38.7
            _ping_pong(128, 128, 5, pdl=False),  # 80.7
            _ping_pong(128, 128, 5, pdl=False),  # 130.5
            _ping_pong(128, 128, 5, pdl=False),  # 194.1
        ),
    ),
    # fc2: bias, residual
    (1280, 5120): Regimes(
        HOPPER_BOUNDS,
        (
            _cooperative(64, 64, 1, 6, block_k=128, pdl=True),  # 11.4
            _cooperative(64, 128, 1, 4, block_k=128, pdl=True),  # 18.4
            _cooperative(128, 128, 2, 6, pdl=False),  # 29.7
            _cooperative(192, 96, 3, 5, pdl=True),  # 38.3
            _cooperative(320, 128, 3, 3, pdl=True),  # 72.3
            _cooperative(192, 128, 3, 4, pdl=True),  # 129.6
            _cooperative(128, 160, 2, 5, pdl=False),  # 204.7
        ),
    ),
}

# Any other weight: small tiles while few of them fill the GPU, then the best all-rounder of the four.
HOPPER_DEFAULT = Regimes(
    (384, 1536),
    (
        _cooperative(64, 64, 1, 6, block_k=128, pdl=True),
        _cooperative(128, 128, 2, 5, pdl=True),
        _cooperative(192, 128, 3, 4, pdl=False),
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
