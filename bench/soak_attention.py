"""Soak of the Gluon attention tiles: thousands of launches into poisoned outputs, compared bit by bit on the device.

A missing barrier shows once in many launches, so one comparison proves nothing. Each tile runs on round and ragged
lengths, from buffers whose rows past the sequences hold NaN; every launch must give the same bits, no NaN in a live
row, and must leave the poison in all others. Launches come in pairs that follow each other at once. Run:
``python -m bench.soak_attention``; and two of it at the same time, for then the GPU changes from one process to the
other in the middle of launches, which has found what 10,000 launches alone had not.
"""

import time
from dataclasses import dataclass
from itertools import product

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.compile_ahead import compile_ahead
from bench.measure import relative_error
from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention_ref
from ernie_vit.kernels.hopper.attention import launch_attention
from ernie_vit.kernels.tiles.attention import HOPPER_TILES, HopperTile
from ernie_vit.kernels.triton.work_list import make_work_list
from ernie_vit.machine import why_no_gpu

HEADS, HEAD_DIM = 16, 80
SPARE_ROWS = 200
LENGTHS = {
    "16 x 256": [256] * 16,
    "ragged": [1, 15, 16, 17, 63, 64, 65, 129, 300, 1296, 7],
}
DTYPES = (torch.bfloat16, torch.float16)
PAIRS_A_GRAPH = 25
FUSED_RATIO = 1.05  # of errors: PyTorch's flash backend splits the keys of few rows, which spares some roundings
REPLAYS_A_BATCH = 10  # then new inputs, and one read of the counters


class Launches:
    """Launches of one tile on fixed buffers: ``live`` rows in sequences, and ``SPARE_ROWS`` of NaN after them."""

    def __init__(self, tile: HopperTile, lengths: list[int], dtype: torch.dtype) -> None:
        self.tile, self.live, self.max_seqlen = tile, sum(lengths), max(lengths)
        rows = self.live + SPARE_ROWS
        self.cu_seqlens = torch.tensor([0, *lengths, 0, 0]).cumsum(0).to(torch.int32).cuda()
        self.qkv = torch.full((rows, 3, HEADS, HEAD_DIM), float("nan"), dtype=dtype, device="cuda")
        self.qkv[: self.live].normal_()
        self.work_list = make_work_list(self.cu_seqlens, tile, num_rows=rows, num_heads=HEADS)

    def poisoned(self) -> Tensor:
        return torch.full_like(self.qkv[:, 0], float("nan"), memory_format=torch.contiguous_format)

    def __call__(self, out: Tensor) -> None:
        launch_attention(*self.qkv.unbind(1), out, self.work_list, scale=HEAD_DIM**-0.5, tile=self.tile)

    def errors(self, out: Tensor) -> tuple[float, float]:
        """The errors against float32 of ``out``, and of PyTorch with the same rounding points."""
        inputs = [x[: self.live].contiguous() for x in self.qkv.unbind(1)]
        exact = attention_ref(*(x.float() for x in inputs), self.cu_seqlens, self.max_seqlen)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            plain = attention_ref(*inputs, self.cu_seqlens, self.max_seqlen)
        return relative_error(out[: self.live], exact), relative_error(plain, exact)


@dataclass
class Counters:
    """On the device: launches with a NaN in a live row, and launches whose bits differ anywhere from the first."""

    nan: Tensor
    different: Tensor


@dataclass(frozen=True)
class Outcome:
    """Launches, those with NaN, those with other bits, and the largest errors: the tile's and PyTorch's."""

    launches: int
    nan: int
    different: int
    error: float
    budget: float

    @property
    def failed(self) -> bool:
        return self.nan > 0 or self.different > 0 or not self.error <= FUSED_RATIO * self.budget


def capture(launch: Launches, expected: Tensor) -> tuple[torch.cuda.CUDAGraph, Counters]:
    """A graph of pairs of launches, each into a new poison, and of their comparison with ``expected``."""
    counters = Counters(*torch.zeros(2, dtype=torch.int64, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [torch.empty_like(expected) for _ in range(2)]
        for _ in range(PAIRS_A_GRAPH):
            for out in outputs:
                out.fill_(float("nan"))
            for out in outputs:
                launch(out)
            for out in outputs:
                counters.nan += out[: launch.live].isnan().any()
                counters.different += (out.view(torch.int16) != expected.view(torch.int16)).any()
    return graph, counters


def soak(tile: HopperTile, lengths: list[int], dtype: torch.dtype, count: int) -> Outcome:
    """Run at least ``count`` launches."""
    launch = Launches(tile, lengths, dtype)
    expected = launch.poisoned()
    launch(expected)
    graph, counters = capture(launch, expected)
    launches, error, budget = 0, 0.0, 0.0
    while launches < count:
        launch.qkv[: launch.live].normal_()
        expected.fill_(float("nan"))
        launch(expected)
        for _ in range(REPLAYS_A_BATCH):
            graph.replay()
        launches += 2 * PAIRS_A_GRAPH * REPLAYS_A_BATCH
        of_batch, plain = launch.errors(expected)
        error = of_batch if of_batch != of_batch else max(error, of_batch)
        budget = max(budget, plain)
    return Outcome(launches, int(counters.nan), int(counters.different), error, budget)


def launch_once(variant: tuple[HopperTile, torch.dtype]) -> None:
    tile, dtype = variant
    launch = Launches(tile, [1], dtype)
    launch(launch.poisoned())


@click.command(help=__doc__)
@click.option("--count", default=10_000, show_default=True, help="Launches of each tile, over dtypes and lengths.")
def main(count: int) -> None:
    started = time.perf_counter()
    reason = why_no_gpu() or dispatch.why_not_gluon(torch.device("cuda", 0), torch.bfloat16)
    if reason is not None:
        raise click.ClickException(f"there is no Gluon kernel to soak: {reason}")
    compile_ahead(launch_once, list(product(HOPPER_TILES, DTYPES)))
    lines, bad = [], False
    share = -(-count // (len(DTYPES) * len(LENGTHS)))
    for tile, dtype, (name, lengths) in product(HOPPER_TILES, DTYPES, LENGTHS.items()):
        outcome = soak(tile, lengths, dtype, share)
        bad |= outcome.failed
        lines.append(
            f"{'FAILED' if outcome.failed else 'passed'} {str(dtype).removeprefix('torch.'):8} {name:8} "
            f"{outcome.launches:6,} launches, {outcome.nan} with NaN, {outcome.different} with other bits, "
            f"error {outcome.error:.6f} (PyTorch {outcome.budget:.6f})  {tile.warpgroups} warpgroups, "
            f"{'persistent' if tile.persistent else 'an item each'}"
        )
    click.echo("\n".join(lines))
    click.echo(
        f"{'FAILED' if bad else 'passed'}: {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {dispatch.triton_version()}, {time.perf_counter() - started:.0f} s"
    )
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
