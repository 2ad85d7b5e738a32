"""What graphs cost in memory: as estimated, and as logged before and after."""

import logging

import pytest
from cuda_graphs import MIB, wide_encoder

from ernie_vit.graph.capacity import graph_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("resampler", [False, True], ids=["tower", "tower-and-resampler"])
def test_memory_is_as_estimated(caplog: pytest.LogCaptureFixture, resampler: bool) -> None:
    encoder = wide_encoder(depth=32)
    encoder.capture(resampler=resampler, max_tokens=4096)  # loads the kernels, whose code takes memory too
    with caplog.at_level(logging.INFO):
        encoder.capture(resampler=resampler, max_tokens=4096)

    assert encoder._graphs is not None
    estimate = graph_bytes(encoder._graphs.capacities, encoder.config, encoder.dtype)
    taken = encoder.graph_stats().memory_bytes
    assert abs(taken - estimate) < 0.1 * taken
    assert taken < 600 * MIB  # the goal for 4,096 tokens
    assert f"{estimate // MIB} MiB" in caplog.text
    assert f"{taken // MIB} MiB" in caplog.text
