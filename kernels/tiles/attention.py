"""Attention's tiles: how many query rows an item of work has, for each architecture and size of input.

The number of keys that a step takes is part of a row's rounding, so it is one number for each backend, dtype
and head_dim: a tile's height may then follow the load without a change of a bit.
"""

from dataclasses import dataclass

import torch

from ernie_vit.kernels import dispatch

HOPPER_HEAD_DIM = 80


@dataclass(frozen=True)
class PlainTile:
    """A tile of the plain Triton kernel."""

    rows: int  # query rows of an item
    keys: int  # of a step
    num_warps: int  # 16 rows a warp at least: a row's sum must stay inside one warp
    num_stages: int
    programs: int  # resident on a multiprocessor at once


@dataclass(frozen=True)
class HopperTile:
    """A tile of the Gluon kernel; a step takes 128 keys in each. See ``kernels/hopper/attention.py``."""

    warpgroups: int  # of 64 query rows each
    turns: bool  # the warpgroups issue their products in a fixed order
    persistent: bool  # one program walks over many items; else one program an item
    programs: int  # resident on a multiprocessor at once
    maxnreg: int | None  # registers a thread at entry; None: as many as the threads leave

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups


# A Gluon tile is shipped after a soak of thousands of launches on poisoned outputs (bench/soak_attention.py), for bf16
# and fp16. One of 64 keys a step with maxnreg=80 had passed single checks and was wrong in nearly every launch.
HOPPER_SHORT = HopperTile(warpgroups=1, turns=False, persistent=True, programs=2, maxnreg=120)
HOPPER_MIDDLE = HopperTile(warpgroups=3, turns=True, persistent=True, programs=1, maxnreg=None)
HOPPER_LONG = HopperTile(warpgroups=3, turns=True, persistent=False, programs=1, maxnreg=None)
HOPPER_TILES = (HOPPER_SHORT, HOPPER_MIDDLE, HOPPER_LONG)


def hopper_tile(num_rows: int, max_seqlen: int) -> HopperTile:
    """The Gluon tile. Microseconds on an H200 (700 W, triton 3.6.0), 16 heads, bf16, best kernel of each kind:

    ==========  ===========================  =====================  ================================
    sequences   one warpgroup, an item each  three, persistent      three, an item each
    ==========  ===========================  =====================  ================================
    256         5.2                                                 8.9
    1,296       33                                                  24.0
    16,384                                   8 % above an item each 2,515
    16 x 256    25.7
    8 x 1,296                                154                    161
    ==========  ===========================  =====================  ================================

    One warpgroup: its 64-row items of 16 heads and 1,024 rows still run all at once, two on each of 132
    multiprocessors, and 192-row tiles waste a third of 256-row sequences. Persistent programs pay nothing for items
    that a capacity allows for and a batch has not; a program an item leaves more registers to the inner loop, which
    long sequences need. One warpgroup has registers to spare, so it is persistent.
    """
    if num_rows <= 1024 or max_seqlen <= 256:
        return HOPPER_SHORT
    return HOPPER_MIDDLE if max_seqlen <= 2048 else HOPPER_LONG


# Bytes of the dtype -> the plain kernel's tile, on a GPU that nobody measured yet: K and V of num_stages steps stay
# under the 64 KiB of gfx942, and no register is spilled at any head_dim up to 128.
DEFAULT_TILES: dict[int, PlainTile] = {
    2: PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=2),
    4: PlainTile(rows=32, keys=32, num_warps=4, num_stages=2, programs=3),
}
# Measured ones. H200, 16 heads of 80, bf16: 6.9 us at 256 rows, 30.4 at 1,296, 24.6 at 16 x 256, better than 128 rows
# with 8 warps up to 4,096 rows; three programs fit by registers (168).
PLAIN_TILES: dict[str, dict[int, PlainTile]] = {
    "sm_90": {**DEFAULT_TILES, 2: PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=3)},
}


def plain_tile(arch: str, dtype: torch.dtype) -> PlainTile:
    """The plain Triton kernel's tile on an architecture such as ``"sm_90"`` or ``"gfx942"``."""
    return PLAIN_TILES.get(arch, DEFAULT_TILES)[4 if dtype == torch.float32 else 2]


def architecture(device: torch.device) -> str:
    """The architecture of ``device`` as the tables name it; ``"cpu"`` for the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def attention_tile(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_rows: int, max_seqlen: int
) -> PlainTile | HopperTile:
    """The tile for ``num_rows`` rows (a capacity) in sequences of at most ``max_seqlen``; host facts only.

    Both the maker of a work list and its user ask here, so that they agree on the height of an item.
    """
    if head_dim == HOPPER_HEAD_DIM and dispatch.why_not_hopper(device, dtype) is None:
        return hopper_tile(num_rows, max_seqlen)
    return plain_tile(architecture(device), dtype)


def work_list_shape(num_rows: int, num_sequences: int, num_heads: int, tile_rows: int) -> tuple[int, int]:
    """Shape of the work list: a row for the count, and as many items as any ``num_sequences`` sequences can have.

    A sequence of n rows has at most ``n // tile_rows + 1`` tiles, and never more than n.
    """
    tiles = min(num_rows // tile_rows + num_sequences, num_rows)
    return 1 + num_heads * tiles, 4
