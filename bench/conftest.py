"""Microbenchmarks run as tests: ``pytest bench --benchmark-only``; without a GPU they are skipped."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.measure import ROUNDS, Case, calls, measure
from bench.results import Results

RUN = pytest.StashKey[Results]()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    named = parent.session.isinitpath(file_path)  # on the command line: pytest collects it itself
    if file_path.suffix == ".py" and file_path.name.startswith("bench_") and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(here):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    pytestconfig.stash[RUN] = Results()
    return pytestconfig.stash[RUN]


@pytest.fixture
def run_case(benchmark: Any, results: Results) -> Iterator[Callable[[Case], None]]:
    """Measures a case; the figures of all providers go to the results, ours to pytest-benchmark as well."""

    def run(case: Case) -> None:
        rows, ours = measure(case)
        results.add(rows)

        def replay() -> None:
            ours.replay()
            torch.cuda.synchronize()

        benchmark.pedantic(replay, rounds=ROUNDS, warmup_rounds=1)
        benchmark.extra_info["calls in a replay"] = calls(case)
        for row in rows:
            benchmark.extra_info[row.provider] = {
                "us": row.microseconds,
                "TFLOP/s": row.tflops,
                "GB/s": row.gigabytes_per_second,
                "of ceiling": row.of_ceiling,
                "error": row.error,
            }

    yield run
    torch.cuda.empty_cache()


def pytest_terminal_summary(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].print()
