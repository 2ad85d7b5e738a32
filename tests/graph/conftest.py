"""Encoders with graphs: the small one with the CPU's stand-in (see ``eager_graph``), any with real ones on a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager_graph import EagerRecorder, device_operators
from reference import SMALL, randomize

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.runner import GraphRunner

CAPACITIES = (Capacity(64, 4), Capacity(256, 8), Capacity(512, 16))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cut a tensor's elements by its size, and the ends of a cut round like scalars, not like vectors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[False, True], ids=["tower", "tower-and-resampler"])
def resampler(request: pytest.FixtureRequest) -> bool:
    """Whether the resampler is captured too, or runs eagerly behind the graphs."""
    return bool(request.param)


@pytest.fixture
def captured(resampler: bool) -> Callable[..., ErnieVisionEncoder]:
    """Capture an encoder in CUDA graphs; options as ``encoder.capture``'s."""

    def captured(encoder: ErnieVisionEncoder, **options: Any) -> ErnieVisionEncoder:
        encoder.capture(resampler=resampler, **options)
        return encoder

    return captured


@pytest.fixture
def encoder() -> ErnieVisionEncoder:
    """Every parameter random; eager calls compute with the operators that the stand-in's graphs record."""
    encoder = ErnieVisionEncoder.from_config(SMALL, device="cpu", backend="torch")
    randomize(encoder, seed=0)
    encoder._operators = device_operators
    return encoder


@pytest.fixture
def recorder() -> EagerRecorder:
    return EagerRecorder()


@pytest.fixture
def capture(encoder: ErnieVisionEncoder, recorder: EagerRecorder) -> Callable[..., GraphRunner]:
    """Capture the encoder with the stand-in, as ``encoder.capture`` does with graphs."""

    def capture(capacities: tuple[Capacity, ...] = CAPACITIES, **options: bool) -> GraphRunner:
        encoder.release()
        tower, resampler = encoder.vision_tower, encoder.resampler_model
        encoder._graphs = GraphRunner(tower, resampler, device_operators(), capacities, record=recorder, **options)
        return encoder._graphs

    return capture
