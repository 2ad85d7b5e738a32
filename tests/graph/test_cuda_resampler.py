"""A captured resampler has the bits of its eager call, whatever the call holds, on memory that is NaN elsewhere."""

import copy
import random

import pytest
import torch
from accuracy import assert_within_budget
from cuda_graphs import MIB, assert_same, eager, poison, rows_of, small_encoder, wide_encoder

from ernie_vit.kernels.compilation import compilations
from ernie_vit.model.metadata import tokens_per_item

pytestmark = pytest.mark.gpu

CAPACITIES = [(256, 4), (1024, 16), (2560, 64)]
EDGES = [rows + step for rows, _ in CAPACITIES for step in (-4, 0, 4)]
MIXED = [[1, 16, 16], [4, 8, 8], [1, 2, 2], [2, 4, 6], [1, 6, 4]]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch, 64 * MIB)


@pytest.fixture
def encoder():
    return captured(small_encoder())


def captured(encoder):
    encoder.capture(resampler=True, capacities=CAPACITIES)
    return encoder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_around_each_capacitys_edge(dtype):
    encoder = captured(small_encoder(dtype))
    for rows in EDGES[:-1]:
        assert_same(encoder, [[1, 2, rows // 2]], seed=rows)
        assert_same(encoder, [[1, 8, 8], [1, 2, (rows - 64) // 2]], seed=rows)


def test_one_to_64_items_of_any_kind(encoder):
    rng = random.Random(0)
    for items in range(1, 65):
        grid = [[rng.choice([1, 1, 2, 4]), 2 * rng.randint(1, 9), 2 * rng.randint(1, 9)] for _ in range(items)]
        assert_same(encoder, grid, seed=items)


def test_equal_totals_with_other_splits(encoder):
    for grid in ([[1, 16, 16], [1, 8, 8]], [[1, 8, 8], [1, 16, 16]], [[1, 8, 40]], [[2, 8, 20]], [[4, 8, 10]]):
        assert_same(encoder, grid)


def test_calls_that_are_cut_between_frames(encoder):
    for grid in ([[6, 24, 24]], [[1, 16, 16], [6, 24, 24], [1, 8, 8]], [[1, 32, 32]] * 4, [[1, 8, 8]]):
        replays = encoder.graph_stats().replays
        assert_same(encoder, grid)
        assert encoder.graph_stats().replays - replays == (1 if grid == [[1, 8, 8]] else 2)


def test_frames_that_no_graph_holds_and_calls_that_cannot_be_replayed(encoder):
    for grid in ([[1, 8, 8], [1, 52, 52], [4, 4, 4]], [[1, 60, 60]]):
        pixel_values = rows_of(encoder, grid)
        assert torch.equal(encoder(pixel_values, grid), eager(encoder, pixel_values, grid))
    pixel_values = rows_of(encoder, MIXED)
    replayed = encoder(pixel_values, MIXED)
    encoder.train()
    assert torch.equal(encoder(pixel_values, MIXED), replayed)
    assert encoder.graph_stats().fallbacks == {"frame larger than every graph": 2, "training mode": 1}


def test_no_images(encoder):
    assert encoder(torch.empty(0, 588, device="cuda"), []).shape == (0, encoder.config.text_hidden_size)


def test_an_item_has_the_same_bits_alone_packed_and_in_every_graph(encoder):
    rows = rows_of(encoder, MIXED).split([t * h * w for t, h, w in MIXED])
    alone = [encoder(row, [item]) for row, item in zip(rows, MIXED, strict=True)]
    for repeats in (1, 2, 5, 9):  # the middle graph, the largest, two graphs, three
        packed = encoder(torch.cat(rows * repeats), MIXED * repeats).split(tokens_per_item(MIXED) * repeats)
        assert all(torch.equal(tokens, alone[i % len(MIXED)]) for i, tokens in enumerate(packed)), repeats


def test_results_belong_to_the_caller(encoder):
    grids = [[[1, 8, 8]], [[1, 16, 16], [2, 8, 8]], [[1, 40, 40]], [[6, 24, 24]]]
    rows = [rows_of(encoder, grid, seed) for seed, grid in enumerate(grids)]
    expected = [eager(encoder, x, grid) for x, grid in zip(rows, grids, strict=True)]
    results = [encoder(rows[i % 4], grids[i % 4]) for i in range(400)]
    assert all(torch.equal(result, expected[i % 4]) for i, result in enumerate(results))


def test_never_waits_and_compiles_nothing_after_capture(encoder):
    """Also a cut call, whose frames are resampled together: more rows than any graph has."""
    grids = [[[1, 16, 16]], MIXED, [[1, 2, 2]] * 16, [[6, 24, 24]], [[1, 50, 50]] * 3]
    rows = [rows_of(encoder, grid) for grid in grids]
    compiled = compilations()
    for x, grid in zip(rows, grids, strict=True):  # loads what PyTorch loads at first use
        encoder(x, grid)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, grid in zip(rows, grids, strict=True):
            encoder(x, grid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compilations() == compiled


def test_is_as_near_to_float64_as_torch(encoder):
    pixel_values = rows_of(encoder, MIXED)
    plain, exact = (copy.deepcopy(encoder) for _ in range(2))
    for other in (plain, exact):
        other.set_backend("torch")
    expected = exact.double()(pixel_values.double(), MIXED)
    assert_within_budget(encoder(pixel_values, MIXED), plain(pixel_values, MIXED), expected)


def test_torchs_resampler_until_capture_and_after_release():
    encoder = small_encoder()
    pixel_values = rows_of(encoder, MIXED)
    before = encoder(pixel_values, MIXED)
    captured(encoder)
    assert not torch.equal(encoder(pixel_values, MIXED), before)
    encoder.release()
    assert torch.equal(encoder(pixel_values, MIXED), before)


def test_weights_changed_in_place_take_effect_and_moved_ones_drop_the_graphs(encoder):
    pixel_values = rows_of(encoder, MIXED)
    before = encoder(pixel_values, MIXED)
    encoder.resampler_model.after_norm.weight.mul_(2)
    assert torch.equal(encoder(pixel_values, MIXED), 2 * before)
    weight = encoder.resampler_model.mlp.weight
    weight.data = 2 * weight.data
    assert torch.equal(encoder(pixel_values, MIXED), eager(encoder, pixel_values, MIXED))
    assert encoder.graph_stats().fallbacks == {"weights moved": 1}
    captured(encoder)
    assert_same(encoder, MIXED)


def test_the_models_own_width(monkeypatch):
    poison(monkeypatch, 600 * MIB)
    encoder = wide_encoder()
    encoder.capture(resampler=True, max_tokens=4096)
    sizes = [(16, 16), (24, 24), (36, 36), (36, 48), (54, 74), (72, 96), (110, 146), (128, 128)]
    for grid in [*([[1, *size]] for size in sizes), [[1, 36, 36]] * 8, [[16, 24, 34]], [[1, 16, 16]]]:
        assert_same(encoder, grid)
