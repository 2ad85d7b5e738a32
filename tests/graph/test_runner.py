"""Replayed calls have the bits of eager ones, whatever the call holds. On the CPU, with a stand-in for graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from eager_graph import EagerGraph, EagerRecorder, device_operators, eager, poison_past_live_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import random_rows
from torch.utils._python_dispatch import TorchDispatchMode

from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.inputs import GraphInputs
from ernie_vit.graph.staging import StagingRing
from ernie_vit.model.metadata import prepare_encoder_metadata

# images [1, 2, 2 n] have any possible number of rows, 4 n
EDGES = [rows + step for rows in (64, 256, 512) for step in (-4, 0, 4)]


@pytest.fixture(autouse=True)
def _captured(encoder, capture, recorder, resampler):
    capture(capture_resampler=resampler)
    recorder.before_replay = poison_past_live_rows(encoder)


def same(encoder, grid, seed=0):
    pixel_values = random_rows(grid, seed)
    assert torch.equal(encoder(pixel_values, grid), eager(encoder, pixel_values, grid))


@pytest.mark.parametrize("rows", EDGES)
def test_one_image_around_each_capacitys_edge(encoder, rows):
    same(encoder, [[1, 2, rows // 2]])
    assert encoder.graph_stats().hits == (rows <= 512)
    assert encoder.graph_stats().fallbacks == ({} if rows <= 512 else {"frame larger than every graph": 1})


@pytest.mark.parametrize("rows", EDGES)
def test_two_images_around_each_capacitys_edge(encoder, rows):
    same(encoder, [[1, 4, 4], [1, 2, (rows - 16) // 2]])
    assert encoder.graph_stats().hits == 1
    assert encoder.graph_stats().replays == (1 if rows <= 512 else 2)


@pytest.mark.parametrize("items", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64])
def test_one_to_64_items(encoder, items):
    same(encoder, [[1, 4, 2 + 2 * (i % 3)] for i in range(items)])
    assert encoder.graph_stats().hits == 1


def test_graphs_full_of_rows_and_of_sequences(encoder):
    for grid in ([[1, 4, 4]] * 4, [[1, 4, 8]] * 8, [[1, 4, 8]] * 16):
        same(encoder, grid)
    stats = encoder.graph_stats()
    assert stats.live_rows == stats.captured_rows == 64 + 256 + 512


item = st.tuples(st.sampled_from([1, 1, 2, 4]), st.integers(1, 6).map(lambda n: 2 * n), st.sampled_from([2, 4, 6, 16]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grid=st.lists(item.map(list), max_size=6), seed=st.integers(0, 99))
def test_any_mix_of_images_and_videos(encoder, grid, seed):
    same(encoder, grid, seed)


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param([[1, 16, 16], [1, 8, 8]], id="large first"),
        pytest.param([[1, 8, 8], [1, 16, 16]], id="small first"),
        pytest.param([[1, 8, 40]], id="one image"),
        pytest.param([[1, 4, 80]], id="one wide image"),
        pytest.param([[2, 8, 20]], id="a video"),
    ],
)
def test_equal_totals_with_other_splits(encoder, grid):
    same(encoder, [[1, 40, 8]])  # leaves its offsets and sizes in the buffers
    same(encoder, grid)
    assert encoder.graph_stats().hits == 2


def test_one_sequence_may_take_all_rows_of_a_graph_that_held_many(encoder):
    same(encoder, [[1, 8, 8]] * 4)
    same(encoder, [[1, 16, 16]])


def test_a_video_cut_between_frames_over_two_replays(encoder):
    same(encoder, [[6, 8, 16]])  # 4 frames of 128 rows fill the largest graph
    assert encoder.graph_stats().replays == 2
    assert encoder.graph_stats().hits == 1


def test_a_video_of_more_frames_than_any_graph_has_sequences(encoder):
    same(encoder, [[18, 2, 2]])
    assert encoder.graph_stats().replays == 2


def test_a_frame_larger_than_every_graph_between_others(encoder):
    same(encoder, [[1, 8, 8], [1, 20, 26], [2, 4, 4]])
    stats = encoder.graph_stats()
    assert (stats.hits, stats.replays, stats.fallbacks) == (0, 2, {"frame larger than every graph": 1})
    assert stats.live_rows == 64 + 32


def test_no_images(encoder):
    assert encoder(torch.zeros(0, 588), []).shape == (0, encoder.config.text_hidden_size)
    assert encoder.graph_stats().hits == 1
    assert encoder.graph_stats().replays == 0


def test_small_large_small(encoder):
    small, large = [[1, 4, 4]], [[1, 16, 32]]
    pixel_values = random_rows(small)
    first = encoder(pixel_values, small)
    for seed in range(5):
        same(encoder, large, seed)
        assert torch.equal(encoder(pixel_values, small), first)


class _Operations(TorchDispatchMode):
    """Lists what passes PyTorch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_replayed_call_is_few_operations(encoder, monkeypatch):
    """Each takes the host microseconds: a plan and its pixel rows copied, and the result or what a resampler wants."""
    grid = [[1, 8, 8], [2, 4, 4]]
    same(encoder, grid)
    monkeypatch.setattr(EagerGraph, "replay", lambda _: None)
    monkeypatch.setattr(encoder._graphs, "_resampler", lambda hidden_states, *_: hidden_states)
    pixel_values = random_rows(grid)
    with _Operations() as operations:
        encoder(pixel_values, grid)
    fill = ["slice.Tensor", "slice.Tensor", "copy_.default", "slice.Tensor", "copy_.default"]
    rest = ["narrow_copy.default"] if encoder._graphs.captures_resampler else ["slice.Tensor", "slice.Tensor"]
    assert operations.names == fill + rest


def test_a_call_waits_for_the_last_one_and_marks_its_own_use_on_the_stream_that_is_current(encoder, monkeypatch):
    events = []

    class Stream(str):
        def wait_event(self, event):
            events.append((event, "awaited on", self))

    class Event(str):
        def record(self, stream):
            events.append((self, "recorded on", stream))

    monkeypatch.setattr(encoder._graphs, "_last_use", Event("last use"))
    names = ("first", "second")
    for name in names:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, name=name: Stream(name))
        same(encoder, [[1, 8, 8]])
    assert events == [("last use", verb, name) for name in names for verb in ("awaited on", "recorded on")]


def test_results_stay_while_later_calls_run(encoder):
    grid = [[1, 8, 8]]
    results = [encoder(random_rows(grid, seed), grid) for seed in range(4)]
    for seed, result in enumerate(results):
        assert torch.equal(result, eager(encoder, random_rows(grid, seed), grid))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pixel_rows_of_another_dtype_are_cast(encoder, dtype):
    grid = [[1, 8, 8]]
    pixel_values = random_rows(grid).to(dtype)
    assert torch.equal(encoder(pixel_values, grid), eager(encoder, pixel_values, grid))
    assert encoder.graph_stats().hits == 1


def test_the_sum_of_the_counters(encoder):
    calls = [[[1, 8, 8]], [], [[1, 64, 64]], [[2, 8, 8], [1, 16, 32]]]
    for grid in calls:
        encoder(random_rows(grid), grid)
    stats = encoder.graph_stats()
    assert stats.hits + sum(stats.fallbacks.values()) == stats.calls == len(calls)
    assert stats.live_rows == 64 + 128 + 512
    assert stats.captured_rows == 64 + 256 + 512


def test_metadata_in_place_of_sizes(encoder):
    grid = [[1, 8, 8], [2, 4, 4]]
    pixel_values = random_rows(grid)
    tokens = encoder(pixel_values, metadata=prepare_encoder_metadata(grid))
    assert torch.equal(tokens, eager(encoder, pixel_values, grid))
    assert encoder.graph_stats().hits == 1


def test_the_runner_takes_sizes_in_any_form(encoder):
    grid = [[1, 8, 8], [2, 4, 4]]
    pixel_values = random_rows(grid)
    for sizes in (grid, np.array(grid), torch.tensor(grid)):
        assert torch.equal(encoder._graphs(pixel_values, sizes), eager(encoder, pixel_values, grid))


def test_somebody_else_may_own_the_buffers_and_drive_the_replay(encoder):
    """Allocate, record, fill and replay by hand, as a framework with a graph manager of its own does."""
    capacity, grid = Capacity(256, 8), [[1, 8, 8], [2, 4, 8]]
    packed = torch.zeros(GraphInputs.packed_size(capacity), dtype=torch.int32)
    inputs = GraphInputs.of(capacity, torch.zeros(capacity.rows, 588), packed)
    with torch.no_grad():
        ops = device_operators()
        graph = EagerRecorder()(lambda: (encoder.vision_tower(inputs.pixel_values, inputs.metadata, ops),))
        plan = inputs.plan(grid)
        inputs.fill(random_rows(grid), plan, StagingRing(len(packed), packed.device))
        graph.replay()
        hidden_states = graph.outputs[0][: plan.num_patches]
        temporal_rows, live_counts = inputs.temporal_rows(plan), inputs.metadata.live_counts
        tokens = encoder.resampler_model(hidden_states, temporal_rows, live_counts, ops.resampler)
    assert torch.equal(tokens, eager(encoder, random_rows(grid), grid))

    with pytest.raises(ValueError, match="at most 256 patches, got 260"):
        inputs.plan([[1, 2, 64], [1, 2, 66]])
    with pytest.raises(ValueError, match="at least the 10 frames"):
        inputs.plan([[10, 2, 2]])


class TestBrokenRunnersAreNoticed:
    """Each of these breaks the runner in one way; the comparison that the tests above make must see it.

    The two calls have as many rows, and nothing else of a plan in common: the second has fewer frames, of other sizes,
    and more tokens.
    """

    first, second = [[2, 8, 8], [1, 8, 8], [1, 8, 16]], [[1, 8, 8], [1, 16, 16]]

    def differs(self, encoder) -> bool:
        encoder(random_rows(self.first), self.first)
        pixel_values = random_rows(self.second, seed=1)
        return not torch.equal(encoder(pixel_values, self.second), eager(encoder, pixel_values, self.second))

    def test_the_unbroken_runner_passes(self, encoder):
        assert not self.differs(encoder)

    @pytest.mark.parametrize("part", ["cu_seqlens", "frame_sizes", "temporal_rows", "live_counts"])
    def test_a_stale_part_of_the_plan(self, encoder, monkeypatch, part):
        fill = GraphInputs.fill

        def fill_all_but(inputs, pixel_values, plan, staging):
            stale = getattr(inputs.metadata, part).clone()
            fill(inputs, pixel_values, plan, staging)
            if encoder.graph_stats().hits:
                getattr(inputs.metadata, part).copy_(stale)

        monkeypatch.setattr(GraphInputs, "fill", fill_all_but)
        assert self.differs(encoder)

    def test_stale_pixel_rows(self, encoder, monkeypatch):
        def fill(inputs, pixel_values, plan, staging):
            del pixel_values
            staging.copy(plan.packed, inputs.packed)

        monkeypatch.setattr(GraphInputs, "fill", fill)
        assert self.differs(encoder)

    def test_a_static_copy_of_the_sizes_in_the_recording(self, encoder, capture, monkeypatch):
        """Positions frozen when the graph was captured: the recorded pass reads copies."""
        of = GraphInputs.of.__func__

        def with_copies(cls, *buffers):
            inputs = of(cls, *buffers)
            frozen = replace(inputs.metadata, frame_sizes=inputs.metadata.frame_sizes.clone())
            return replace(inputs, metadata=frozen)

        monkeypatch.setattr(GraphInputs, "of", classmethod(with_copies))
        capture()
        assert self.differs(encoder)

    def test_a_result_that_views_the_static_output(self, encoder, monkeypatch):
        if encoder._graphs.captures_resampler:
            monkeypatch.setattr(torch.Tensor, "narrow_copy", torch.Tensor.narrow)
        else:
            monkeypatch.setattr(encoder._graphs, "_resampler", lambda hidden_states, *_: hidden_states)
        first = encoder(random_rows(self.first), self.first)
        kept = first.clone()
        encoder(random_rows(self.first, seed=1), self.first)
        assert not torch.equal(first, kept)

    def test_rows_of_several_replays_gathered_only_at_the_end(self, encoder, monkeypatch):
        grid = [[6, 8, 16]]
        runner = encoder._graphs

        def gather(pixel_values, call):
            rows = pixel_values.split([chunk.rows for chunk in call.chunks])
            inputs = [runner._inputs[chunk.capacity] for chunk in call.chunks]
            replayed = list(map(runner._replay, rows, call.plans, inputs))
            return torch.cat([outputs[0][: len(part)] for outputs, part in zip(replayed, rows, strict=True)])

        monkeypatch.setattr(runner, "_gather", gather)
        assert not torch.equal(encoder(random_rows(grid), grid), eager(encoder, random_rows(grid), grid))
