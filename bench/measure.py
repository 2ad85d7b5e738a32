"""The one place that times: graph replays on cold inputs, interleaved providers, correctness before speed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]

ROUNDS = 9
GRAPH_SECONDS = 2e-3  # a replay is at least about this long, so that its launch does not count
COLD = 3  # the inputs of a replay are this many times the L2 cache
MAX_CALLS = 200
ALLOWED_ERROR = 2.0  # times the error of plain PyTorch; a wrong result is off by far more


def whole(out: Tensor) -> Tensor:
    return out


@dataclass(frozen=True)
class Reference:
    """What a provider should compute.

    Attributes:
        exact: the result in float64 (or far more exact than the provider).
        plain: the result in plain PyTorch at the inputs' dtype; its error is the measure.
        part: what of a provider's output ``exact`` and ``plain`` give.
    """

    exact: Callable[[Inputs], Tensor]
    plain: Callable[[Inputs], Tensor]
    part: Callable[[Tensor], Tensor] = whole


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        run: the call that is timed.
        reference: what it should compute.
        live: how many of the rows it computes; None: all.
    """

    run: Callable[[Inputs], Tensor]
    reference: Reference
    live: int | None = None


@dataclass(frozen=True)
class Case:
    """One computation at one size, by several providers; the first is ours.

    Attributes:
        make: fresh inputs from a seed, on the GPU.
        flops, moved_bytes: of one call with all rows live; ``moved_bytes`` counts each input and output once.
    """

    kernel: str
    name: str
    rows: int
    make: Callable[[int], Inputs]
    providers: Mapping[str, Provider]
    flops: float
    moved_bytes: float


@dataclass(frozen=True)
class Row:
    """A provider's figures; one row of a table."""

    kernel: str
    name: str
    rows: int
    provider: str
    microseconds: float
    of_ours: float  # its time over ours
    tflops: float
    gigabytes_per_second: float
    of_ceiling: float  # the least time that the measured ceilings allow over its time
    error: float
    plain_error: float
    noise: float  # how far two timings of ours in this case differ


class WrongResultError(AssertionError):
    """A provider's result is wrong: it is not timed."""


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reaches: bytes read and written a second by a copy, FLOP a second of a large bf16 product."""

    copy: float
    product: float

    def least_seconds(self, flops: float, moved_bytes: float) -> float:
        return max(flops / self.product, moved_bytes / self.copy)


@cache
def ceilings() -> Ceilings:
    source = torch.randn(2**28, device="cuda")  # 1 GiB
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # a kernel that reads and writes: inside a graph copy_() is a memcpy node, which an H200 ran at 2.75 TB/s
    copy = capture(lambda _: torch.neg(source, out=target), [{}], calls=4)
    product = capture(lambda _: a @ b, [{}], calls=4)
    copies, products = zip(*((seconds(copy), seconds(product)) for _ in range(ROUNDS)), strict=True)
    return Ceilings(copy=4 * 2 * source.nbytes / median(copies), product=4 * 2 * 8192**3 / median(products))


def measure(case: Case) -> tuple[list[Row], torch.cuda.CUDAGraph]:
    """Check and time each provider of a case; ours is also returned as a captured graph of ``calls(case)`` calls.

    Raises:
        WrongResultError: a provider's error is more than ``ALLOWED_ERROR`` times that of plain PyTorch.
    """
    errors = check(case)
    inputs = [case.make(seed) for seed in range(copies(case))]
    runs = {name: provider.run for name, provider in case.providers.items()}
    ours = next(iter(runs))
    runs[""] = runs[ours]  # a second time, for the noise
    graphs = {name: capture(run, inputs, calls(case)) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name].append(seconds(graph) / calls(case))
    time = {name: median(of_one) for name, of_one in samples.items()}
    noise = abs(time.pop("") / time[ours] - 1)

    rows = []
    for name, provider in case.providers.items():
        share = 1.0 if provider.live is None else provider.live / case.rows
        flops, moved = case.flops * share, case.moved_bytes * share
        rows.append(
            Row(
                kernel=case.kernel,
                name=case.name,
                rows=case.rows,
                provider=name,
                microseconds=time[name] * 1e6,
                of_ours=time[name] / time[ours],
                tflops=flops / time[name] / 1e12,
                gigabytes_per_second=moved / time[name] / 1e9,
                of_ceiling=ceilings().least_seconds(flops, moved) / time[name],
                error=errors[name][0],
                plain_error=errors[name][1],
                noise=noise,
            )
        )
    return rows, graphs[ours]


@torch.no_grad()
def check(case: Case) -> dict[str, tuple[float, float]]:
    """Each provider's relative error, and that of plain PyTorch, on the rows that it computes."""
    expected: dict[Reference, tuple[Tensor, float]] = {}
    errors = {}
    for name, provider in case.providers.items():
        reference = provider.reference
        if reference not in expected:
            exact = reference.exact(case.make(0))
            expected[reference] = exact, relative_error(reference.plain(case.make(0)), exact)
        exact, plain_error = expected[reference]
        # in poisoned memory, and on inputs of its own: some providers work in place
        poison = torch.full((256 * 2**20,), 0xFF, dtype=torch.uint8, device="cuda")
        del poison
        out = reference.part(provider.run(case.make(0)))[: provider.live]
        error = relative_error(out, exact[: provider.live])
        if not error <= ALLOWED_ERROR * plain_error:
            raise WrongResultError(
                f"{case.kernel} {case.name}, {case.rows} rows, {name}: relative error {error:.2e}, "
                f"plain PyTorch's {plain_error:.2e}"
            )
        errors[name] = error, plain_error
    return errors


def relative_error(out: Tensor, exact: Tensor) -> float:
    """``||out - exact|| / ||exact||``; NaN if ``out`` is not finite everywhere."""
    exact = exact.double()
    return float((out.double() - exact).norm() / exact.norm())


def copies(case: Case) -> int:
    """How many sets of inputs are rotated, so that none lies in the L2 cache when its turn comes."""
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(math.ceil(COLD * cache_bytes / case.moved_bytes), MAX_CALLS))


def calls(case: Case) -> int:
    """How many calls a graph holds, a multiple of ``copies``."""
    wanted = GRAPH_SECONDS / max(ceilings().least_seconds(case.flops, case.moved_bytes), 2e-6)
    return copies(case) * math.ceil(min(wanted, MAX_CALLS) / copies(case))


@torch.no_grad()
def capture(run: Callable[[Inputs], Tensor], inputs: list[Inputs], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls on the inputs in turn, replayed once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(inputs[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(inputs[call % len(inputs)])
    graph.replay()
    torch.cuda.synchronize()
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, by events on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
