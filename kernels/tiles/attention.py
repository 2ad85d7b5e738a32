"""Attention's tiles: how many query rows an item of work has, for each architecture and size of input.

The number of keys that a step takes is part of a row's rounding, so it is one number for each backend, dtype
and head_dim: a tile's height may then follow the load without a change of a bit.
"""

from dataclasses import dataclass, replace

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
    early: bool  # may start before the kernel before has ended

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups


# A Gluon tile is shipped after a soak of thousands of launches on poisoned outputs (bench/soak_attention.py), for bf16
# and fp16. One of 64 keys a step with maxnreg=80 had passed single checks and was wrong in nearly every launch.
HOPPER_SHORT = HopperTile(warpgroups=1, turns=False, persistent=True, programs=2, maxnreg=120, early=True)
HOPPER_MANY_SHORT = replace(HOPPER_SHORT, early=False)
HOPPER_ONE_ROUND = HopperTile(warpgroups=3, turns=True, persistent=False, programs=1, maxnreg=None, early=True)
HOPPER_TWO_ROUNDS = HopperTile(warpgroups=2, turns=True, persistent=True, programs=1, maxnreg=None, early=True)
HOPPER_MIDDLE = HopperTile(warpgroups=3, turns=True, persistent=True, programs=1, maxnreg=None, early=False)
HOPPER_LONG = replace(HOPPER_ONE_ROUND, early=False)
HOPPER_TILES = (HOPPER_SHORT, HOPPER_MANY_SHORT, HOPPER_ONE_ROUND, HOPPER_TWO_ROUNDS, HOPPER_MIDDLE, HOPPER_LONG)

# Where the Gluon tile changes: the last number of rows, and the greatest max_seqlen, before each change. Numbers of
# sequences on either side of the third change, at any number of rows below three million.
ROW_BOUNDS = (1024, 1536, 2048)
SEQLEN_BOUNDS = (256, 2048)
SEQUENCE_COUNTS = (1, 4096)


def hopper_tile(num_rows: int, max_seqlen: int, num_sequences: int) -> HopperTile:
    """The Gluon tile for ``num_rows`` rows in at most ``num_sequences`` sequences (capacities, as the host knows them).

    Time goes with rounds: ``ceil(items / 132)`` on 132 multiprocessors, or / 264 with two programs on each. A round
    takes 56 us for 4,096 keys by three warpgroups, 44 by two, 52 by two programs of one (H200, 700 W, triton 3.6.0,
    bf16). So for one sequence and 16 heads, at the end of each range:

    ============  ==================  =======  ================
    rows up to    one warpgroup, x 2  two      three
    ============  ==================  =======  ================
    1,024         52                  44       56
    1,536         104                 88       56
    2,048         104                 88       112
    3,072         156                 132      112
    4,608         260                 220      168
    ============  ==================  =======  ================

    Up to 1,024 rows one warpgroup's shorter start decides (256 rows: 5.2 us, three warpgroups 8.9), and 192-row items
    waste a third of sequences of 256 rows. Above 2,048 the rounds are many, and three warpgroups cost least a row.

    One program an item is balanced by the hardware as items end, where long and shorter sequences are mixed; but
    each program that a capacity allows for and a batch has not costs 6 ns. Persistent programs pay nothing for those,
    and their items overlap at the ends (8 x 1,296: 154 us, an item each 161). So an item each is for one round and
    for long sequences, and for few: at most a quarter more programs than full items, and one a multiprocessor.

    An early launch pays for small inputs, where the start is a part of the time that counts.
    """
    one_warpgroup, one_round, two_rounds = ROW_BOUNDS
    short, middle = SEQLEN_BOUNDS
    few = num_sequences <= num_rows // (4 * 192) + 8
    if num_rows <= one_warpgroup:
        return HOPPER_SHORT
    if max_seqlen <= short:
        return HOPPER_MANY_SHORT
    if num_rows <= one_round:
        return HOPPER_ONE_ROUND if few else HOPPER_MIDDLE
    if num_rows <= two_rounds:
        return HOPPER_TWO_ROUNDS
    return HOPPER_LONG if few and max_seqlen > middle else HOPPER_MIDDLE


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
    device: torch.device, dtype: torch.dtype, head_dim: int, *, num_rows: int, max_seqlen: int, num_sequences: int
) -> PlainTile | HopperTile:
    """The tile for ``num_rows`` rows (a capacity) in ``num_sequences`` sequences of at most ``max_seqlen``."""
    if head_dim == HOPPER_HEAD_DIM and dispatch.why_not_hopper(device, dtype) is None:
        return hopper_tile(num_rows, max_seqlen, num_sequences)
    return plain_tile(architecture(device), dtype)


def work_list_shape(num_rows: int, num_sequences: int, num_heads: int, tile_rows: int) -> tuple[int, int]:
    """Shape of the work list: a row for the count, and as many items as any ``num_sequences`` sequences can have.

    A sequence of n rows has at most ``n // tile_rows + 1`` tiles, and never more than n.
    """
    tiles = min(num_rows // tile_rows + num_sequences, num_rows)
    return 1 + num_heads * tiles, 4
