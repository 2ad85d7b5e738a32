"""Recording, at once or lazily, failing, and giving back."""

import threading
import weakref

import pytest
import torch
from eager_graph import EagerRecorder, device_operators, eager
from reference import random_rows

from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.runner import GraphRunner

CAPACITIES = (Capacity(64, 4), Capacity(256, 8), Capacity(512, 16))
GRID = [[1, 8, 8]]


def test_the_largest_graph_is_recorded_first(capture, recorder):
    capture()
    assert [graph.outputs[0].shape[0] for graph in recorder.graphs] == [512, 256, 64]


def test_progress_wraps_what_is_recorded(encoder):
    seen = []

    def progress(capacities):
        for capacity in capacities:
            seen.append(capacity)
            yield capacity

    GraphRunner(
        encoder.vision_tower,
        encoder.resampler_model,
        device_operators(),
        CAPACITIES,
        record=EagerRecorder(),
        progress=progress,
    )
    assert seen == [Capacity(512, 16), Capacity(256, 8), Capacity(64, 4)]


def test_lazy_recording_happens_when_a_call_needs_it(encoder, capture, recorder):
    capture(lazy=True)
    assert recorder.recorded == 0
    for recorded, grid in [(1, [[1, 16, 16]]), (1, [[1, 16, 16]]), (2, [[1, 8, 8]]), (3, [[6, 8, 16]])]:
        with torch.inference_mode(recorded == 2):
            assert torch.equal(encoder(random_rows(grid), grid), eager(encoder, random_rows(grid), grid))
        assert recorder.recorded == recorded
    assert encoder.graph_stats().hits == 4


def test_captured_in_inference_mode_replayed_outside_and_the_other_way_round(encoder, capture):
    for inside in (True, False):
        with torch.inference_mode(inside):
            capture()
        with torch.inference_mode(not inside):
            assert torch.equal(encoder(random_rows(GRID), GRID), eager(encoder, random_rows(GRID), GRID))
    assert encoder.graph_stats().hits == 1


def test_release_gives_everything_back_and_may_be_repeated(encoder, capture, recorder):
    runner = capture()
    buffers = [weakref.ref(inputs.pixel_values) for inputs in runner._inputs.values()]
    buffers += [weakref.ref(graph.outputs[0]) for graph in recorder.graphs]
    encoder.release()
    encoder.release()
    runner.release()

    assert [ref() for ref in buffers] == [None] * 6
    assert recorder.graphs == []
    assert encoder.graph_stats().calls == 0
    assert torch.equal(encoder(random_rows(GRID), GRID), eager(encoder, random_rows(GRID), GRID))


def test_capture_after_release_and_instead_of_an_earlier_one(encoder, capture, recorder):
    capture()
    capture()
    encoder.release()
    capture((Capacity(256, 4),))
    assert len(recorder.graphs) == 1
    assert torch.equal(encoder(random_rows(GRID), GRID), eager(encoder, random_rows(GRID), GRID))
    assert encoder.graph_stats().captured_rows == 256


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_recording_that_fails_leaves_nothing_behind(encoder, fail_at):
    recorder = EagerRecorder(fail_at)
    tower, resampler, ops = encoder.vision_tower, encoder.resampler_model, device_operators()
    with pytest.raises(torch.OutOfMemoryError, match="as planned"):
        GraphRunner(tower, resampler, ops, CAPACITIES, record=recorder)
    assert (recorder.recorded, recorder.graphs) == (fail_at, [])

    recorder.fail_at = None
    encoder._graphs = GraphRunner(tower, resampler, ops, CAPACITIES, record=recorder)
    assert torch.equal(encoder(random_rows(GRID), GRID), eager(encoder, random_rows(GRID), GRID))
    assert encoder.graph_stats().hits == 1


def test_a_lazy_recording_that_fails_leaves_the_others(encoder, capture, recorder):
    capture(lazy=True)
    encoder(random_rows(GRID), GRID)
    recorder.fail_at = 1
    large = [[1, 16, 16]]
    with pytest.raises(torch.OutOfMemoryError):
        encoder(random_rows(large), large)
    assert torch.equal(encoder(random_rows(GRID), GRID), eager(encoder, random_rows(GRID), GRID))
    assert encoder.graph_stats().hits == 2


def test_a_graph_that_is_gone_is_recorded_again(encoder, capture, recorder):
    runner = capture()
    runner._recordings.pop(runner.capacities[0]).release()
    assert torch.equal(encoder(random_rows(GRID), GRID), eager(encoder, random_rows(GRID), GRID))
    assert (recorder.recorded, encoder.graph_stats().hits) == (4, 1)


def test_a_gpu_is_needed_for_real_graphs(encoder):
    with pytest.raises(ValueError, match="triton backend, got backend='torch'"):
        encoder.capture()


def test_threads_take_turns(encoder, capture):
    capture()
    grids = [[[1, 4, 4]], [[1, 16, 16]], [[6, 8, 16]], [[1, 8, 8], [2, 4, 4]]]
    wrong = []

    def work(grid):
        torch.set_num_threads(1)
        pixel_values = random_rows(grid)
        expected = eager(encoder, pixel_values, grid)
        wrong.extend(grid for _ in range(5) if not torch.equal(encoder(pixel_values, grid), expected))

    threads = [threading.Thread(target=work, args=(grid,)) for grid in grids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert encoder.graph_stats().hits == 20


def test_captured_tokens_lie_in_one_buffer_outside_of_the_graphs_pool(encoder):
    """Kept in the pool, each graph's would be one more tensor of which the smaller graphs cannot use the room."""
    outputs = []

    def record(forward):
        outputs.append(forward())
        return EagerRecorder()(forward)

    parts = encoder.vision_tower, encoder.resampler_model
    GraphRunner(*parts, device_operators(), CAPACITIES, record=record, capture_resampler=True)
    tokens = [captured for _, captured in outputs]
    assert [len(captured) for captured in tokens] == [capacity.rows // 4 for capacity in reversed(CAPACITIES)]
    assert len({captured.untyped_storage().data_ptr() for captured in tokens}) == 1
