"""What room that a call does not use costs: graphs of one capacity with more and fewer live rows, and the reverse."""

from collections.abc import Iterator
from statistics import median

import torch

from bench.calls import time_call
from bench.encoders.encoder import Encoder, OpenGraphs
from bench.plan import Plan, Sizes, num_patches, pixels
from bench.records import Padding
from bench.sensors import sensors

ROUNDS, WARM_UPS = 7, 2


def measure_padding(provider: str, graphs: OpenGraphs, plan: Plan) -> Iterator[Padding]:
    """Time against live rows at ``plan.capacity``, then against ``plan.capacities`` at the rows of ``plan.padded``."""
    with graphs([plan.capacity]) as encoder:
        for sizes in plan.live:
            yield _time(provider, encoder, sizes, plan.capacity[0], plan)
    for capacity in plan.capacities:
        if capacity == plan.capacity and plan.padded in plan.live:
            continue  # that is a point of both curves
        with graphs([capacity]) as encoder:
            yield _time(provider, encoder, plan.padded, capacity[0], plan)


def _time(provider: str, encoder: Encoder, sizes: Sizes, capacity: int, plan: Plan) -> Padding:
    rows, grid = pixels(sizes, device=plan.device, dtype=plan.dtype), torch.tensor(sizes)
    times = [time_call(encoder.run, rows, grid)[1] for _ in range(WARM_UPS + ROUNDS)]
    return Padding(num_patches(sizes), capacity, provider, median(times[WARM_UPS:]), sensors().read())
