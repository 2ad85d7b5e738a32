"""The Triton kernels behind the runner, interpreted: they compute the live rows of a capacity and see no other."""

from collections.abc import Iterator

import pytest
import torch
from eager_graph import EagerRecorder, poison_past_live_rows
from reference import SMALL, random_rows, randomize

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.inputs import GraphInputs
from ernie_vit.graph.runner import GraphRunner
from ernie_vit.model.metadata import prepare_encoder_metadata
from ernie_vit.model.operators import TORCH_RESAMPLER, TRITON_RESAMPLER, choose_operators

pytestmark = pytest.mark.interpreter

GRIDS = [[[1, 8, 8]], [[1, 4, 4], [1, 2, 8]], [[1, 2, 8], [1, 4, 4]], [[2, 4, 4]], [[1, 4, 18], [2, 2, 2]], []]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """PyTorch then fills what it allocates with NaN, and integers with their largest value."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_replays_have_the_bits_of_eager_calls():
    encoder = ErnieVisionEncoder.from_config(SMALL, device="cpu", backend="triton")
    randomize(encoder, seed=0)
    recorder = EagerRecorder()
    tower, resampler = encoder.vision_tower, encoder.resampler_model
    ops = choose_operators("triton", {"resampler": "triton"})
    capacities = (Capacity(32, 2), Capacity(96, 4))
    encoder._graphs = GraphRunner(tower, resampler, ops, capacities, record=recorder, capture_resampler=True)
    recorder.before_replay = poison_past_live_rows(encoder)

    for grid in GRIDS:
        pixel_values, metadata = random_rows(grid), prepare_encoder_metadata(grid)
        tokens = encoder(pixel_values, grid)
        hidden_states = tower(pixel_values, metadata, ops)
        expected = resampler(hidden_states, metadata.temporal_rows, metadata.live_counts, ops.resampler)
        assert torch.equal(tokens, expected), grid
    assert encoder.graph_stats().hits == len(GRIDS)


@pytest.mark.filterwarnings("ignore:invalid value")  # the rows that are left out are NaN
def test_a_stale_count_of_rows_is_noticed(monkeypatch):
    encoder, fill = ErnieVisionEncoder.from_config(SMALL, device="cpu", backend="triton"), GraphInputs.fill
    ops = choose_operators("triton")
    arguments = (encoder.vision_tower, encoder.resampler_model, ops, (Capacity(16, 1),))
    encoder._graphs = GraphRunner(*arguments, record=EagerRecorder())

    def fill_all_but_the_count(inputs, pixel_values, plan, staging):
        stale = inputs.metadata.num_rows.clone()
        fill(inputs, pixel_values, plan, staging)
        inputs.metadata.num_rows.copy_(stale)

    for grid in ([[1, 2, 2]], [[1, 4, 4]]):
        tokens = encoder(random_rows(grid), grid)
        assert tokens.isfinite().all() == (grid == [[1, 2, 2]])
        monkeypatch.setattr(GraphInputs, "fill", fill_all_but_the_count)


def test_eager_calls_take_the_captured_resampler_until_release():
    encoder = ErnieVisionEncoder.from_config(SMALL, device="cpu", backend="triton")
    tower, resampler = encoder.vision_tower, encoder.resampler_model
    ops = choose_operators("triton", {"resampler": "triton"})
    for captured in (True, False):
        arguments = (tower, resampler, ops, (Capacity(32, 2),))
        encoder._graphs = GraphRunner(*arguments, record=EagerRecorder(), capture_resampler=captured, lazy=True)
        assert (encoder._operators().resampler is TRITON_RESAMPLER) == captured
    encoder.release()
    assert encoder._operators().resampler is TORCH_RESAMPLER


def test_a_stage_that_is_captured_must_be_tritons():
    encoder = ErnieVisionEncoder.from_config(SMALL, device="cpu", backend="triton")
    encoder.set_backend("triton", {"resampler": "torch"})
    with pytest.raises(ValueError, match="every captured stage on the triton backend"):
        encoder.capture(resampler=True)
    with pytest.raises(ValueError, match="CUDA GPU"):
        encoder.capture()
