"""Timing whole calls, as vLLM times its encoder: synchronise, call, synchronise. The host's work is part of a call.

Providers take turns in balanced orders, so that neither a drift of the clocks nor what ran just before favours one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bench.encoders.encoder import Encoder
from bench.plan import Plan, Sizes, num_patches, pixels
from bench.records import Call, Clocks, Host, Missing
from bench.samples import balanced_orders, percentile_99, spread
from bench.sensors import middle, sensors

MIX = "mix"
WARM_UPS = 4
LEAST_ROUNDS = 8  # however long they take
DEVICE_ROUNDS = 3
HEAD_START = 1.25  # times the host's time, for which the GPU waits before its work is timed
HOST_CALLS, QUICK_HOST_CALLS = 30, 10
CLOCKS_EVERY = 4  # calls; reading them takes up to milliseconds, in which the GPU rests


@dataclass
class Samples:
    """Milliseconds of one provider's calls."""

    total: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    clocks: list[Clocks | None] = field(default_factory=list)

    def take(self, encoder: Encoder, rows: Tensor, grid: Tensor) -> None:
        """Time one call, and of every few read the clocks right behind it."""
        host, total = time_call(encoder.run, rows, grid)
        if len(self.total) % CLOCKS_EVERY == 0:
            self.clocks.append(sensors().read())
        self.host.append(host)
        self.total.append(total)

    def figures(self, name: str, provider: str, calls: Sequence[Sizes], *, device: float | None, apart: float) -> Call:
        """What they say together.

        Args:
            name: of the input.
            calls: whose times these are, each as often as any other.
            device: milliseconds of the GPU's work, where they were measured.
            apart: the samples' spread.
        """
        images = sum(map(len, calls))
        return Call(
            input=name,
            patches=sum(map(num_patches, calls)),
            images=images,
            provider=provider,
            median=median(self.total),
            mean=mean(self.total),
            p99=percentile_99(self.total),
            host=median(self.host),
            device=device,
            images_per_second=images * 1e3 / (len(calls) * mean(self.total)),
            spread=apart,
            clocks=middle(self.clocks),
        )


def time_call(call: Callable[[Tensor, Tensor], Any], rows: Tensor, grid: Tensor) -> tuple[float, float]:
    """Milliseconds until a call returns, and until the device has finished it."""
    synchronize()
    started = time.perf_counter()
    out = call(rows, grid)
    returned = time.perf_counter()
    synchronize()
    ended = time.perf_counter()
    del out  # here, so that no call frees another's result
    return (returned - started) * 1e3, (ended - started) * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_input(name: str, sizes: Sizes, encoders: Sequence[Encoder], plan: Plan) -> tuple[list[Call], list[Missing]]:
    """Each encoder's times of one input, and the encoders that raised."""
    able, missing = warm_up(name, [encoder for encoder in encoders if encoder.takes(sizes)], [sizes] * WARM_UPS, plan)
    rows, grid = pixels(sizes, device=plan.device, dtype=plan.dtype), torch.tensor(sizes)
    samples = [Samples() for _ in able]
    orders, started = balanced_orders(len(able)), time.perf_counter()
    for turn in range(plan.rounds):
        if turn >= LEAST_ROUNDS and time.perf_counter() - started > plan.seconds:
            break
        for place in orders[turn % len(orders)] if able else ():
            samples[place].take(able[place], rows, grid)
    calls = []
    for encoder, of in zip(able, samples, strict=True):
        device = device_milliseconds(encoder, rows, grid, median(of.host))
        calls.append(of.figures(name, encoder.provider, [sizes], device=device, apart=spread(of.total)))
    return calls, missing


def measure_mix(encoders: Sequence[Encoder], plan: Plan) -> tuple[list[Call], list[Missing]]:
    """Each encoder's times of the mix, every call on fresh rows and of sizes that it has met; and those that raised."""
    able, missing = warm_up(MIX, encoders, plan.mix, plan)
    samples = [Samples() for _ in able]
    orders = balanced_orders(len(able))
    for turn in range(plan.mix_passes):
        for call, sizes in enumerate(tqdm(plan.mix, desc=f"{MIX}, pass {turn + 1}", leave=False, disable=None)):
            rows, grid = pixels(sizes, device=plan.device, dtype=plan.dtype), torch.tensor(sizes)
            for place in orders[(call + turn) % len(orders)] if able else ():
                samples[place].take(able[place], rows, grid)
    calls = [
        # the passes are the halves
        of.figures(MIX, encoder.provider, plan.mix, device=None, apart=spread(of.total, mean))
        for encoder, of in zip(able, samples, strict=True)
    ]
    return calls, missing


def warm_up(
    name: str, encoders: Sequence[Encoder], calls: Sequence[Sizes], plan: Plan
) -> tuple[list[Encoder], list[Missing]]:
    """Let each encoder make all of the calls: those that can, and those that raised."""
    missing = []

    def is_able(encoder: Encoder) -> bool:
        try:
            for sizes in calls:
                time_call(encoder.run, pixels(sizes, device=plan.device, dtype=plan.dtype), torch.tensor(sizes))
        except Exception as error:  # whatever a peer does not like here: the others are timed all the same
            missing.append(Missing.of(f"{encoder.provider}, {name}", error))
            return False
        return True

    return [encoder for encoder in encoders if is_able(encoder)], missing


def device_milliseconds(encoder: Encoder, rows: Tensor, grid: Tensor, host: float) -> float | None:
    """The GPU's work on a call, by events. The GPU waits first, so that the host is ahead and leaves no gaps.

    In a call that itself waits for the GPU the host cannot be ahead: the time then has the gaps that it leaves, up to
    the whole of the host's.
    """
    if not torch.cuda.is_available():
        return None
    times = []
    cycles = int(HEAD_START * host * 1e-3 * 2e9)  # of a clock of at most about 2 GHz
    for _ in range(DEVICE_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        start.record()
        out = encoder.run(rows, grid)
        end.record()
        end.synchronize()
        del out
        times.append(start.elapsed_time(end))
    return median(times)


def measure_host(encoder: Encoder, plan: Plan) -> Iterator[Host]:
    """Time until a small call returns: of one size again and again, and of sizes that were never met before."""
    same, count = next(iter(plan.inputs.values())), QUICK_HOST_CALLS if plan.quick else HOST_CALLS
    for met_before, calls in ((True, [same] * count), (False, new_sizes(num_patches(same), plan)[:count])):
        times = []
        for sizes in calls:
            rows, grid = pixels(sizes, device=plan.device, dtype=plan.dtype), torch.tensor(sizes)
            times.append(time_call(encoder.run, rows, grid)[0] * 1e3)
        yield Host(encoder.provider, met_before, median(times[WARM_UPS if met_before else 0 :]))


def new_sizes(patches: int, plan: Plan) -> list[Sizes]:
    """Single images of about ``patches`` patches that nothing else in the plan has."""
    known = {tuple(size) for sizes in (*plan.inputs.values(), *plan.mix, plan.images, plan.live) for size in sizes}
    sides = range(2, patches, 2)
    found = [(1, h, w) for h in sides for w in sides if 0.75 * patches <= h * w <= 1.25 * patches]
    squarest = sorted(found, key=lambda size: abs(size[1] - size[2]))
    return [[size] for size in squarest if size not in known][:HOST_CALLS]
