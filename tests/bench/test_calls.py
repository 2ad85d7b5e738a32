"""Whole calls, host times and padding curves, of stand-ins whose times and orders are known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import calls
from bench.encoders.encoder import Encoder
from bench.padding import measure_padding
from bench.plan import INPUTS, MIX, Plan, choose_plan, num_patches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins compute on the CPU")


@pytest.fixture
def plan() -> Plan:
    return choose_plan(quick=True)


def stand_in(name: str, run: Callable[[Tensor, Tensor], Any], *, videos: bool = True) -> Encoder:
    return Encoder(name, name, run, videos=videos)


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    return clock


def test_times_are_of_the_calls(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that works on after the call has returned: host and whole time are told apart."""
    monkeypatch.setattr(calls, "synchronize", lambda: clock.advance(0.02))
    host, total = calls.time_call(lambda *_: clock.advance(0.01), torch.empty(0), torch.empty(0))
    assert (host, total) == (pytest.approx(10), pytest.approx(30))


def test_figures_follow_from_the_samples(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(1.0, 1.0)] * calls.WARM_UPS + [(0.5, 4.0), (0.7, 2.0), (0.6, 9.0)])
    monkeypatch.setattr(calls, "time_call", lambda *_: next(times))
    encoder = stand_in("a", lambda *_: None)
    (call,), _ = calls.measure_input("2 x 64", plan.inputs["2 x 64"], [encoder], plan)
    assert (call.median, call.mean, call.p99, call.host) == (4.0, 5.0, 9.0, 0.6)
    assert (call.input, call.provider, call.patches, call.images) == ("2 x 64", "a", 128, 2)
    assert call.images_per_second == pytest.approx(2 / 5e-3)
    assert call.device is None
    assert call.clocks is None


def test_providers_take_turns_in_changing_orders(plan: Plan) -> None:
    """Each comes first, and right after each of the others, equally often."""
    order: list[str] = []
    encoders = [stand_in(name, lambda *_, name=name: order.append(name)) for name in "abcd"]
    found, _ = calls.measure_input("16", plan.inputs["16"], encoders, replace(plan, rounds=8))
    assert [call.provider for call in found] == list("abcd")
    turns = order[4 * calls.WARM_UPS :]
    rounds = [turns[start : start + 4] for start in range(0, len(turns), 4)]
    assert [sorted(turn) for turn in rounds] == [list("abcd")] * 8
    assert all(sum(turn[0] == name for turn in rounds) == 2 for name in "abcd")
    assert {turn[index + 1] for turn in rounds for index in range(3) if turn[index] == "a"} == set("bcd")


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, calls.LEAST_ROUNDS), (20.5, 21), (1e9, 99)])
def test_an_input_gets_no_more_time_than_planned(plan: Plan, clock: Clock, seconds: float, rounds: int) -> None:
    called = 0

    def run(*_: Tensor) -> None:
        nonlocal called
        called += 1
        clock.advance(1.0)

    plan = replace(plan, rounds=99, seconds=seconds)
    calls.measure_input("16", plan.inputs["16"], [stand_in("a", run)], plan)
    assert called == calls.WARM_UPS + rounds


def test_who_takes_no_videos_is_left_out_of_them(plan: Plan) -> None:
    encoders = [stand_in("all", lambda *_: None), stand_in("images", lambda *_: None, videos=False)]
    for name, sizes in plan.inputs.items():
        found, missing = calls.measure_input(name, sizes, encoders, plan)
        assert missing == []
        assert [call.provider for call in found] == (["all"] if name.startswith("video") else ["all", "images"])


def test_the_mix_is_of_calls_met_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up by a pass that does not count; figures over all calls of the other passes."""
    met: list[int] = []
    samples: list[float] = []

    def time_call(_run: Any, rows: Tensor, _grid: Tensor) -> tuple[float, float]:
        met.append(len(rows))
        if len(met) > len(plan.mix):
            samples.append(float(len(met)))
        return 0.1, float(len(met))

    monkeypatch.setattr(calls, "time_call", time_call)
    (call,), _ = calls.measure_mix([stand_in("a", lambda *_: None)], plan)
    assert met == [num_patches(sizes) for sizes in plan.mix] * (1 + plan.mix_passes)
    assert (call.input, call.images) == (calls.MIX, sum(map(len, plan.mix)))
    assert call.patches == sum(map(num_patches, plan.mix))
    assert (call.mean, call.median, call.p99) == (mean(samples), median(samples), max(samples))
    assert call.images_per_second == pytest.approx(call.images * 1e3 * plan.mix_passes / sum(samples))


def test_host_times_of_known_and_of_new_sizes(plan: Plan, clock: Clock) -> None:
    seen: set[tuple[int, ...]] = set()

    def run(_rows: Tensor, grid: Tensor) -> None:
        size = tuple(grid[0].tolist())
        clock.advance(1e-3 if size in seen else 3e-3)
        seen.add(size)

    plan = replace(plan, inputs=INPUTS, mix=MIX)
    known, new = calls.measure_host(stand_in("a", run), plan)
    assert (known.met_before, new.met_before) == (True, False)
    assert (known.microseconds, new.microseconds) == (pytest.approx(1000), pytest.approx(3000))


def test_new_sizes_are_new_and_alike() -> None:
    plan = replace(choose_plan(quick=True), inputs=INPUTS, mix=MIX)
    found = [tuple(sizes[0]) for sizes in calls.new_sizes(256, plan)]
    known = {tuple(size) for sizes in (*INPUTS.values(), *MIX) for size in sizes}
    assert len(found) == len(set(found)) == calls.HOST_CALLS
    assert not known & set(found)
    assert all(192 <= num_patches([size]) <= 320 for size in found)


def test_padding_curves(plan: Plan) -> None:
    """Live rows in one graph, then one call in each graph; a point of both curves is measured once."""
    opened: list[Any] = []
    met: list[tuple[int, int]] = []

    @contextmanager
    def graphs(capacities: Sequence[tuple[int, int]] | None) -> Iterator[Encoder]:
        opened.append(capacities)
        assert capacities is not None
        yield stand_in("a", lambda rows, _grid: met.append((len(rows), capacities[0][0])))
        met.append((0, 0))

    curve = list(measure_padding("a", graphs, plan))
    assert opened == [[(256, 8)], [(64, 4)]]
    assert [(point.rows, point.capacity) for point in curve] == [(16, 256), (64, 256), (64, 64)]
    assert [pair for pair in dict.fromkeys(met) if pair != (0, 0)] == [(16, 256), (64, 256), (64, 64)]
    assert all(point.provider == "a" and point.milliseconds > 0 for point in curve)
