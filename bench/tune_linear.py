"""Time the tiles of the linears and print the rows of ``kernels/tiles/linear.py``.

For each weight and number of rows: every candidate whose share of idle multiprocessors is not hopeless is checked
against float64, then timed in a CUDA graph of calls on rotated inputs, so that weights come from memory as in the
tower. The fastest tile is printed as a row of the table; ``F.linear`` with bias alone and with the eager epilogue
stand beside it. Kernels are compiled by several processes first, into Triton's cache.

    python bench/tune_linear.py --weight fc1 --rows 1296
"""

import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.kernels.dispatch import architecture, why_not_hopper
from ernie_vit.kernels.linear import linear_ref
from ernie_vit.kernels.qkv_rotary import natural_order, qkv_rotary_ref
from ernie_vit.kernels.rotary import rotate
from ernie_vit.kernels.tiles.linear import (
    HOPPER_DEFAULT,
    HOPPER_TILES,
    TRITON_TILES,
    HopperTile,
    TritonTile,
    triton_regimes,
)

CALLS = 20  # a graph
ROTATED = 3  # inputs
REPLAYS = 7
# A tile stays a candidate if its waves * area is at most this much above the best candidate's.
HOPELESS = 1.6
CHECKED_ROWS = 128
HEAD_DIM = 80


@dataclass(frozen=True)
class Weight:
    """A linear of the tower and its epilogue; ``rotary``: rotates q and k."""

    n: int
    k: int
    quick_gelu: bool = False
    residual: bool = False
    rotary: bool = False


WEIGHTS = {
    "qkv": Weight(3840, 1280),
    "qkv_rotary": Weight(3840, 1280, rotary=True),
    "proj": Weight(1280, 1280, residual=True),
    "fc1": Weight(5120, 1280, quick_gelu=True),
    "fc2": Weight(1280, 5120, residual=True),
}


class Inputs:
    """Rotated random arguments of one linear."""

    def __init__(self, weight: Weight, rows: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda")

        n, k = weight.n, weight.k
        self.kind = weight
        self.x = [random(rows, k).bfloat16() for _ in range(ROTATED)]
        self.weight = [(random(n, k) / k**0.5).bfloat16() for _ in range(ROTATED)]
        self.bias = random(n).bfloat16()
        self.residual = [random(rows, n).bfloat16() if weight.residual else None for _ in range(ROTATED)]
        angles = random(rows, HEAD_DIM // 2)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=1) if weight.rotary else None
        self.out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        self.num_rows = torch.tensor([rows], dtype=torch.int32, device="cuda")

    def launch(self, tile: HopperTile | TritonTile, turn: int) -> None:
        arguments = (self.x[turn], self.weight[turn], self.bias, self.residual[turn], self.num_rows, self.out)
        if isinstance(tile, HopperTile):
            from ernie_vit.kernels.hopper.linear import launch_linear

            launch_linear(*arguments, quick_gelu=self.kind.quick_gelu, tile=tile, table=self.table)
        else:
            from ernie_vit.kernels.triton.linear import launch_linear as launch_plain_linear

            launch_plain_linear(*arguments, quick_gelu=self.kind.quick_gelu, tile=tile)
            if self.table is not None:
                rotate(self.as_heads(self.out), self.table, self.num_rows)

    def bare(self, turn: int) -> None:
        F.linear(self.x[turn], self.weight[turn], self.bias)

    def as_heads(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), 3, -1, HEAD_DIM)

    def eager(self, turn: int) -> Tensor:
        if self.table is not None:
            return qkv_rotary_ref(
                self.x[turn], self.weight[turn], self.bias, self.table, num_heads=self.kind.n // (3 * HEAD_DIM)
            ).flatten(1)
        activation = "quick_gelu" if self.kind.quick_gelu else None
        return linear_ref(
            self.x[turn], self.weight[turn], self.bias, activation=activation, residual=self.residual[turn]
        )

    def is_right(self, tile: HopperTile | TritonTile) -> bool:
        """Whether the last rows are as close to float64 as plain PyTorch's."""
        self.out.fill_(float("nan"))
        self.launch(tile, 0)
        rows = slice(-CHECKED_ROWS, None)
        out = self.out[rows]
        if self.table is not None and isinstance(tile, HopperTile):
            out = natural_order(self.as_heads(out)).flatten(1)
        exact = self.exact(rows)
        budget = 1.02 * (self.eager(0)[rows].double() - exact).norm()
        return bool((out.double() - exact).norm() <= budget) and not self.out.isnan().any()

    def exact(self, rows: slice) -> Tensor:
        x, weight, bias = self.x[0][rows].double(), self.weight[0].double(), self.bias.double()
        if self.table is not None:
            heads = self.kind.n // (3 * HEAD_DIM)
            return qkv_rotary_ref(x, weight, bias, self.table[rows].double(), num_heads=heads).flatten(1)
        residual = self.residual[0]
        activation = "quick_gelu" if self.kind.quick_gelu else None
        residual = None if residual is None else residual[rows].double()
        return linear_ref(x, weight, bias, activation=activation, residual=residual)


def microseconds(call: Callable[..., object], *arguments: object) -> float:
    """The median time of one call in a graph of ``CALLS``; ``call`` takes the arguments and which input is on."""
    call(*arguments, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(*arguments, index % ROTATED)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def hopper_candidates() -> list[HopperTile]:
    """The shapes of the tables, each with and without early launch."""
    shipped = [tile for regimes in [*HOPPER_TILES.values(), HOPPER_DEFAULT] for tile in regimes.tiles]
    shapes = dict.fromkeys(replace(tile, pdl=False, group_rows=8) for tile in shipped)
    return [replace(tile, pdl=pdl, group_rows=0 if pdl else 8) for tile in shapes for pdl in (False, True)]


def triton_candidates() -> list[TritonTile]:
    """The tiles of the tables, and those that the tables of larger GPUs may want."""
    shipped = [tile for regimes in TRITON_TILES.values() for tile in regimes.tiles]
    more = [
        TritonTile(64, 64, 128, num_warps=4, num_stages=4),
        TritonTile(64, 128, 128, num_warps=4, num_stages=4),
        TritonTile(128, 128, 64, num_warps=8, num_stages=5),
        TritonTile(128, 256, 64, num_warps=8, num_stages=3),
        TritonTile(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2),
    ]
    return list(dict.fromkeys([*shipped, *more]))


def cost(tile: HopperTile | TritonTile, weight: Weight, rows: int, multiprocessors: int) -> int:
    """Waves of tiles times a tile's area: most of the ranking."""
    tiles = -(-rows // tile.rows) * -(-weight.n // tile.columns)
    return -(-tiles // multiprocessors) * tile.rows * tile.columns


def suits(tile: HopperTile | TritonTile, weight: Weight) -> bool:
    """Whether the tile can have the weight's epilogue: see ``rotary_fits``."""
    if not weight.rotary or isinstance(tile, TritonTile):
        return True
    return tile.block_k == 64 and weight.n // 3 * 2 % tile.columns == 0


def compiles(task: tuple[Weight, HopperTile | TritonTile]) -> bool:
    """Launch once, in a process of the pool; False if the tile does not fit this GPU."""
    from triton.runtime.errors import OutOfResources

    weight, tile = task
    try:
        Inputs(weight, 64).launch(tile, 0)
    except OutOfResources:
        return False
    return True


def as_row(tile: HopperTile | TritonTile) -> str:
    """The tile as the table spells it."""
    if isinstance(tile, TritonTile):
        return repr(tile)
    depth = "" if tile.block_k == 64 else f", block_k={tile.block_k}"
    if tile.ping_pong:
        return f"_ping_pong({tile.rows}, {tile.columns}, {tile.stages}, pdl={tile.pdl})"
    return f"_cooperative({tile.rows}, {tile.columns}, {tile.groups}, {tile.stages}{depth}, pdl={tile.pdl})"


@click.command(help=__doc__)
@click.option("--weight", "names", multiple=True, type=click.Choice(list(WEIGHTS)), default=list(WEIGHTS))
@click.option("--rows", "sizes", multiple=True, type=int, default=[256, 576, 1296, 1728, 3996, 6912, 10368])
@click.option("--kernel", type=click.Choice(["hopper", "triton"]), help="Default: the one that serves this GPU.")
@click.option("--workers", default=12, show_default=True, help="Processes that compile.")
def main(names: list[str], sizes: list[int], kernel: str | None, workers: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reason = why_not_hopper(device, torch.bfloat16)
    if kernel == "hopper" and reason is not None:
        raise click.ClickException(reason)
    hopper = kernel != "triton" and reason is None
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = properties.multi_processor_count
    click.echo(f"{properties.name}, {multiprocessors} multiprocessors, torch {torch.__version__}, microseconds a call")

    candidates = hopper_candidates() if hopper else triton_candidates()
    tasks = [(WEIGHTS[name], tile) for name in names for tile in candidates if suits(tile, WEIGHTS[name])]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        fitting = {task for task, fits in zip(tasks, pool.map(compiles, tasks), strict=True) if fits}

    for name in names:
        weight = WEIGHTS[name]
        for rows in sizes:
            inputs = Inputs(weight, rows)
            costs = {tile: cost(tile, weight, rows, multiprocessors) for tile in candidates if suits(tile, weight)}
            limit = HOPELESS * min(costs.values())
            regimes = (
                HOPPER_TILES[weight.n, weight.k] if hopper else triton_regimes(architecture(device), float32=False)
            )
            shipped = regimes.at(rows)
            times = {}
            for tile in dict.fromkeys([shipped, *costs]):
                if tile != shipped and (costs[tile] > limit or (weight, tile) not in fitting):
                    continue
                if not inputs.is_right(tile):
                    raise click.ClickException(f"{name}, {rows} rows: {tile} is wrong by value")
                times[tile] = microseconds(inputs.launch, tile)
            bare, eager = microseconds(inputs.bare), microseconds(inputs.eager)
            best = sorted(times, key=times.__getitem__)[:3]
            click.echo(f"{name} {rows}: shipped {times[shipped]:.1f}, F.linear {bare:.1f}, with epilogue {eager:.1f}")
            for tile in best:
                click.echo(f"            {as_row(tile)},  # {times[tile]:.1f}")


if __name__ == "__main__":
    main()
