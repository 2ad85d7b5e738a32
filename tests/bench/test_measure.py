"""How kernels are measured: what is checked first, what one provider's failure costs, and how figures follow."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pretended_measure import CEILINGS, REPLAY_SECONDS, capture, timed
from torch import Tensor

from bench import measure
from bench.measure import Case, Inputs, Provider, Reference, Work
from bench.records import Clocks

ROWS = 64
WORK = Work(flops=8e6, moved_bytes=1e4, padded_flops=16e6)


def make(seed: int) -> Inputs:
    torch.manual_seed(seed)
    return {"x": torch.randn(ROWS, 4).bfloat16()}


def thirds(inputs: Inputs) -> Tensor:
    return inputs["x"] / 3


THIRDS = Reference(lambda i: i["x"].double() / 3, thirds)


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(measure, "capture", capture)
        monkeypatch.setattr(measure, "timed", timed)
        monkeypatch.setattr(measure, "ceilings", lambda: CEILINGS)
        monkeypatch.setattr(measure, "cache_bytes", lambda: 10_000)
        monkeypatch.setattr(measure, "forbid_waiting", nullcontext)


def failing(inputs: Inputs) -> Tensor:
    raise RuntimeError(f"no kernel for {inputs['x'].dtype}\nand more")


def slightly_wrong(inputs: Inputs) -> Tensor:
    return thirds(inputs) * 1.02


def not_finite(inputs: Inputs) -> Tensor:
    out = thirds(inputs)
    out[3, 1] = math.nan
    return out


def forgetful() -> Callable[[Inputs], Tensor]:
    """Right at its first call; later ones leave the last row to what lies in memory, which a first call filled."""
    memory: list[Tensor] = []

    def run(inputs: Inputs) -> Tensor:
        if not memory:
            memory.append(thirds(inputs))
        memory[0][:-1] = thirds(inputs)[:-1]
        return memory[0]

    return run


def of_thirds(*runs: Callable[[Inputs], Tensor]) -> Case:
    providers = {str(number): Provider(run, THIRDS) for number, run in enumerate(runs)}
    return Case("thirds", "4", ROWS, make, providers, WORK)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (slightly_wrong, "wrong by value: relative error 2."),
        (not_finite, "wrong by value: relative error nan"),
        (forgetful(), "wrong by value: relative error nan"),
        (failing, "RuntimeError: no kernel for torch.bfloat16"),
    ],
    ids=["wrong", "not finite", "unwritten", "failing"],
)
def test_what_is_wrong_or_fails_is_not_timed_and_the_others_are(run: Callable[[Inputs], Tensor], reason: str) -> None:
    found = measure.measure(of_thirds(thirds, run, thirds))
    assert list(found.failures) == ["1"]
    assert found.failures["1"].startswith(reason)
    assert "\n" not in found.failures["1"]
    assert [kernel.provider for kernel in found.kernels] == ["0", "2"]


def test_what_cannot_be_captured_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(inputs: Inputs) -> Tensor:
        return thirds(inputs)

    def failing_capture(of: Callable[[Inputs], Tensor], *arguments: object) -> object:
        if of is run:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(of, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "capture", failing_capture)
    found = measure.measure(of_thirds(run, thirds))
    assert found.failures == {"0": "RuntimeError: operation not permitted when stream is capturing"}
    assert [kernel.provider for kernel in found.kernels] == ["1"]


def test_nothing_is_timed_where_everything_is_wrong() -> None:
    found = measure.measure(of_thirds(slightly_wrong, failing))
    assert not found.kernels
    assert not found.graphs
    assert list(found.failures) == ["0", "1"]


def test_only_live_rows_count() -> None:
    def half(inputs: Inputs) -> Tensor:
        out = torch.full_like(inputs["x"], math.nan)
        out[: ROWS // 2] = thirds(inputs)[: ROWS // 2]
        return out

    little = Work(flops=4e6, moved_bytes=5e3, padded_flops=None)
    providers = {"whole": Provider(thirds, THIRDS), "half": Provider(half, THIRDS, ROWS // 2, little)}
    found = measure.measure(replace(of_thirds(), providers=providers))
    assert not found.failures
    whole, of_half = found.kernels
    assert of_half.tflops == pytest.approx(4e6 / of_half.microseconds / 1e6)
    assert of_half.of_ideal is None
    assert whole.error == whole.plain_error
    assert of_half.error == of_half.plain_error


def test_the_clocks_stand_beside_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(1980.0, 650.0, 60.0)
    monkeypatch.setattr(measure, "sensors", lambda: SimpleNamespace(read=lambda: clocks))
    assert [kernel.clocks for kernel in measure.measure(of_thirds(thirds, thirds)).kernels] == [clocks, clocks]


def test_figures() -> None:
    first, second = measure.measure(of_thirds(thirds, thirds)).kernels
    seconds = REPLAY_SECONDS / measure.calls(of_thirds(thirds))
    assert first.microseconds == pytest.approx(seconds * 1e6)
    assert second.microseconds == pytest.approx(2 * seconds * 1e6)
    assert first.tflops == pytest.approx(8e6 / seconds / 1e12)
    assert first.gigabytes_per_second == pytest.approx(1e4 / seconds / 1e9)
    assert first.of_ceiling == pytest.approx(8e6 / CEILINGS.product / seconds)
    assert first.of_ideal == pytest.approx(16e6 / CEILINGS.product / seconds)
    assert first.noise == second.noise == pytest.approx(2.0)  # ours again is the third graph: three times as long


@pytest.mark.parametrize(
    ("moved_bytes", "copies"), [(1e9, 2), (1e4, 3), (3e3, 10), (1.0, measure.MAX_CALLS)], ids=["2", "3", "10", "most"]
)
def test_inputs_are_cold(moved_bytes: float, copies: int) -> None:
    tried = replace(of_thirds(thirds), work=Work(1.0, moved_bytes))
    assert measure.copies(tried) == copies
    assert measure.calls(tried) % copies == 0
    assert measure.calls(tried) >= copies


def test_inputs_are_cold_for_the_provider_that_reads_least() -> None:
    providers = {"whole": Provider(thirds, THIRDS), "part": Provider(thirds, THIRDS, 8, Work(1.0, 3e3))}
    assert measure.copies(replace(of_thirds(), providers=providers)) == 10


@pytest.mark.gpu
def test_a_graph_is_timed_as_long_as_its_calls_take() -> None:
    x = [{"x": torch.randn(2**24, device="cuda")} for _ in range(2)]
    few, many = (measure.capture(lambda i: i["x"].neg(), x, calls) for calls in (4, 40))
    time = measure.timed({"few": few, "many": many}, rounds=5)
    assert time["many"] / time["few"] == pytest.approx(10, rel=0.3)
    least = 40 * 2 * x[0]["x"].nbytes / measure.ceilings().copy
    assert least * 0.9 < time["many"] < least * 2


def make_on_gpu(seed: int) -> Inputs:
    return {"x": make(seed)["x"].cuda()}


def waits(inputs: Inputs) -> Tensor:
    return thirds(inputs) * float(inputs["x"].sum().sign().abs())


def waits_in_a_capture(inputs: Inputs) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return thirds(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [waits, waits_in_a_capture])
def test_a_provider_that_waits_for_the_gpu_costs_no_other_its_figures(run: Callable[[Inputs], Tensor]) -> None:
    stream = torch.cuda.current_stream()
    for _ in range(2):
        found = measure.measure(replace(of_thirds(run, thirds), make=make_on_gpu))
        assert list(found.failures) == ["0"]
        assert [kernel.provider for kernel in found.kernels] == ["1"]
        assert torch.cuda.current_stream() == stream
        torch.randn(1, device="cuda")
        torch.cuda.empty_cache()
