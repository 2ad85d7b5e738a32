"""Time candidate tiles of attention over sizes of input, to choose the rows of ``kernels/tiles/attention.py``.

Correctness first: a tile whose error is above PyTorch's, or whose bits differ from those of the other tiles of its
backend, is named and not timed. Then CUDA graphs of many calls on rotated inputs; the median of several replays. The
work list is made before: a forward pass makes it once for all its blocks. Run: ``python -m bench.tune_attention``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import click
import torch
from torch import Tensor

from bench.measure import Inputs, capture, seconds
from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention_ref
from ernie_vit.kernels.tiles.attention import HopperTile, PlainTile, attention_tile, work_list_shape
from ernie_vit.kernels.triton.work_list import launch_work_list

HEADS, HEAD_DIM = 16, 80
INPUTS = 3  # rotated
REPLAYS = 7
GRAPH_SECONDS = 4e-3  # of calls in one graph, about

HOPPER_CANDIDATES = [
    HopperTile(warpgroups=1, turns=False, persistent=False, programs=2, maxnreg=120),
    HopperTile(warpgroups=1, turns=False, persistent=True, programs=2, maxnreg=120),
    HopperTile(warpgroups=3, turns=False, persistent=False, programs=1, maxnreg=None),
    HopperTile(warpgroups=3, turns=True, persistent=False, programs=1, maxnreg=None),
    HopperTile(warpgroups=3, turns=True, persistent=True, programs=1, maxnreg=None),
]
PLAIN_CANDIDATES = [
    PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=2),
    PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=3),
    PlainTile(rows=64, keys=64, num_warps=4, num_stages=3, programs=3),
    PlainTile(rows=128, keys=64, num_warps=8, num_stages=2, programs=1),
]
Tile = HopperTile | PlainTile


@dataclass(frozen=True)
class Case:
    """Sequences in buffers of ``rows`` rows and ``sequences`` offsets; by default of exactly their size."""

    lengths: tuple[int, ...]
    rows: int | None = None
    sequences: int | None = None

    @property
    def capacity(self) -> int:
        return self.rows or sum(self.lengths)

    def __str__(self) -> str:
        same = len(set(self.lengths)) == 1
        name = f"{len(self.lengths)} x {self.lengths[0]:,}" if same else ", ".join(map(str, self.lengths))
        return f"{name} in {self.rows:,} rows" if self.rows else name


CASES = [
    *(Case((rows,)) for rows in (256, 576, 1024, 1296, 1728, 2304, 4096, 6912, 16_384)),
    *(Case((rows,) * count) for count, rows in ((4096, 4), (16, 256), (16, 384), (8, 576), (8, 1296), (4, 2304))),
    Case((576, 1296, 4096, 256, 1728)),
    *(Case((live,), 1024, 64) for live in (256, 1024)),
    *(Case((live,), 16_384, 64) for live in (256, 1296, 4096, 16_384)),
]


def launcher(tile: Tile, case: Case) -> Callable[[Tensor, Tensor], None]:
    """Attention by ``tile`` on a fused qkv and into an output, its work list made."""
    if isinstance(tile, HopperTile):
        from ernie_vit.kernels.hopper.attention import launch_attention
    else:
        from ernie_vit.kernels.triton.attention import launch_attention
    padded = [0] * ((case.sequences or len(case.lengths)) - len(case.lengths))
    cu_seqlens = torch.tensor([0, *case.lengths, *padded]).cumsum(0).to(torch.int32).cuda()
    shape = work_list_shape(case.capacity, len(cu_seqlens) - 1, HEADS, tile.rows)
    work_list = torch.empty(shape, dtype=torch.int32, device="cuda")
    launch_work_list(cu_seqlens, work_list, num_rows=case.capacity, num_heads=HEADS, tile_rows=tile.rows)

    def launch(qkv: Tensor, out: Tensor) -> None:
        launch_attention(*qkv.unbind(1), out, work_list, scale=HEAD_DIM**-0.5, tile=tile)

    return launch


def microseconds(launch: Callable[[Tensor, Tensor], None], inputs: Sequence[Tensor], out: Tensor) -> float:
    """Median time of a call, from graphs of about ``GRAPH_SECONDS``."""

    def run(one: Inputs) -> Tensor:
        launch(one["qkv"], out)
        return out

    rotated: list[Inputs] = [{"qkv": qkv} for qkv in inputs]
    trial = capture(run, rotated, len(inputs))
    calls = len(inputs) * max(1, round(GRAPH_SECONDS / seconds(trial)))
    graph = capture(run, rotated, calls)
    return 1e6 * median(seconds(graph) for _ in range(REPLAYS)) / calls


def results(case: Case, tiles: Sequence[Tile], dtype: torch.dtype) -> Iterator[tuple[Tile, float | str]]:
    """Each tile's microseconds, or what is wrong with its result."""
    live = sum(case.lengths)
    inputs = [torch.randn(case.capacity, 3, HEADS, HEAD_DIM, dtype=dtype, device="cuda") for _ in range(INPUTS)]
    q, k, v = inputs[0][:live].unbind(1)
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
    exact = attention_ref(q.float(), k.float(), v.float(), cu_seqlens, max(case.lengths))
    plain = attention_ref(q, k, v, cu_seqlens, max(case.lengths))
    budget = (plain.float() - exact).norm()
    first: dict[type, Tensor] = {}
    for tile in tiles:
        launch = launcher(tile, case)
        out = torch.full((case.capacity, HEADS, HEAD_DIM), float("nan"), dtype=dtype, device="cuda")
        launch(inputs[0], out)
        same_bits = torch.equal(first.setdefault(type(tile), out[:live].clone()), out[:live])
        if not (out[:live].float() - exact).norm() <= 1.02 * budget:
            yield tile, "wrong"
        elif not same_bits:
            yield tile, "other bits"
        else:
            yield tile, microseconds(launch, inputs, out)


@click.command(help=__doc__)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
def main(dtype: str) -> None:
    element = getattr(torch, dtype)
    device = torch.device("cuda", torch.cuda.current_device())
    reason = dispatch.why_not_hopper(device, element)
    tiles: list[Tile] = [*PLAIN_CANDIDATES] if reason else [*HOPPER_CANDIDATES, *PLAIN_CANDIDATES]
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {dispatch.triton_version()}")
    click.echo(f"{dtype}; Gluon: {reason or 'yes'}; * marks the tile that the table gives now")
    for case in CASES:
        shipped = attention_tile(device, element, HEAD_DIM, case.capacity, case.rows or max(case.lengths))
        flops = 4 * HEADS * HEAD_DIM * sum(length**2 for length in case.lengths)
        click.echo(f"\n{case}")
        for tile, result in results(case, tiles, element):
            mark = "*" if tile == shipped else " "
            shown = result if isinstance(result, str) else f"{result:10.1f} us {flops / result / 1e6:6.0f} TFLOP/s"
            click.echo(f"{mark} {shown}  {tile}")


if __name__ == "__main__":
    main()
