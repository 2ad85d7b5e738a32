"""What graphs cost: memory as estimated, time to capture, and empty sequences for nothing."""

import logging
import statistics
import time

import pytest
import torch
from cuda_graphs import MIB, rows_of, wide_encoder

from ernie_vit.graph.capacity import graph_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def full_size():
    encoder = wide_encoder(depth=32)
    encoder.capture(max_tokens=4096)  # compiles
    encoder.release()
    return encoder


def _milliseconds(call, calls: int = 20) -> float:
    times = []
    for _ in range(calls + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[3:])


def test_memory_is_as_estimated_and_time_is_short(full_size, caplog):
    started = time.perf_counter()
    with caplog.at_level(logging.INFO):
        full_size.capture(max_tokens=4096)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started

    capacities = full_size._graphs.capacities
    estimate = graph_bytes(capacities, full_size.config, full_size.dtype)
    taken = full_size.graph_stats().memory_bytes
    print(f"{len(capacities)} graphs: {seconds:.2f} s, {taken / MIB:.0f} MiB, estimated {estimate / MIB:.0f} MiB")
    assert abs(taken - estimate) < 0.1 * taken
    assert taken < 600 * MIB
    assert seconds < 3
    assert f"{estimate // MIB} MiB" in caplog.text
    assert f"{taken // MIB} MiB" in caplog.text


def test_a_call_is_launched_quickly(full_size):
    full_size.capture(max_tokens=4096)
    grid = [[1, 16, 16]]
    pixel_values = rows_of(full_size, grid)
    times = []
    for _ in range(100):
        torch.cuda.synchronize()
        started = time.perf_counter()
        full_size(pixel_values, grid)
        times.append((time.perf_counter() - started) * 1e6)
    print(f"host time of a call: median {statistics.median(times):.0f} us")


def test_empty_sequences_and_rows_cost_little(full_size):
    grid = [[1, 16, 16]]
    pixel_values = rows_of(full_size, grid)
    times = {}
    for capacity in [(384, 1), (384, 8), (384, 64), (384, 96), (16384, 64), (16384, 256)]:
        full_size.capture(capacities=[capacity])
        times[capacity] = _milliseconds(lambda: full_size(pixel_values, grid))
    print({capacity: round(ms, 3) for capacity, ms in times.items()})
    assert times[384, 96] < 1.1 * times[384, 1]
    assert times[16384, 256] < 1.1 * times[16384, 64]


@pytest.mark.parametrize("images", [3, 5, 9])
def test_never_slower_than_eager(full_size, images):
    full_size.capture(max_tokens=4096)
    grid = [[1, 32, 32]] * images
    pixel_values = rows_of(full_size, grid)
    graph = _milliseconds(lambda: full_size(pixel_values, grid))
    graphs, full_size._graphs = full_size._graphs, None
    eager = _milliseconds(lambda: full_size(pixel_values, grid))
    full_size._graphs = graphs
    print(f"{images} images: graph {graph:.2f} ms, eager {eager:.2f} ms")
    assert graph < 1.02 * eager
