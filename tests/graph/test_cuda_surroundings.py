"""Capture and replay whatever else goes on: streams, threads, devices, fresh processes, weights, full memory.

Most tests run twice: with the resampler behind the graphs, and with the resampler in them.
"""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cuda_graphs import MIB, assert_same, eager, poison, rows_of, small_encoder

from ernie_vit.graph import capture as capture_module
from ernie_vit.graph.capacity import default_capacities, graph_bytes
from ernie_vit.model.metadata import prepare_encoder_metadata
from ernie_vit.model.warm_up import row_regimes

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CAPACITIES = [(256, 4), (1024, 16)]
GRID = [[1, 16, 16], [2, 8, 8]]

FIRST_CALL = """
import torch
from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder
from ernie_vit.kernels.compilation import compilations

config = ErnieVisionConfig(depth=2, hidden_size=160, num_heads=2, intermediate_size=640, text_hidden_size=128)
encoder = ErnieVisionEncoder.from_config(config, device="cuda", dtype=torch.{dtype}, backend="triton")
compilations()  # counts from its first call on
encoder.capture(resampler={resampler}, capacities=[(256, 4), (1024, 16)])
captured = compilations()
assert captured > 0
grid = [[1, 16, 16], [2, 8, 8]]
pixel_values = torch.randn(384, 588, device="cuda")
tokens = encoder(pixel_values, grid)
encoder(torch.randn(256, 588, device="cuda"), [[1, 8, 8]] * 4)
encoder(torch.randn(2048, 588, device="cuda"), [[2, 32, 32]])
assert encoder.graph_stats().hits == 3, encoder.graph_stats()
assert compilations() == captured, (captured, compilations())
encoder.train()  # then a call runs eagerly, by the same operators
assert tokens.isfinite().all() and torch.equal(tokens, encoder(pixel_values, grid))
"""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch, 32 * MIB)


@pytest.fixture
def encoder(captured):
    return captured(small_encoder(), capacities=CAPACITIES)


@pytest.mark.parametrize(("dtype", "resampler"), [("bfloat16", False), ("bfloat16", True), ("float16", False)])
def test_capture_as_the_first_call_of_a_process_with_an_empty_kernel_cache(tmp_path, dtype, resampler):
    """It compiles all that later calls need, also those that take several graphs."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", FIRST_CALL.format(dtype=dtype, resampler=resampler)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert any(tmp_path.iterdir())


def test_capture_and_calls_in_a_side_stream(captured):
    encoder = small_encoder()
    pixel_values = rows_of(encoder, GRID)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured(encoder, capacities=CAPACITIES)
        tokens = encoder(pixel_values, GRID)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    expected = eager(encoder, pixel_values, GRID)
    assert torch.equal(tokens, expected)
    assert torch.equal(encoder(pixel_values, GRID), expected)
    assert encoder.graph_stats().hits == 2


def test_calls_on_alternating_streams_do_not_overtake_each_other(encoder):
    """Every fifteen calls are queued behind a wait on each stream, so that all streams then start at once."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    grids = [[[1, 32, 32]], [[1, 8, 8]], [[1, 16, 16], [1, 4, 4]]]
    rows = [rows_of(encoder, grid, seed) for seed, grid in enumerate(grids)]
    expected = [eager(encoder, x, grid) for x, grid in zip(rows, grids, strict=True)]
    torch.cuda.synchronize()
    results = []
    for i in range(300):
        for stream in streams if i % 15 == 0 else ():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
        with torch.cuda.stream(streams[i % 3]):
            results.append(encoder(rows[i * 7 % 3], grids[i * 7 % 3]))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected[i * 7 % 3]) for i, result in enumerate(results))


def test_capture_and_calls_in_a_second_thread(captured):
    encoder = small_encoder()
    pixel_values = rows_of(encoder, GRID)
    torch.cuda.synchronize()
    results = []

    def work():
        captured(encoder, capacities=CAPACITIES)
        results.append(encoder(pixel_values, GRID))
        torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    expected = eager(encoder, pixel_values, GRID)
    assert torch.equal(results[0], expected)
    assert torch.equal(encoder(pixel_values, GRID), expected)
    assert encoder.graph_stats().hits == 2


def test_another_thread_uses_the_gpu_during_capture(encoder, captured):
    stop, errors, rounds = threading.Event(), [], []

    def work():
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    source = torch.arange(5000 + len(rounds) % 7, dtype=torch.float32).pin_memory()
                    copied = source.to("cuda", non_blocking=True)
                    small = [torch.full((100,), 1.0, device="cuda") for _ in range(8)]
                    total = copied.sum() + torch.stack(small).sum()
                    stream.synchronize()
                    rounds.append(total.item() == source.sum().item() + 800)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):  # the fixture has compiled; this is capture alone
            captured(encoder, capacities=CAPACITIES)
            assert_same(encoder, GRID)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert len(rounds) > 10
    assert all(rounds)


def test_the_second_gpu_while_the_first_is_current(captured):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    reserved = torch.cuda.memory_reserved(0)
    encoder = captured(small_encoder(device="cuda:1"), capacities=CAPACITIES)
    pixel_values = rows_of(encoder, GRID)
    tokens = encoder(pixel_values, GRID)
    assert tokens.device == torch.device("cuda:1")
    assert torch.equal(tokens, eager(encoder, pixel_values, GRID))
    cut = [[1, 32, 32]] * 3
    assert torch.equal(encoder(rows_of(encoder, cut), cut), eager(encoder, rows_of(encoder, cut), cut))
    assert encoder.graph_stats().hits == 2
    assert torch.cuda.memory_reserved(0) <= reserved


def test_a_call_inside_somebody_elses_capture_becomes_part_of_it(encoder):
    metadata = prepare_encoder_metadata(GRID, device="cuda")
    pixel_values = rows_of(encoder, GRID)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager(encoder, pixel_values, GRID)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tokens = encoder(pixel_values, metadata=metadata)
    pixel_values.copy_(rows_of(encoder, GRID, seed=1))
    graph.replay()
    assert torch.equal(tokens, eager(encoder, pixel_values, GRID))
    assert encoder.graph_stats().fallbacks == {"inside another capture": 1}


def test_weights_changed_in_place_take_effect(encoder):
    before = encoder(rows_of(encoder, GRID), GRID)
    encoder.load_state_dict({name: 1.25 * value for name, value in encoder.state_dict().items()})
    assert not torch.equal(encoder(rows_of(encoder, GRID), GRID), before)
    assert_same(encoder, GRID)


def _new_data(encoder):
    weight = encoder.vision_tower.blocks[1].attn.qkv.weight
    weight.data = weight.data * 2


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(_new_data, id="param.data = new"),
        pytest.param(lambda encoder: encoder.half(), id="half"),
        pytest.param(
            lambda encoder: encoder.load_state_dict(
                {name: value * 2 for name, value in encoder.state_dict().items()}, assign=True
            ),
            id="assign",
        ),
    ],
)
def test_weights_that_moved_drop_the_graphs(encoder, captured, move):
    assert_same(encoder, GRID)
    move(encoder)
    pixel_values = rows_of(encoder, GRID)
    assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))
    assert encoder.graph_stats().fallbacks == {"weights moved": 1}
    captured(encoder, capacities=CAPACITIES)
    assert_same(encoder, GRID)


def test_weights_that_went_away_and_came_back(encoder):
    """They may come back to where they were; then the graphs are right to go on."""
    pixel_values = rows_of(encoder, GRID)
    before = encoder(pixel_values, GRID)
    encoder.to("cpu")
    filler = [torch.full((MIB,), float("nan"), device="cuda") for _ in range(64)]
    encoder.to("cuda")
    assert torch.equal(encoder(pixel_values, GRID), before)
    stats = encoder.graph_stats()
    assert stats.hits + stats.fallbacks.get("weights moved", 0) == 2
    del filler


def test_release_gives_all_memory_back(encoder, captured):
    encoder(rows_of(encoder, GRID), GRID)
    encoder.release()
    torch.cuda.empty_cache()
    reserved, (free, _) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    for _ in range(3):
        captured(encoder, capacities=[*CAPACITIES, (16384, 64)])
        assert encoder.graph_stats().memory_bytes > 0
        encoder(rows_of(encoder, GRID), GRID)
        encoder.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    assert abs(torch.cuda.mem_get_info()[0] - free) < 32 * MIB  # the driver keeps some for later graphs


def _allocated() -> int:
    gc.collect()  # what earlier tests left in cycles as well
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_capacities_that_cannot_fit_are_refused_before_anything_is_allocated(encoder, captured):
    encoder.release()
    allocated = _allocated()
    with pytest.raises(
        torch.OutOfMemoryError, match=r"1 graphs of up to 400000000 rows need \d+ MiB, \d+ MiB are free"
    ):
        captured(encoder, capacities=[(400_000_000, 8)])
    assert _allocated() == allocated
    captured(encoder, capacities=CAPACITIES)
    assert_same(encoder, GRID)


def test_little_memory_makes_the_default_set_smaller_and_refuses_a_set_that_was_asked_for(captured, monkeypatch):
    encoder = small_encoder()
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (120 * MIB, total))
    captured(encoder)
    capacities = encoder._graphs.capacities
    assert len(capacities) < len(default_capacities(row_regimes(encoder.device)))
    resampler = encoder._graphs.captures_resampler
    assert 2 * graph_bytes(capacities, encoder.config, encoder.dtype, resampler=resampler) <= 120 * MIB
    assert_same(encoder, GRID)
    with pytest.raises(torch.OutOfMemoryError, match=r"need \d+ MiB, 120 MiB are free"):
        captured(encoder, max_tokens=6177)


def test_memory_that_runs_out_during_capture_is_given_back(encoder, captured, monkeypatch):
    encoder.release()
    torch.cuda.empty_cache()
    monkeypatch.setattr(capture_module, "graph_bytes", lambda *_, **__: 0)
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 5000 * MIB, dtype=torch.uint8, device="cuda")
    allocated = _allocated()
    with pytest.raises(torch.OutOfMemoryError, match="did not fit into the"):
        captured(encoder, capacities=[*CAPACITIES, (2_000_000, 8)])  # 2.3 GB of inputs, 7 GB of results
    assert _allocated() == allocated
    assert encoder._graphs is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    captured(encoder, capacities=CAPACITIES)
    assert_same(encoder, GRID)
    del hog


def test_a_failure_inside_the_capture_leaves_no_trace(encoder, captured, monkeypatch):
    encoder.release()
    allocated = _allocated()
    tower = encoder.vision_tower.forward

    def forward(*arguments):
        hidden_states = tower(*arguments)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("as planned")
        return hidden_states

    with monkeypatch.context() as patch:
        patch.setattr(encoder.vision_tower, "forward", forward)
        with pytest.raises(RuntimeError, match="as planned"):
            captured(encoder, capacities=CAPACITIES)
    assert _allocated() == allocated
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    captured(encoder, capacities=CAPACITIES)
    assert_same(encoder, GRID)
