"""A pytest plugin that runs the cases of the kernels' benchmarks and keeps what they found."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from bench.measure import ROUNDS, Case, Measured, measure, reason
from bench.records import Kernel, Missing
from bench.sizes import QUICK_SIZES

QUICK_ROUNDS = 5
OURS = "ours"


class OursFailedError(AssertionError):
    """Ours is wrong or failed; the findings have the reason already."""


class Findings:
    """What one session of pytest found.

    Args:
        sizes: the ``rows`` of the tests that are run; default: all, or ``QUICK_SIZES`` of a quick run.
        quick: fewer sizes, rounds and providers.
        only_compile: run ours once and measure nothing.
    """

    def __init__(self, *, sizes: Iterable[str] = (), quick: bool = False, only_compile: bool = False) -> None:
        self.quick = quick
        self.only_compile = only_compile
        self.rounds = QUICK_ROUNDS if quick else ROUNDS
        self.kernels: list[Kernel] = []
        self.interrupt: BaseException | None = None
        self._sizes = set(sizes) or set(QUICK_SIZES if quick else ())
        self._missing: dict[tuple[str, str], str] = {}  # provider and reason, and where it was met first

    @property
    def missing(self) -> list[Missing]:
        return [
            Missing(provider, f"{why} ({where})" if where else why) for (provider, why), where in self._missing.items()
        ]

    def miss(self, provider: str, why: str, where: str = "") -> None:
        self._missing.setdefault((provider, why), where)

    def run(self, case: Case) -> Measured:
        """Measure a case and keep its figures, and why providers have none.

        Raises:
            OursFailedError: that is so of one of ours; its peers are measured all the same.
        """
        if self.only_compile:
            run_ours(case)
            return Measured()
        if self.quick:
            able = {name: provider for name, provider in case.providers.items() if provider.quick}
            case = replace(case, providers=able)
        measured = measure(case, self.rounds)
        self.kernels += measured.kernels
        for name, why in measured.failures.items():
            self.miss(name, why, f"{case.kernel} {case.name}, {case.rows:,} rows")
        ours = [f"{name}: {why}" for name, why in measured.failures.items() if name.startswith(OURS)]
        if ours:
            raise OursFailedError("; ".join(ours))
        return measured

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._sizes:
            config.hook.pytest_deselected(items=[item for item in items if size(item) not in self._sizes])
            items[:] = [item for item in items if size(item) in self._sizes]

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.interrupt = excinfo.value

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object]) -> None:
        assert call.excinfo is not None
        error = call.excinfo.value
        if not isinstance(error, OursFailedError):
            # a file that cannot be imported: pytest's own error stands in front of its cause
            self.miss(OURS, reason(error.__cause__ or error), node.name)


def size(item: pytest.Item) -> str:
    """Of a benchmark: its ``rows``."""
    assert isinstance(item, pytest.Function)
    return str(item.callspec.params["rows"])


@torch.no_grad()
def run_ours(case: Case) -> None:
    """Each of our providers once, which compiles it."""
    for name, provider in case.providers.items():
        if name.startswith(OURS):
            provider.run(case.make(0))
