"""Attention's tiles: how many query rows an item of work has, for each architecture and size of input.

The number of keys that a step takes is part of a row's rounding, so it is one number for each backend, dtype
and head_dim: a tile's height may then follow the load without a change of a bit.
"""

from dataclasses import dataclass

import torch

from ernie_vit.kernels import dispatch
from ernie_vit.kernels.triton.grid import multiprocessors

HOPPER_HEAD_DIM = 80
# Of the rows of a piece, where items are cut: a warpgroup's.
PIECE_ROWS = 64


@dataclass(frozen=True)
class PlainTile:
    """A tile of the plain Triton kernel."""

    rows: int  # query rows of an item
    keys: int  # of a step
    num_warps: int  # of a 16-bit dtype, 16 rows a warp at least: a row's sum must stay inside one warp
    num_stages: int
    programs: int  # resident on a multiprocessor at once


@dataclass(frozen=True)
class HopperTile:
    """A tile of the Gluon kernel; a step takes 128 keys in each. See ``kernels/hopper/attention.py``."""

    warpgroups: int  # of 64 query rows each
    persistent: bool  # one program walks over many items; else one program an item
    cut: bool  # the last round's items are cut into pieces where many multiprocessors would be idle
    programs: int = 1  # resident on a multiprocessor at once
    maxnreg: int | None = None  # registers a thread at entry; None: as many as the threads leave

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups


# A Gluon tile is shipped after a soak of thousands of launches on poisoned outputs (bench/soak_attention.py), for bf16
# and fp16, alone on the GPU and beside another process. One of 64 keys a step, with 80 registers a thread at entry,
# failed in nearly every launch. The one of one warpgroup left NaN in one launch of 300 beside another process while it
# initialised barriers that it does not use; without them it is clean.
HOPPER_SHORT = HopperTile(warpgroups=1, persistent=True, cut=False, programs=2, maxnreg=120)
HOPPER_TWO_ROUNDS = HopperTile(warpgroups=2, persistent=True, cut=False)
HOPPER_MIDDLE = HopperTile(warpgroups=3, persistent=True, cut=True)
HOPPER_LONG = HopperTile(warpgroups=3, persistent=False, cut=True)
HOPPER_TILES = (HOPPER_SHORT, HOPPER_TWO_ROUNDS, HOPPER_MIDDLE, HOPPER_LONG)

# Where the Gluon tile changes: the last number of rows, and the greatest max_seqlen, before each change. Numbers of
# sequences on either side of the change by their number, at any number of rows below a million.
ROW_BOUNDS = (1024, 1536, 2048)
SEQLEN_BOUNDS = (256, 2048)
SEQUENCE_COUNTS = (1, 4096)


def hopper_tile(num_rows: int, max_seqlen: int, num_sequences: int) -> HopperTile:
    """The Gluon tile for ``num_rows`` rows in at most ``num_sequences`` sequences (capacities, as the host knows them).

    Microseconds for 16 heads, by one, two or three warpgroups, in persistent programs or a program an item, the three's
    with their last round cut (H200, 700 W, triton 3.6.0, bf16; 008764b):

    =============================  =====  =====  =======  =====  =======
    rows                           1      2      2, item  3      3, item
    =============================  =====  =====  =======  =====  =======
    256                            5.1    7.1    6.8      7.4    7.2
    576                            10.3   11.2   10.9     12.9   12.2
    1,024                          15.0   16.2   15.9     19.8   19.6
    1,296                          30.4   35.0   36.7     25.4   24.9
    1,728                          43.5   43.7   45.8     49.0   47.5
    2,304                          71.6   78.1   82.7     66.0   65.0
    3,996                          180.1  174.6  181.9    176.4  172.6
    4,096                          178.5  173.1  181.3    175.2  172.1
    6,912                          508.7  486.7  499.5    455.5  442.3
    16,060                         2,852  2,719  2,712    2,468  2,427
    16 x 256                       23.1   25.3   33.3     33.1   33.8
    8 x 576                        44.4   42.9   52.8     39.4   43.6
    8 x 1,296                      168.2  173.9  192.8    155.5  163.8
    576, 1,296, 4,096, 256, 1,728  239.1  234.0  246.8    229.1  216.6
    1,296 in (16,384 rows, 1)      29.9   34.3   39.6     25.2   33.3
    1,296 in (16,384, 64)          30.0   34.3   47.1     25.5   41.9
    16,060 in (16,384, 64)         2,827  2,696  2,690    2,487  2,353
    =============================  =====  =====  =======  =====  =======

    Time goes with rounds: ``ceil(items / 132)`` on 132 multiprocessors, or / 264 with two programs on each. Up to
    1,024 rows one warpgroup's shorter start decides, and 192-row items waste a third of sequences of 256 rows. Up to
    1,536 rows three warpgroups need one round, up to 2,048 two warpgroups two. Above, the rounds are many, and three
    warpgroups cost least a row.

    One program an item is faster for long sequences, for a reason not known: their loops are alike, and persistent
    programs that draw their items are no faster. But each program that a capacity allows for and a batch has not costs
    6 ns. Persistent programs pay nothing for those, and their items overlap at the ends. So an item each is for one
    round and for long sequences, where sequences are few. A quarter of the tower took, times four, with an item each
    and with items drawn: 110 and 116 ms at 16,060 rows in (16,384 rows, 64 sequences), 30.1 and 31.0 at 6,912 in
    (8,448, 33), 28.9 and 28.6 at 8 x 1,296 in (12,288, 48); and 6.3 and 5.7 at 1,296 in (16,384, 64), where most
    programs are dead.
    """
    one_warpgroup, one_round, two_rounds = ROW_BOUNDS
    short, middle = SEQLEN_BOUNDS
    few = num_sequences <= num_rows // 256 + 2
    if num_rows <= one_warpgroup or max_seqlen <= short:
        return HOPPER_SHORT
    if num_rows <= one_round:
        return HOPPER_LONG if few else HOPPER_MIDDLE
    if num_rows <= two_rounds:
        return HOPPER_TWO_ROUNDS
    return HOPPER_LONG if few and max_seqlen > middle else HOPPER_MIDDLE


# Bytes of the dtype -> the plain kernel's tile, on a GPU that nobody measured yet: K and V of num_stages steps stay
# under the 64 KiB of gfx942 and the 99 KiB of others. No register is spilled at head_dim 80; at a few others triton 3.6
# spills 8 to 24 bytes a thread on sm_80, sm_100 and sm_120.
DEFAULT_TILES: dict[int, PlainTile] = {
    2: PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=2),
    4: PlainTile(rows=32, keys=32, num_warps=8, num_stages=2, programs=3),
}
# Measured ones. H200, 16 heads of 80, bf16: 6.9 us at 256 rows, 30.4 at 1,296, 24.6 at 16 x 256, better than 128 rows
# with 8 warps up to 4,096 rows; three programs fit by registers (168).
PLAIN_TILES: dict[str, dict[int, PlainTile]] = {
    "sm_90": {**DEFAULT_TILES, 2: PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=3)},
}


def plain_tile(arch: str, dtype: torch.dtype) -> PlainTile:
    """The plain Triton kernel's tile on an architecture such as ``"sm_90"`` or ``"gfx942"``."""
    return PLAIN_TILES.get(arch, DEFAULT_TILES)[4 if dtype == torch.float32 else 2]


def attention_tile(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, num_rows: int, max_seqlen: int, num_sequences: int
) -> PlainTile | HopperTile:
    """The tile for ``num_rows`` rows (a capacity) in ``num_sequences`` sequences of at most ``max_seqlen``."""
    if head_dim == HOPPER_HEAD_DIM and dispatch.why_not_hopper(device, dtype) is None:
        return hopper_tile(num_rows, max_seqlen, num_sequences)
    return plain_tile(dispatch.architecture(device), dtype)


def items_at_once(tile: PlainTile | HopperTile, device: torch.device) -> int:
    """How many items make a round, for the maker of the work list; 1 if it shall cut none."""
    return multiprocessors(device) * tile.programs if isinstance(tile, HopperTile) and tile.cut else 1


def work_list_shape(num_rows: int, num_sequences: int, num_heads: int, tile_rows: int, at_once: int) -> tuple[int, int]:
    """Shape of the work list: a row for the count, and as many items as any ``num_sequences`` sequences can have.

    A sequence of n rows has at most ``n // tile_rows + 1`` tiles, and never more than n. The pieces of a last round of
    ``at_once`` items stay in this round.
    """
    tiles = min(num_rows // tile_rows + num_sequences, num_rows)
    last = num_heads * tiles % at_once
    pieces = -(-tile_rows // PIECE_ROWS)
    return 1 + num_heads * tiles + min((pieces - 1) * last, at_once - last if last else 0), 5
