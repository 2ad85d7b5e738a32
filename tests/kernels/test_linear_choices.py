"""Which kernel and which tile serve a linear, on made-up machines."""

from collections.abc import Callable, Hashable
from itertools import pairwise

import pytest
import torch

from ernie_vit.kernels import linear
from ernie_vit.kernels.dispatch import architecture, small_kernel_launches_early, why_not_hopper
from ernie_vit.kernels.tiles.attention import DEFAULT_TILES, plain_tile
from ernie_vit.kernels.tiles.linear import (
    HOPPER_DEFAULT,
    HOPPER_TILES,
    TRITON_DEFAULT,
    Regimes,
    TritonTile,
    hopper_regimes,
    row_regimes,
    triton_regimes,
)

GPU = torch.device("cuda", 0)
MACHINES = [
    *(
        {"name": f"sm_{major}{minor}", "capability": (major, minor)}
        for major, minor in [(8, 0), (8, 6), (9, 0), (10, 0)]
    ),
    {"name": "Hopper, newer triton", "capability": (9, 0), "triton": "3.9.0"},
    {"name": "unknown", "capability": (12, 1)},
    {"name": "AMD", "capability": (9, 4), "hip": "6.4"},
]
MOST_ROWS = 20_000


def variants(rows: int) -> tuple[Hashable, ...]:
    """All that the number of rows decides on this machine."""
    found: list[Hashable] = [small_kernel_launches_early(GPU, rows)]
    found += [triton_regimes(architecture(GPU), float32=float32).at(rows) for float32 in (False, True)]
    if why_not_hopper(GPU, torch.bfloat16) is None:
        found += [hopper_regimes(*shape).at(rows) for shape in (*HOPPER_TILES, (168, 72))]
    return tuple(found)


@pytest.mark.parametrize("of", MACHINES, ids=lambda of: of["name"])
def test_variants_change_behind_the_row_regimes_and_nowhere_else(machine: Callable[..., None], of: dict) -> None:
    """So a warm-up that has run each regime, and more rows than the last one, has run all."""
    machine(**of)
    changes = [rows for rows, after in pairwise(range(1, MOST_ROWS)) if variants(rows) != variants(after)]
    assert tuple(changes) == row_regimes(GPU)


def test_an_unknown_gpu_gets_the_tiles_that_fit_everywhere(machine: Callable[..., None]) -> None:
    machine(name="unknown", capability=(12, 1))
    assert triton_regimes(architecture(GPU), float32=False) is TRITON_DEFAULT
    assert plain_tile(architecture(GPU), torch.bfloat16) is DEFAULT_TILES[2]
    assert plain_tile(architecture(GPU), torch.float32) is DEFAULT_TILES[4]
    assert hopper_regimes(168, 72) is HOPPER_DEFAULT  # nor does every weight have tiles of its own


def test_a_regime_ends_with_its_bound() -> None:
    few, more, many = (TritonTile(rows, 64, 64, num_warps=4, num_stages=2) for rows in (32, 64, 128))
    regimes = Regimes((100, 200), (few, more, many))
    assert [regimes.at(rows) for rows in (0, 1, 100, 101, 200, 201, 10**6)] == [few, few, few, more, more, many, many]
    with pytest.raises(ValueError, match="tiles: expected one more than 2 bounds, got 2"):
        Regimes((100, 200), (few, more))


def at_odd_place(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers, two bytes further in memory."""
    return torch.empty(matrix.numel() + 1, dtype=matrix.dtype)[1:].view(matrix.shape).copy_(matrix)


def with_stride(matrix: torch.Tensor, more: int) -> torch.Tensor:
    return torch.empty(len(matrix), matrix.shape[1] + more, dtype=matrix.dtype)[:, :-more].copy_(matrix)


X, WEIGHT, RESIDUAL = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((70, 160), (320, 160), (70, 320)))


@pytest.mark.parametrize(
    ("change", "hopper"),
    [
        pytest.param({}, True, id="contiguous"),
        pytest.param({"residual": RESIDUAL}, True, id="with a residual"),
        pytest.param({"x": X[3:8]}, True, id="slice of rows"),
        pytest.param({"x": X[:0]}, True, id="no rows"),
        pytest.param({"x": with_stride(X, 8), "residual": with_stride(RESIDUAL, 16)}, True, id="aligned strides"),
        pytest.param({"x": at_odd_place(X)}, False, id="x at an odd place"),
        pytest.param({"weight": at_odd_place(WEIGHT)}, False, id="weight at an odd place"),
        pytest.param({"residual": at_odd_place(RESIDUAL)}, False, id="residual at an odd place"),
        pytest.param({"x": with_stride(X, 1)}, False, id="odd stride of x"),
        pytest.param({"weight": with_stride(WEIGHT, 4)}, False, id="odd stride of the weight"),
        pytest.param({"residual": with_stride(RESIDUAL, 2)}, False, id="odd stride of the residual"),
        pytest.param({"x": X[:1].expand(70, 160)}, False, id="one row for all"),
        pytest.param({"weight": WEIGHT[:317]}, False, id="odd columns of the output"),
        pytest.param(
            {"x": with_stride(X[:, :156], 4), "weight": with_stride(WEIGHT[:, :156], 4)}, False, id="odd columns"
        ),
    ],
)
def test_gluon_serves_what_tma_can_describe(monkeypatch: pytest.MonkeyPatch, change: dict, hopper: bool) -> None:
    monkeypatch.setattr(linear, "why_not_hopper", lambda *_: None)
    assert linear.runs_on_hopper(**({"x": X, "weight": WEIGHT} | change)) is hopper


def test_gluon_serves_nobody_where_it_does_not_run() -> None:
    assert not linear.runs_on_hopper(X, WEIGHT)
