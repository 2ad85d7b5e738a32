"""What whole rounds of tiles cost on a pretended GPU of 132 multiprocessors."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import ideal
from ernie_vit.kernels.tiles import attention, linear

MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideal, "multiprocessors", lambda _: MULTIPROCESSORS)
    monkeypatch.setattr(ideal, "why_not_hopper", lambda *_: None)
    monkeypatch.setattr(attention.dispatch, "why_not_hopper", lambda *_: None)


def test_a_round_that_is_not_full_costs_as_much_as_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = linear.TritonTile(128, 128, 64, num_warps=4, num_stages=2)
    monkeypatch.setattr(ideal, "linear_tile", lambda *_: tile)
    one_round = MULTIPROCESSORS * 2 * 128 * 128 * 1280
    assert ideal.linear_flops(128, 128, 1280) == one_round
    assert ideal.linear_flops(128, 128 * MULTIPROCESSORS, 1280) == one_round
    assert ideal.linear_flops(129, 128 * MULTIPROCESSORS // 2, 1280) == one_round
    assert ideal.linear_flops(129, 128 * MULTIPROCESSORS, 1280) == 2 * one_round


@pytest.mark.parametrize("rows", [256, 1296, 16060])
@pytest.mark.parametrize("shape", [(3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)])
def test_padded_flops_of_a_linear_are_those_and_a_bit(rows: int, shape: tuple[int, int]) -> None:
    flops = 2 * rows * shape[0] * shape[1]
    padded = ideal.linear_flops(rows, *shape)
    assert padded >= flops
    assert padded < 3 * flops
    assert ideal.linear_flops(rows // 8, *shape, capacity=rows) <= padded


def test_the_tile_is_that_of_the_capacity() -> None:
    tile = linear.hopper_regimes(1280, 5120).at(16060)
    assert ideal.linear_flops(1, 1280, 5120, capacity=16060) == MULTIPROCESSORS * 2 * tile.rows * tile.columns * 5120


@pytest.mark.parametrize("lengths", [(576,), (1296,) * 8, (576, 1296, 4096, 256, 1728), (2007, 0, 0)])
def test_padded_flops_of_attention_are_those_and_a_bit(lengths: Sequence[int]) -> None:
    flops = 4 * 1280 * sum(length**2 for length in lengths)
    assert flops <= ideal.attention_flops(lengths) < 3 * flops


def test_a_long_sequence_alone_keeps_few_multiprocessors_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = attention.plain_tile("sm_80", torch.bfloat16)
    monkeypatch.setattr(ideal, "attention_tile", lambda *_, **__: tile)
    item = 4 * tile.rows * tile.rows * 80
    assert ideal.attention_flops([tile.rows]) == MULTIPROCESSORS * item  # 16 heads, one item each


def test_the_busiest_takes_the_longest_item_left() -> None:
    assert ideal.busiest([2, 3, 2, 3, 2], workers=2) == 7
    assert ideal.busiest([5, 1, 1, 1], workers=2) == 5
    assert ideal.busiest([], workers=2) == 0


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 20))
def test_the_busiest_has_its_share_and_at_most_an_item_more(items: list[int], workers: int) -> None:
    share = sum(items) / workers
    assert share <= ideal.busiest(items, workers) <= share + max(items, default=0)
