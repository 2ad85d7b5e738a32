"""A captured resampler: its numbers, its item's bits, and from when until when it computes every call.

That its replays have the bits of its eager calls is ``test_cuda_graphs.py``'s.
"""

import copy

import pytest
import torch
from accuracy import assert_within_budget
from cuda_graphs import MIB, assert_same, eager, poison, rows_of, small_encoder

from ernie_vit.model.metadata import tokens_per_item

pytestmark = pytest.mark.gpu

CAPACITIES = [(256, 4), (1024, 16), (2560, 64)]
MIXED = [[1, 16, 16], [4, 8, 8], [1, 2, 2], [2, 4, 6], [1, 6, 4]]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch, 64 * MIB)


@pytest.fixture
def resampler() -> bool:
    return True


@pytest.fixture
def encoder(captured):
    return captured(small_encoder(), capacities=CAPACITIES)


def test_an_item_has_the_same_bits_alone_packed_and_in_every_graph(encoder):
    rows = rows_of(encoder, MIXED).split([t * h * w for t, h, w in MIXED])
    alone = [encoder(row, [item]) for row, item in zip(rows, MIXED, strict=True)]
    for repeats in (1, 2, 5, 9):  # the middle graph, the largest, two graphs, three
        packed = encoder(torch.cat(rows * repeats), MIXED * repeats).split(tokens_per_item(MIXED) * repeats)
        assert all(torch.equal(tokens, alone[i % len(MIXED)]) for i, tokens in enumerate(packed)), repeats


def test_is_as_near_to_float64_as_torch(encoder):
    pixel_values = rows_of(encoder, MIXED)
    plain, exact = (copy.deepcopy(encoder) for _ in range(2))
    for other in (plain, exact):
        other.set_backend("torch")
    expected = exact.double()(pixel_values.double(), MIXED)
    assert_within_budget(encoder(pixel_values, MIXED), plain(pixel_values, MIXED), expected)


def test_torchs_resampler_until_capture_and_after_release(captured):
    encoder = small_encoder()
    pixel_values = rows_of(encoder, MIXED)
    before = encoder(pixel_values, MIXED)
    captured(encoder, capacities=CAPACITIES)
    assert not torch.equal(encoder(pixel_values, MIXED), before)
    encoder.release()
    assert torch.equal(encoder(pixel_values, MIXED), before)


def test_weights_changed_in_place_take_effect_and_moved_ones_drop_the_graphs(encoder, captured):
    pixel_values = rows_of(encoder, MIXED)
    before = encoder(pixel_values, MIXED)
    encoder.resampler_model.after_norm.weight.mul_(2)
    assert torch.equal(encoder(pixel_values, MIXED), 2 * before)
    weight = encoder.resampler_model.mlp.weight
    weight.data = 2 * weight.data
    assert torch.equal(encoder(pixel_values, MIXED), eager(encoder, pixel_values, MIXED))
    assert encoder.graph_stats().fallbacks == {"weights moved": 1}
    captured(encoder, capacities=CAPACITIES)
    assert_same(encoder, MIXED)
