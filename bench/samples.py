"""What many timings say together, and in which order providers take turns."""

import math
from collections.abc import Callable, Sequence
from statistics import median


def percentile_99(samples: Sequence[float]) -> float:
    """The smallest sample that 99 of 100 do not exceed (nearest rank); of fewer than 100 the largest."""
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]


def spread(samples: Sequence[float], middle: Callable[[Sequence[float]], float] = median) -> float:
    """How far the middles of the first and the second half of the samples are apart, as a share of that of all.

    0 for a single sample.
    """
    half = len(samples) // 2
    if half == 0:
        return 0.0
    return abs(middle(samples[:half]) - middle(samples[half:])) / middle(samples)


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of ``count`` providers for as many rounds (twice as many if odd), to be repeated.

    In them each provider is equally often at each place, and each of the others equally often right before it: the
    clocks that one leaves behind meet all the others alike. A Williams design: 0, n - 1, 1, n - 2, ... and its
    rotations; for odd counts the same backwards too.
    """
    zigzag = [step // 2 if step % 2 == 0 else count - 1 - step // 2 for step in range(count)]
    orders = [[(place + turn) % count for place in zigzag] for turn in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]
