"""Which Gluon tile serves which sizes: every shipped one is reached, and the exported bounds are where it changes."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ernie_vit.kernels.tiles.attention import (
    HOPPER_LONG,
    HOPPER_MIDDLE,
    HOPPER_TILES,
    ROW_BOUNDS,
    SEQLEN_BOUNDS,
    SEQUENCE_COUNTS,
    hopper_tile,
    work_list_shape,
)

ROWS = (*ROW_BOUNDS, ROW_BOUNDS[-1] + 1)
SEQLENS = (*SEQLEN_BOUNDS, SEQLEN_BOUNDS[-1] + 1)


def test_the_bounds_reach_every_tile():
    """So a warm-up over them compiles all that any sizes can need."""
    assert {hopper_tile(*sizes) for sizes in product(ROWS, SEQLENS, SEQUENCE_COUNTS)} == set(HOPPER_TILES)


@pytest.mark.parametrize("rows", [5376, 8448, 16_384])
def test_a_program_an_item_where_few_of_a_default_graphs_stay_dead(rows):
    assert hopper_tile(rows, rows, rows // 256) == HOPPER_LONG
    assert hopper_tile(rows, rows, rows // 64) == HOPPER_MIDDLE


@pytest.mark.parametrize("bound", ROW_BOUNDS)
def test_the_tile_changes_behind_a_row_bound(bound):
    assert hopper_tile(bound, bound, 1) != hopper_tile(bound + 1, bound + 1, 1)


@pytest.mark.parametrize("bound", SEQLEN_BOUNDS)
def test_the_tile_changes_behind_a_seqlen_bound(bound):
    assert hopper_tile(16_384, bound, 1) != hopper_tile(16_384, bound + 1, 1)


@given(rows=st.integers(0, 20_000), max_seqlen=st.integers(0, 20_000), sequences=st.integers(0, 5_000))
def test_between_the_bounds_the_tile_is_that_of_a_bound(rows, max_seqlen, sequences):
    tile = hopper_tile(rows, max_seqlen, sequences)
    row = next((bound for bound in ROW_BOUNDS if rows <= bound), ROWS[-1])
    seqlen = next((bound for bound in SEQLEN_BOUNDS if max_seqlen <= bound), SEQLENS[-1])
    assert tile in {hopper_tile(row, seqlen, count) for count in SEQUENCE_COUNTS}


@given(rows=st.integers(1, 20_000), sequences=st.integers(0, 5_000))
def test_few_programs_are_dead(rows, sequences):
    """One program an item: some more than full items, one for each of 132 multiprocessors, and the last pieces."""
    tile, heads = hopper_tile(rows, rows, sequences), 16
    if not tile.persistent:
        programs = work_list_shape(rows, sequences, heads, tile.rows, at_once=132)[0] - 1
        assert programs <= 1.75 * heads * rows / tile.rows + 132 + 88


def rows_of_80(heads: int = 3) -> torch.Tensor:
    return torch.zeros(7, 3, heads, 80, dtype=torch.bfloat16)[:, 1]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("x", "readable"),
    [
        pytest.param(rows_of_80(), True, id="slice of a projection"),
        pytest.param(rows_of_80()[3:5], True, id="slice of rows"),
        pytest.param(rows_of_80(heads=1), True, id="one head"),
        pytest.param(rows_of_80().contiguous(), True, id="contiguous"),
        pytest.param(rows_of_80().transpose(0, 1).contiguous().transpose(0, 1), False, id="heads first"),
        pytest.param(rows_of_80()[:, :1].expand(7, 3, 80), False, id="one head for all"),
        pytest.param(rows_of_80()[:1].expand(7, 3, 80), False, id="one row for all"),
        pytest.param(torch.zeros(1681, dtype=torch.bfloat16)[1:].view(7, 3, 80), False, id="odd place"),
        pytest.param(torch.zeros(7, 244, dtype=torch.bfloat16)[:, :240].view(7, 3, 80), False, id="odd stride"),
    ],
)
def test_what_the_gluon_kernel_can_read(x: torch.Tensor, readable: bool):
    """The rest is read by plain Triton's, whatever its strides."""
    from ernie_vit.kernels.hopper import attention

    assert attention.readable(x) is readable
