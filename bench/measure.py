"""The one place that times: graph replays on cold inputs, interleaved providers, correctness before speed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.records import Clocks, Kernel
from bench.sensors import sensors

Inputs = Mapping[str, Any]
T = TypeVar("T")

ROUNDS = 9
GRAPH_SECONDS = 2e-3  # a replay is at least about this long, so that its start does not count
COLD = 3  # what the calls of a replay move is this many times the L2 cache
MAX_CALLS = 200
ALLOWED_ERROR = 2.0  # times the error of plain PyTorch; a wrong result is off by far more
REASON_LENGTH = 200


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
class Work:
    """What a call has to do.

    Attributes:
        moved_bytes: counts each input and output once.
        padded_flops: FLOPs in whole rounds of tiles (``bench/ideal.py``); None where nothing is multiplied.
    """

    flops: float
    moved_bytes: float
    padded_flops: float | None = None


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        run: the call that is timed.
        reference: what it should compute.
        live: how many of the rows it computes; None: all.
        work: where it differs from the case's.
        quick: whether it also belongs to the quick run; what compiles for seconds does not.
    """

    run: Callable[[Inputs], Tensor]
    reference: Reference
    live: int | None = None
    work: Work | None = None
    quick: bool = True


@dataclass(frozen=True)
class Case:
    """One computation at one size, by several providers; the first is ours.

    Attributes:
        make: fresh inputs from a seed, on the GPU.
        work: of one call with all rows live.
    """

    kernel: str
    name: str
    rows: int
    make: Callable[[int], Inputs]
    providers: Mapping[str, Provider]
    work: Work


@dataclass(frozen=True)
class Measured:
    """What a case gave.

    Attributes:
        failures: provider -> why it was not timed.
        graphs: ``calls(case)`` calls each, of the providers that were.
        inputs: what the graphs read and some of them write: it lives as long as they do.
    """

    kernels: list[Kernel] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)
    inputs: list[Inputs] = field(default_factory=list)


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
    graphs = {
        "copy": capture(lambda _: torch.neg(source, out=target), [{}], calls=4),
        "product": capture(lambda _: a @ b, [{}], calls=4),
    }
    time = timed(graphs, ROUNDS)
    return Ceilings(copy=4 * 2 * source.nbytes / time["copy"], product=4 * 2 * 8192**3 / time["product"])


@torch.no_grad()
def measure(case: Case, rounds: int = ROUNDS) -> Measured:
    """Check and time each provider of a case. One that is wrong or fails does not keep the others from it."""
    found = Measured()
    errors = check(case, found.failures)
    found.inputs.extend(case.make(seed) for seed in range(copies(case)) if errors)
    for name in errors:
        arguments = case.providers[name].run, found.inputs, calls(case)
        graph = attempt(name, found.failures, capture, *arguments)
        if graph is not None:
            found.graphs[name] = graph
    if not found.graphs:
        return found
    first = next(iter(found.graphs))
    again = capture(case.providers[first].run, found.inputs, calls(case))  # a second time, for the noise
    time = timed({**found.graphs, "": again}, rounds)
    noise, clocks = abs(time[""] / time[first] - 1), sensors().read()
    found.kernels.extend(
        _figures(case, name, time[name] / calls(case), errors[name], noise, clocks) for name in found.graphs
    )
    return found


def _figures(
    case: Case, name: str, seconds: float, errors: tuple[float, float], noise: float, clocks: Clocks | None
) -> Kernel:
    work = case.providers[name].work or case.work
    padded = work.padded_flops
    return Kernel(
        kernel=case.kernel,
        case=case.name,
        rows=case.rows,
        provider=name,
        microseconds=seconds * 1e6,
        tflops=work.flops / seconds / 1e12,
        gigabytes_per_second=work.moved_bytes / seconds / 1e9,
        of_ceiling=ceilings().least_seconds(work.flops, work.moved_bytes) / seconds,
        of_ideal=None if padded is None else ceilings().least_seconds(padded, work.moved_bytes) / seconds,
        error=errors[0],
        plain_error=errors[1],
        noise=noise,
        clocks=clocks,
    )


def check(case: Case, failures: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Each right provider's relative error, and that of plain PyTorch, on the rows that it computes.

    Args:
        failures: gets the others, with the reason.
    """
    expected: dict[Reference, tuple[Tensor, Tensor]] = {}
    errors = {}
    for name, provider in case.providers.items():
        reference = provider.reference
        if reference not in expected:
            expected[reference] = reference.exact(case.make(0)), reference.plain(case.make(0))
        exact, plain = (result[: provider.live] for result in expected[reference])
        plain_error = relative_error(plain, exact)
        error = attempt(name, failures, check_provider, case, provider, exact, plain_error)
        if error is not None:
            errors[name] = error, plain_error
    return errors


def check_provider(case: Case, provider: Provider, exact: Tensor, plain_error: float) -> float:
    """The relative error of a result in poisoned memory, on inputs of its own: some providers work in place.

    Raises:
        WrongResultError: it is more than ``ALLOWED_ERROR`` times that of plain PyTorch.
    """
    first, second = case.make(0), case.make(0)
    provider.run(first).fill_(math.nan)  # and freed: the next result comes to lie there
    with forbid_waiting():
        out = provider.run(second)
    error = relative_error(provider.reference.part(out)[: provider.live], exact)
    if not error <= ALLOWED_ERROR * plain_error:
        raise WrongResultError(f"wrong by value: relative error {error:.2e}, plain PyTorch's {plain_error:.2e}")
    return error


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Make PyTorch raise where it would wait for the GPU: nothing that does can be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def attempt(name: str, failures: dict[str, str], function: Callable[..., T], *arguments: Any) -> T | None:
    """What the function returns; None, and a failure of ``name``, if it raises: whatever a peer lacks here."""
    try:
        return function(*arguments)
    except Exception as error:
        failures[name] = reason(error)
        return None


def reason(error: BaseException) -> str:
    """One line of an exception."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, WrongResultError) else f"{type(error).__name__}: {text}"[:REASON_LENGTH]


def relative_error(out: Tensor, exact: Tensor) -> float:
    """``||out - exact|| / ||exact||``; NaN if ``out`` is not finite everywhere."""
    exact = exact.double()
    return float((out.double() - exact).norm() / exact.norm())


def why_not_measured() -> str | None:
    """None where this machine can measure, else what it lacks."""
    return None if torch.cuda.is_available() else "needs a CUDA GPU"


def copies(case: Case) -> int:
    """How many sets of inputs are rotated, so that none lies in the L2 cache when its turn comes (200 at most)."""
    moved_bytes = min((provider.work or case.work).moved_bytes for provider in case.providers.values())
    return max(2, min(math.ceil(COLD * cache_bytes() / moved_bytes), MAX_CALLS))


def cache_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def calls(case: Case) -> int:
    """How many calls a graph holds, a multiple of ``copies``."""
    wanted = GRAPH_SECONDS / max(ceilings().least_seconds(case.work.flops, case.work.moved_bytes), 2e-6)
    return copies(case) * math.ceil(min(wanted, MAX_CALLS) / copies(case))


@torch.no_grad()
def capture(run: Callable[[Inputs], Tensor], inputs: Sequence[Inputs], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls on the inputs in turn, replayed once."""
    run(inputs[0])  # what is loaded, compiled or planned by a first call
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # the outer context: a capture that fails leaves its own stream the current one
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            for call in range(calls):
                run(inputs[call % len(inputs)])
    except Exception:
        end_failed_capture(graph, pool)
        raise
    graph.replay()
    torch.cuda.synchronize()
    return graph


def end_failed_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Tell PyTorch's allocator that a capture is over: before 2.12 it is not told, and no other capture can start."""
    _failed_graphs.append(graph)
    with suppress(RuntimeError):  # it knows
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


_failed_graphs: list[torch.cuda.CUDAGraph] = []  # kept, since the allocator of pinned memory may still ask them


def timed(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """The median of each graph's seconds; the graphs take turns.

    A round is queued as a whole behind a replay that is not timed, so that the GPU never waits for the host.
    """
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        next(iter(graphs.values())).replay()
        events = {name: _queue(graph) for name, graph in graphs.items()}
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            samples[name].append(start.elapsed_time(end) / 1e3)
    return {name: median(of_one) for name, of_one in samples.items()}


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, by events on the device."""
    start, end = _queue(graph)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _queue(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    return start, end
