"""What many timings say together, and the order in which providers take turns."""

from collections import Counter
from itertools import pairwise, permutations
from statistics import mean

import pytest

from bench.samples import balanced_orders, percentile_99, spread


@pytest.mark.parametrize(
    ("count", "rank"),
    [(1, 1), (2, 2), (30, 30), (99, 99), (100, 99), (101, 100), (120, 119), (200, 198)],
)
def test_percentile_is_the_nearest_rank(count: int, rank: int) -> None:
    samples = [float(value) for value in range(1, count + 1)]
    assert percentile_99(samples[::-1]) == rank


def test_spread_is_the_distance_of_the_halves() -> None:
    assert spread([10.0, 10.0, 12.0, 12.0]) == pytest.approx(2 / 11)
    assert spread([12.0, 12.0, 10.0, 10.0]) == pytest.approx(2 / 11)
    assert spread([5.0, 7.0, 5.0, 7.0]) == 0.0
    assert spread([5.0]) == 0.0


def test_spread_by_another_middle() -> None:
    # medians of the halves are equal, means are not
    assert spread([1.0, 2.0, 3.0, 1.0, 2.0, 9.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 1.0, 2.0, 9.0], mean) == pytest.approx(2 / 3)


@pytest.mark.parametrize("count", range(1, 10))
def test_each_provider_is_equally_often_everywhere(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        assert set(Counter(order[place] for order in orders).values()) == {len(orders) // count}


@pytest.mark.parametrize("count", range(2, 10))
def test_each_provider_is_equally_often_right_before_each_other(count: int) -> None:
    orders = balanced_orders(count)
    before = Counter(pair for order in orders for pair in pairwise(order))
    assert before.keys() == set(permutations(range(count), 2))
    assert len(set(before.values())) == 1
