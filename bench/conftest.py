"""Microbenchmarks run as tests: ``pytest bench --benchmark-only``; without a GPU they are skipped."""

from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import measure
from bench.attention_peers import Adapter, available
from bench.findings import OURS, Findings
from bench.measure import Case, calls
from bench.records import Machine, Run
from bench.report import rich_table
from bench.tables import kernel, missing


def findings_of(config: pytest.Config) -> Findings | None:
    return next((plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, Findings)), None)


def pytest_configure(config: pytest.Config) -> None:
    """``bench.kernels`` brings findings of its own and shows them itself."""
    if findings_of(config) is None:
        config.pluginmanager.register(Findings())
        config.pluginmanager.register(Summary())
    if not config.pluginmanager.has_plugin("benchmark"):
        config.pluginmanager.register(WithoutPlugin())


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    named = parent.session.isinitpath(file_path)  # on the command line: pytest collects it itself
    if file_path.suffix == ".py" and file_path.name.startswith("bench_") and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, why_not = Path(__file__).parent, measure.why_not_measured()
    if why_not:
        for item in items:
            if item.path.is_relative_to(here):
                item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.fixture(scope="session")
def findings(pytestconfig: pytest.Config) -> Findings:
    found = findings_of(pytestconfig)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def attention_peers(findings: Findings) -> dict[str, Adapter]:
    """Attention's peers that this machine has, by name; the others are noted as missing."""
    if findings.only_compile:
        return {}
    peers, why_not = available(quick=findings.quick)
    for name, reason in why_not.items():
        findings.miss(name, reason)
    return peers


@pytest.fixture
def run_case(benchmark: Any, findings: Findings) -> Iterator[Callable[[Case], None]]:
    """Measures a case; the figures of all providers go to the findings, ours to pytest-benchmark as well."""

    def run(case: Case) -> None:
        measured = findings.run(case)
        if benchmark is None or OURS not in measured.graphs:
            return

        def replay() -> None:
            measured.graphs[OURS].replay()
            torch.cuda.synchronize()

        benchmark.pedantic(replay, rounds=findings.rounds)
        benchmark.extra_info["calls in a replay"] = calls(case)
        for of_one in measured.kernels:
            benchmark.extra_info[of_one.provider] = {
                "us": of_one.microseconds,
                "TFLOP/s": of_one.tflops,
                "GB/s": of_one.gigabytes_per_second,
                "of ceiling": of_one.of_ceiling,
                "error": of_one.error,
            }

    yield run
    torch.cuda.empty_cache()


class WithoutPlugin:
    """In place of pytest-benchmark, which only ``pytest bench`` by itself needs."""

    @pytest.fixture
    def benchmark(self) -> None:
        return None


class Summary:
    """The tables at the end of a session."""

    def pytest_terminal_summary(self, config: pytest.Config) -> None:
        found = findings_of(config)
        assert found is not None
        if found.kernels:
            gpu, reached = torch.cuda.get_device_name(0), measure.ceilings()
            machine = Machine(str(date.today()), gpu, {}, "", reached.copy, reached.product)
            run = Run(machine, quick=False, kernels=found.kernels, missing=found.missing)
            shown = [kernel(name, run) for name in dict.fromkeys(of_one.kernel for of_one in run.kernels)]
            for table in (*shown, missing(run)):
                if table.rows:
                    Console(width=140).print(rich_table(table))
