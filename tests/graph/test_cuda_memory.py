"""What graphs cost in memory: as estimated, and as logged before and after."""

import logging
from collections.abc import Callable

import pytest
from cuda_graphs import MIB, wide_encoder

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.graph.capacity import graph_bytes

pytestmark = pytest.mark.gpu


def test_memory_is_as_estimated(caplog: pytest.LogCaptureFixture, captured: Callable[..., ErnieVisionEncoder]) -> None:
    encoder = captured(wide_encoder(depth=32), max_tokens=4096)  # loads the kernels, whose code takes memory too
    with caplog.at_level(logging.INFO):
        captured(encoder, max_tokens=4096)

    graphs = encoder._graphs
    assert graphs is not None
    estimate = graph_bytes(graphs.capacities, encoder.config, encoder.dtype, resampler=graphs.captures_resampler)
    taken = encoder.graph_stats().memory_bytes
    assert abs(taken - estimate) < 0.1 * taken
    assert taken < 600 * MIB  # the goal for 4,096 tokens
    assert f"{estimate // MIB} MiB" in caplog.text
    assert f"{taken // MIB} MiB" in caplog.text
