"""Two runs beside each other: what counts as worse, and what is only noise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from synthetic_run import run_without_gpu, synthetic_run

from bench.compare import Change, Key, changes, compare
from bench.records import LEFT_OUT, Missing, Run


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Run, Run], Result]:
    monkeypatch.setenv("COLUMNS", "180")

    def run(before: Run, after: Run) -> Result:
        for name, one in (("before", before), ("after", after)):
            one.write(tmp_path / f"{name}.json")
        return CliRunner().invoke(compare, [str(tmp_path / "before.json"), str(tmp_path / "after.json")])

    return run


def changed(run: Run, kind: str, place: int, **values: Any) -> Run:
    """The run with some values of one record replaced."""
    records = list(getattr(run, kind))
    records[place] = replace(records[place], **values)
    return replace(run, **{kind: records})


def place(run: Run, kind: str, **values: Any) -> int:
    """Where the first record with these values stands."""
    records = enumerate(getattr(run, kind))
    return next(at for at, record in records if all(getattr(record, name) == value for name, value in values.items()))


def test_another_day_is_noise(compared: Callable[[Run, Run], Result]) -> None:
    result = compared(synthetic_run(), synthetic_run(seed=1))
    assert result.exit_code == 0
    assert "0 worse, 0 better" in result.output


@pytest.mark.parametrize(
    ("kind", "which", "name", "factor"),
    [
        ("calls", {"input": "1,296", "provider": "ours eager"}, "median", 1.06),
        ("calls", {"input": "mix", "provider": "ours eager"}, "mean", 1.06),
        ("calls", {"input": "256", "provider": "ours graph"}, "host", 1.2),
        ("kernels", {"kernel": "linear", "case": "fc1", "provider": "ours, 1/8 live"}, "microseconds", 1.1),
        ("kernels", {"kernel": "attention", "provider": "ours"}, "error", 1.2),
        ("padding", {"capacity": 8192, "provider": "ours graph"}, "milliseconds", 1.05),
        ("accuracy", {"block": None, "provider": "ours eager"}, "error", 1.1),
        ("accuracy", {"block": 7, "provider": "ours eager"}, "error", 1.1),
        ("captures", {"provider": "ours graph"}, "mebibytes", 1.1),
        ("hosts", {"provider": "ours graph"}, "microseconds", 1.2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_worse_fails(
    kind: str, which: dict[str, Any], name: str, factor: float, compared: Callable[[Run, Run], Result]
) -> None:
    run = synthetic_run()
    at = place(run, kind, **which)
    value = getattr(getattr(run, kind)[at], name)
    slower = changed(run, kind, at, **{name: value * factor})
    result = compared(run, slower)
    assert result.exit_code == 1
    assert "1 worse, 0 better" in result.output
    assert f"+{factor - 1:.1%}" in result.output
    back = compared(slower, run)
    assert back.exit_code == 0
    assert "0 worse, 1 better" in back.output


def test_other_bits_fail(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    at = place(run, "bits", provider="ours graph")
    result = compared(run, changed(run, "bits", at, equal=19))
    assert result.exit_code == 1
    assert "new" in result.output
    # one more of many counts too
    assert compared(changed(run, "bits", at, equal=5), changed(run, "bits", at, equal=4)).exit_code == 1


def test_fewer_images_with_the_same_bits_are_no_change(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    assert compared(run, changed(run, "bits", 0, equal=4, of=4)).exit_code == 0


def test_a_noisy_run_proves_less(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    at = place(run, "kernels", provider="ours")
    noisy = changed(run, "kernels", at, noise=0.04)
    time = run.kernels[at].microseconds
    assert compared(noisy, changed(noisy, "kernels", at, microseconds=time * 1.07)).exit_code == 0
    assert compared(noisy, changed(noisy, "kernels", at, microseconds=time * 1.09)).exit_code == 1


def test_noise_of_calls_is_that_of_the_same_encoder_again(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    graph, again, eager = (
        place(run, "calls", input="576", provider=name) for name in ("ours graph", "ours graph again", "ours eager")
    )
    time = run.calls[eager].median
    assert compared(run, changed(run, "calls", eager, median=1.04 * time)).exit_code == 1
    noisy = changed(run, "calls", again, median=1.05 * run.calls[graph].median)
    assert compared(noisy, changed(noisy, "calls", eager, median=1.04 * time)).exit_code == 0


def test_a_slower_peer_is_shown_and_does_not_fail(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    at = place(run, "calls", input="6,912", provider="vLLM eager")
    result = compared(run, changed(run, "calls", at, median=2 * run.calls[at].median))
    assert result.exit_code == 0
    assert "not ours" in result.output
    assert "+100.0%" in result.output


def test_what_one_run_lacks_is_said_with_its_reason(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    kernels = [kernel for kernel in run.kernels if kernel.provider != "FlashAttention-3"]
    without = replace(run, kernels=kernels, missing=[Missing("FlashAttention-3", "no [such] module")])
    result = compared(run, without)
    assert result.exit_code == 0
    assert "FlashAttention-3" in result.output
    assert "no [such] module" in result.output


def test_ours_failing_is_worse(compared: Callable[[Run, Run], Result]) -> None:
    run = synthetic_run()
    result = compared(run, replace(run, missing=[Missing("ours", "relative error 1.0e+00")]))
    assert result.exit_code == 1
    assert "relative error 1.0e+00" in result.output


def test_what_failed_before_or_was_left_out_on_purpose_is_no_failure(compared: Callable[[Run, Run], Result]) -> None:
    without = replace(synthetic_run(), missing=[Missing("ours graph", "no Triton")])
    assert compared(without, without).exit_code == 0
    assert compared(without, replace(without, missing=[Missing("ours graph", "no GPU")])).exit_code == 1
    quick = replace(synthetic_run(quick=True), missing=[Missing("ours with resampler", LEFT_OUT)])
    assert compared(synthetic_run(), quick).exit_code == 0


def test_runs_of_different_kinds_are_called_so(compared: Callable[[Run, Run], Result]) -> None:
    for other in (run_without_gpu(), synthetic_run(quick=True), synthetic_run(gpu="NVIDIA H100 80GB HBM3")):
        assert "different kinds" in compared(synthetic_run(), other).output
    assert "different kinds" not in compared(synthetic_run(), synthetic_run()).output


def test_empty_runs(compared: Callable[[Run, Run], Result]) -> None:
    empty = Run(synthetic_run().machine, quick=False)
    assert compared(empty, empty).exit_code == 0
    assert compared(synthetic_run(), empty).exit_code == 0


def test_a_file_that_is_no_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text('{"header": {}}')
    result = CliRunner().invoke(compare, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 1
    assert "expected a run of the benchmark" in result.output


def test_better_is_worse_the_other_way_round() -> None:
    for factor in (1.029, 1.031):
        there = Change(Key("", "", "", ""), 1.0, factor, 0.03)
        back = Change(Key("", "", "", ""), factor, 1.0, 0.03)
        assert there.is_worse == back.is_better == (factor > 1.03)


def test_every_figure_is_compared() -> None:
    run = synthetic_run()
    calls = [call for call in run.calls if call.provider != "ours graph again"]
    of_lists = 2 * len(calls) + 2 * len(run.kernels) + len(run.padding) + len(run.accuracy) + len(run.bits)
    # two paddings are in both curves
    twice = len(run.padding) - len({(p.rows, p.capacity, p.provider) for p in run.padding})
    assert len(changes(run, run)) == of_lists - twice + len(run.hosts) + 2 * len(run.captures)
