"""Replays have the bits of eager calls, on memory that is NaN wherever they must not look.

Every test runs twice: with the resampler behind the graphs, and with the resampler in them.
"""

import random

import numpy as np
import pytest
import torch
from cuda_graphs import MIB, assert_same, eager, poison, rows_of, small_encoder, wide_encoder

from ernie_vit.kernels.compilation import compilations

pytestmark = pytest.mark.gpu

CAPACITIES = [(256, 4), (1024, 16), (2560, 64)]
ROWS_AROUND = [rows + step for rows, _ in CAPACITIES for step in (-4, 0, 4)]
SEQUENCES_AROUND = [sequences + step for _, sequences in CAPACITIES for step in (-1, 0, 1)]
MIXED = [[1, 16, 16], [4, 8, 8], [1, 2, 2], [2, 4, 6], [1, 6, 4]]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch, 64 * MIB)


@pytest.fixture
def encoder(captured):
    return captured(small_encoder(), capacities=CAPACITIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_around_each_capacitys_rows(captured, dtype):
    encoder = captured(small_encoder(dtype), capacities=CAPACITIES)
    for rows in ROWS_AROUND:
        assert_same(encoder, [[1, 8, 8], [1, 2, (rows - 64) // 2]], seed=rows)
    for rows in ROWS_AROUND[:-1]:  # one image more than the largest graph's rows is not replayed
        assert_same(encoder, [[1, 2, rows // 2]], seed=rows)


def test_around_each_capacitys_sequences(encoder):
    for sequences in SEQUENCES_AROUND:
        assert_same(encoder, [[1, 2, 2]] * sequences, seed=sequences)


def test_graphs_full_of_rows_and_of_sequences(encoder):
    for rows, sequences in CAPACITIES:
        assert_same(encoder, [[1, 4, rows // sequences // 4]] * sequences)
    stats = encoder.graph_stats()
    assert stats.live_rows == stats.captured_rows == sum(rows for rows, _ in CAPACITIES)


def test_one_to_64_items_of_any_kind(encoder):
    rng = random.Random(0)
    for items in range(1, 65):
        grid = [[rng.choice([1, 1, 2, 4]), 2 * rng.randint(1, 9), 2 * rng.randint(1, 9)] for _ in range(items)]
        assert_same(encoder, grid, seed=items)


def test_equal_totals_with_other_splits(encoder):
    for grid in (
        [[1, 16, 16], [1, 8, 8]],
        [[1, 8, 8], [1, 16, 16]],
        [[1, 8, 40]],
        [[1, 4, 80]],
        [[2, 8, 20]],
        [[4, 8, 10]],
    ):
        assert_same(encoder, grid)


def test_one_sequence_may_take_all_rows_of_a_graph_that_held_many(captured):
    encoder = captured(small_encoder(), capacities=[(1024, 4)])
    for grid in ([[1, 16, 16]] * 4, [[1, 32, 32]], [[4, 16, 16]]):
        assert_same(encoder, grid)


def test_a_video_of_more_frames_than_sequences_takes_several_replays(captured):
    encoder = captured(small_encoder(), capacities=[(1024, 4)])
    assert_same(encoder, [[8, 4, 4]])
    assert encoder.graph_stats().replays == 2


def test_calls_are_cut_between_frames(encoder):
    for grid in ([[6, 24, 24]], [[1, 16, 16], [6, 24, 24], [1, 8, 8]], [[1, 32, 32]] * 4, [[1, 8, 8]]):
        replays = encoder.graph_stats().replays
        assert_same(encoder, grid)
        assert encoder.graph_stats().replays - replays == (1 if grid == [[1, 8, 8]] else 2)


def test_what_cannot_be_replayed_has_the_same_bits(encoder):
    for grid in ([[1, 8, 8], [1, 52, 52], [4, 4, 4]], [[1, 60, 60]]):
        pixel_values = rows_of(encoder, grid)
        assert torch.equal(encoder(pixel_values, grid), eager(encoder, pixel_values, grid))
    pixel_values = rows_of(encoder, MIXED)
    replayed = encoder(pixel_values, MIXED)
    encoder.train()
    assert torch.equal(encoder(pixel_values, MIXED), replayed)
    assert encoder.graph_stats().fallbacks == {"frame larger than every graph": 2, "training mode": 1}


def test_no_images(encoder):
    pixel_values = torch.empty(0, 588, device="cuda")
    assert encoder(pixel_values, []).shape == (0, encoder.config.text_hidden_size)


def test_several_graphs_in_one_pool_do_not_spoil_each_other(captured):
    encoder = captured(small_encoder(), capacities=[(4 * tokens, 8) for tokens in (64, 128, 256, 512, 1024, 2048)])
    for grid in ([[1, 16, 16]], [[1, 52, 92]], [[1, 16, 16]], [[1, 32, 32]], [[1, 16, 16]] * 8):
        assert_same(encoder, grid)


@pytest.mark.parametrize(
    ("capacities", "grid"),
    [
        pytest.param([(256, 64), (65536, 256)], [[1, 16, 16]], id="many sequences for few rows"),
        pytest.param([(400, 8)], [[1, 20, 20]], id="rows that no tile divides"),
        pytest.param([(4, 1)], [[1, 2, 2]], id="one token"),
    ],
)
def test_unusual_capacities(captured, capacities, grid):
    assert_same(captured(small_encoder(), capacities=capacities), grid)


@pytest.mark.parametrize("max_tokens", [None, 4096, 5000])
def test_default_capacities(captured, max_tokens):
    encoder = captured(small_encoder(), max_tokens=max_tokens)
    rows = [capacity.rows for capacity in encoder._graphs.capacities]
    assert rows == sorted(set(rows))
    assert rows[-1] == 4 * (max_tokens or 6177)
    for grid in ([[1, 16, 16]], [[1, 36, 36]], [[1, 128, 128]], [[1, 36, 36]] * 8, [[16, 24, 34]]):
        assert_same(encoder, grid)


def test_small_large_small_500_times_with_allocator_churn(encoder):
    """The large ones go up to 80x80 patches, which no graph holds."""
    rng = random.Random(1)
    small = [[1, 16, 16]]
    pixel_values = rows_of(encoder, small)
    first = encoder(pixel_values, small)
    kept = []
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        large = [[1, 2 * rng.randint(2, 40), 2 * rng.randint(2, 40)] for _ in range(rng.randint(1, 3))]
        encoder(torch.randn(sum(height * width for _, height, width in large), 588, device="cuda"), large)
        kept = [*kept[-8:], torch.full((rng.randint(1, 8 * MIB),), float("nan"), device="cuda")]
        if rng.random() < 0.1:
            torch.cuda.empty_cache()
        wrong += (encoder(pixel_values, small) != first).sum()
    assert int(wrong) == 0
    assert torch.equal(first, eager(encoder, pixel_values, small))
    stats = encoder.graph_stats()
    assert stats.calls == 1001
    assert 0 < stats.fallbacks["frame larger than every graph"] < 500


def test_1000_calls_without_waiting_and_all_results_kept(encoder):
    grids = [[[1, 8, 8]], [[1, 16, 16], [2, 8, 8]], [[6, 24, 24]], [[1, 32, 32]] * 3, [[1, 50, 50]]]
    rows = [rows_of(encoder, grid, seed) for seed, grid in enumerate(grids)]
    expected = [eager(encoder, x, grid) for x, grid in zip(rows, grids, strict=True)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [encoder(rows[i % 5], grids[i % 5]) for i in range(1000)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(result, expected[i % 5]) for i, result in enumerate(results))
    assert encoder.graph_stats().hits == 1000


def test_a_whole_call_never_waits_for_the_gpu(encoder):
    """Also not when it takes several replays, or runs eagerly in part or as a whole."""
    grids = [[[1, 16, 16]], MIXED, [[1, 2, 2]] * 16, [[6, 24, 24]], [[1, 50, 50]] * 3, [[1, 52, 52], [1, 8, 8]]]
    rows = [rows_of(encoder, grid) for grid in grids]
    for x, grid in zip(rows, grids, strict=True):  # loads what PyTorch loads at first use
        encoder(x, grid), eager(encoder, x, grid)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, grid in zip(rows, grids, strict=True):
            encoder(x, grid), eager(encoder, x, grid)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_is_compiled_after_capture(encoder):
    """Also not by a cut call, whose frames are resampled together: more rows than any graph has."""
    grids = [[[1, 4, 4]], MIXED, [[1, 2, 2]] * 16, [[4, 16, 16]], [[1, 32, 32]], [[6, 24, 24]], [[1, 50, 50]] * 3, []]
    compiled = compilations()
    for grid in grids:
        encoder(rows_of(encoder, grid), grid)
    assert compilations() == compiled
    assert encoder.graph_stats().hits == len(grids)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda grid: grid, id="list"),
        pytest.param(np.array, id="numpy"),
        pytest.param(torch.tensor, id="CPU tensor"),
        pytest.param(lambda grid: torch.tensor(grid, device="cuda"), id="CUDA tensor"),
    ],
)
def test_sizes_in_any_form(encoder, form):
    grid = [[1, 16, 16], [2, 8, 8]]
    pixel_values = rows_of(encoder, grid)
    assert torch.equal(encoder(pixel_values, form(grid)), eager(encoder, pixel_values, grid))
    assert encoder.graph_stats().hits == 1


def test_pixel_rows_of_every_dtype_and_stride_alike_in_graph_and_eager(encoder):
    grid = [[1, 16, 16]]
    for dtype in DTYPES:
        pixel_values = rows_of(encoder, grid).to(dtype)
        assert torch.equal(encoder(pixel_values, grid), eager(encoder, pixel_values, grid))
    strided = rows_of(encoder, grid).repeat(1, 2)[:, :588]
    assert torch.equal(encoder(strided, grid), eager(encoder, strided, grid))
    assert encoder.graph_stats().hits == 4
    with pytest.raises(TypeError, match="floating-point"):
        encoder(torch.zeros(256, 588, dtype=torch.uint8, device="cuda"), grid)


def test_a_graph_that_is_gone_is_captured_again(encoder):
    assert_same(encoder, [[1, 8, 8]])
    capacity = encoder._graphs.capacities[0]
    encoder._graphs._recordings.pop(capacity).release()
    assert_same(encoder, [[1, 8, 8]])


def test_lazy_capture(captured):
    encoder = captured(small_encoder(), capacities=CAPACITIES, lazy=True)
    for grid in ([[1, 8, 8]], [[1, 50, 50]], [[1, 30, 30]], [[1, 8, 8]], [[6, 24, 24]]):
        assert_same(encoder, grid)
    assert encoder.graph_stats().memory_bytes > 0


def test_the_models_own_width(monkeypatch, captured):
    poison(monkeypatch, 600 * MIB)
    encoder = captured(wide_encoder(), max_tokens=4096)
    cut = [[1, 128, 128]] * 2
    compiled = compilations()
    encoder(rows_of(encoder, cut), cut)
    assert compilations() == compiled
    sizes = [(16, 16), (24, 24), (36, 36), (36, 48), (54, 74), (72, 96), (110, 146), (128, 128)]
    for grid in [*([[1, *size]] for size in sizes), [[1, 36, 36]] * 8, [[16, 24, 34]], cut, [[1, 16, 16]]]:
        assert_same(encoder, grid)
