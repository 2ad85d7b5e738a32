"""Choose the tiles of the linears by the time of the tower that they stand in, and print rows for the tables.

A linear alone, in short bursts, ranks its tiles otherwise than the tower does: there the kernel before may still run
(early launch), weights come from memory, and at many rows the GPU holds its power limit by lower clocks, so that the
tile that moves the fewest bytes wins. So a few blocks of the tower are captured once for each candidate of one
weight, the other weights keeping the best tiles found so far, and replayed in turns for tenths of a second each.

Every candidate is checked first: the tower's output must have the bits of the shipped tiles' output. Kernels are
compiled by several processes before, into Triton's cache; a candidate that does not fit or spills is left out.

    python -m bench.tune_linear --rows 1296 --weight fc1
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from operator import itemgetter
from statistics import median

import click
import torch
from torch import Tensor

from bench.compile_ahead import compile_ahead
from bench.sizes import FRAMES
from ernie_vit.kernels.dispatch import triton_version, why_not_hopper
from ernie_vit.kernels.tiles import linear as tiles
from ernie_vit.kernels.tiles.linear import HOPPER_TILES, HopperTile, Order, Regimes
from ernie_vit.kernels.triton.grid import multiprocessors
from ernie_vit.machine import why_no_gpu
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import plan_sequences, unpack_metadata
from ernie_vit.model.operators import choose_operators
from ernie_vit.model.tower import VisionTower

# Enough that no block's weights stay in the second-level cache until their next turn.
CONFIG = ErnieVisionConfig(depth=8)
WEIGHTS = {"fc1": (5120, 1280), "fc2": (1280, 5120), "qkv": (3840, 1280), "proj": (1280, 1280)}
# Candidates whose rounds * area is at most this much above the least.
HOPELESS = 1.45
MOST_CANDIDATES = 14
FINALISTS = 3  # shapes, tried in every order
SHOWN = 8

Name = str
Choice = dict[Name, HopperTile]
Variant = tuple[Name, HopperTile]


ORDERS = {"AHEAD": tiles.AHEAD, "EARLY": tiles.EARLY, "LATE": tiles.LATE}


def cooperative(rows: int, columns: int, groups: int, stages: int, block_k: int = 64) -> HopperTile:
    return HopperTile(rows, columns, groups, stages, block_k=block_k)


def ping_pong(rows: int, columns: int, stages: int, block_k: int = 64) -> HopperTile:
    return HopperTile(rows, columns, 2, stages, ping_pong=True, block_k=block_k)


SHAPES = (
    cooperative(64, 64, 1, 6, block_k=128),
    cooperative(64, 96, 1, 4, block_k=128),
    cooperative(64, 96, 1, 8),
    cooperative(64, 128, 1, 4, block_k=128),
    cooperative(64, 128, 1, 7),
    cooperative(64, 160, 1, 6),
    cooperative(64, 256, 1, 4),
    cooperative(128, 64, 2, 8),
    cooperative(128, 96, 2, 6),
    cooperative(128, 128, 2, 6),
    cooperative(128, 144, 2, 5),
    cooperative(128, 160, 2, 5),
    cooperative(128, 192, 2, 4),
    cooperative(128, 256, 2, 3),
    cooperative(192, 96, 3, 5),
    cooperative(192, 128, 3, 4),
    cooperative(192, 144, 3, 4),
    cooperative(192, 160, 3, 3),
    cooperative(192, 192, 3, 3),
    cooperative(256, 128, 2, 4),
    cooperative(320, 128, 3, 3),
    ping_pong(64, 128, 6),
    ping_pong(64, 128, 4, block_k=128),
    ping_pong(64, 160, 6),
    ping_pong(64, 256, 4),
    ping_pong(128, 128, 5),
    ping_pong(128, 144, 4),
    ping_pong(128, 160, 4),
    ping_pong(128, 192, 3),
)


def cost(tile: HopperTile, n: int, rows: int) -> int:
    """Rounds of tiles times a tile's area."""
    count = -(-rows // tile.rows) * -(-n // tile.columns)
    return -(-count // multiprocessors(torch.device("cuda"))) * tile.rows * tile.columns


def suits(tile: HopperTile, name: Name) -> bool:
    """Whether the tile can have the weight's epilogue: see ``rotary_fits``."""
    return name != "qkv" or (tile.block_k == 64 and 2560 % tile.columns == 0)


def candidates(name: Name, rows: int) -> list[HopperTile]:
    n = WEIGHTS[name][0]
    costs = {shape: cost(shape, n, rows) for shape in SHAPES if suits(shape, name)}
    limit = HOPELESS * min(costs.values())
    return sorted((shape for shape in costs if costs[shape] <= limit), key=costs.__getitem__)[:MOST_CANDIDATES]


def in_order(tile: HopperTile, order: Order) -> HopperTile:
    return replace(tile, **order._asdict())


def order_of(tile: HopperTile) -> str:
    found = Order(tile.group_rows, tile.pdl)
    return next((name for name, order in ORDERS.items() if order == found), repr(found))


@contextmanager
def tables(choice: Choice) -> Iterator[None]:
    """The tower takes the tiles of ``choice``, whatever its rows."""
    before = dict(HOPPER_TILES)
    HOPPER_TILES.update({WEIGHTS[name]: Regimes((), (tile,)) for name, tile in choice.items()})
    tiles.rotary_fits.cache_clear()
    try:
        yield
    finally:
        HOPPER_TILES.update(before)
        tiles.rotary_fits.cache_clear()


class Stack:
    """Some blocks of the tower with random weights, on one input."""

    def __init__(self, tower: VisionTower, frames: Sequence[tuple[int, int]]) -> None:
        self._tower, self._ops = tower, choose_operators("triton")
        plan = plan_sequences([(1, height, width) for height, width in frames])
        self._metadata = unpack_metadata(torch.from_numpy(plan.packed).cuda(), plan)
        self._pixels = torch.randn(plan.num_patches, CONFIG.patch_width, device="cuda", dtype=torch.bfloat16)

    def run(self, choice: Choice) -> Tensor:
        with tables(choice):
            return self._tower(self._pixels, self._metadata, self._ops)

    def record(self, choice: Choice) -> torch.cuda.CUDAGraph:
        self.run(choice)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(choice)
        return graph


def milliseconds(graphs: Sequence[torch.cuda.CUDAGraph], seconds: float, rounds: int) -> list[float]:
    """The median time of a replay of each graph, replayed for ``seconds`` in each round."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, of_graph in zip(graphs, times, strict=True):
            of_graph.append(_sustained(graph, seconds))
    return [median(of_graph) for of_graph in times]


def _sustained(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """The second half of the replays of ``seconds``: by then clocks have followed."""

    def replays(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    count = max(1, round(seconds * 500 / replays(1)))
    replays(count)
    return replays(count)


class Tuner:
    """Tiles of all weights on one input, one weight after the other."""

    def __init__(self, stack: Stack, rows: int, fitting: Collection[Variant], seconds: float, rounds: int) -> None:
        self._stack, self._rows, self._fitting = stack, rows, fitting
        self._seconds, self._rounds = seconds, rounds
        self.shipped = {name: HOPPER_TILES[of].at(rows) for name, of in WEIGHTS.items()}
        self.chosen: Choice = dict(self.shipped)
        self._exact = stack.run(self.shipped).clone()

    def tune(self, name: Name) -> None:
        """Choose a shape in the order that the shipped tile has, then an order for the best shapes."""
        now = self.chosen[name]
        order = next((order for order in ORDERS.values() if in_order(now, order) == now), tiles.LATE)
        shapes = self._rank(name, [now, *(in_order(shape, order) for shape in candidates(name, self._rows))])
        finalists = [tile for _, tile in shapes[:FINALISTS]]
        orders = self._rank(name, [now, *(in_order(tile, order) for tile in finalists for order in ORDERS.values())])
        self.chosen[name] = orders[0][1]
        for title, ranking in (("shapes", shapes), ("orders", orders)):
            shown = "; ".join(f"{ms:.3f} {as_row(tile)}" for ms, tile in ranking[:SHOWN])
            click.echo(f"{self._rows} {name}, {title}: {shown}")

    def compare(self) -> list[float]:
        """Milliseconds of the shipped tiles and of the chosen ones."""
        return self._time([self.shipped, self.chosen])

    def _rank(self, name: Name, candidates: Iterable[HopperTile]) -> list[tuple[float, HopperTile]]:
        """The candidates that fit and give the right bits, with their times, fastest first."""
        right = [
            tile
            for tile in dict.fromkeys(candidates)
            if (tile == self.chosen[name] or (name, tile) in self._fitting)
            and torch.equal(self._stack.run(self.chosen | {name: tile}), self._exact)
        ]
        times = self._time([self.chosen | {name: tile} for tile in right])
        return sorted(zip(times, right, strict=True), key=itemgetter(0))

    def _time(self, choices: Iterable[Choice]) -> list[float]:
        return milliseconds([self._stack.record(choice) for choice in choices], self._seconds, self._rounds)


@torch.no_grad()
def launch_once(variant: Variant) -> bool:
    """Compile the tower's kernel of one tile; False if it does not fit this GPU or spills."""
    from triton.runtime.errors import OutOfResources, PTXASError

    from ernie_vit.kernels.hopper.linear import _launch

    name, tile = variant
    with torch.device("cuda"):
        tower = VisionTower(replace(CONFIG, depth=1)).bfloat16()
    _launch._compiled.clear()
    try:
        Stack(tower, [(2, 2)]).run({name: tile})
    except (OutOfResources, PTXASError):
        return False
    n, k = WEIGHTS[name]
    for (_, (plan, *_), *_), kernel in _launch._compiled.items():
        if plan.N.value == n and plan.STEPS.value == -(-k // tile.block_k):
            return int(kernel.n_spills) == 0
    raise AssertionError(f"{variant} was not launched")


def as_row(tile: HopperTile) -> str:
    """The tile as the table spells it."""
    if tile.ping_pong:
        return f"_ping_pong({tile.rows}, {tile.columns}, {tile.stages}, {order_of(tile)})"
    depth = "" if tile.block_k == 64 else f", block_k={tile.block_k}"
    return f"_cooperative({tile.rows}, {tile.columns}, {tile.groups}, {tile.stages}, {order_of(tile)}{depth})"


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--weight", "names", multiple=True, type=click.Choice(list(WEIGHTS)), default=list(WEIGHTS))
@click.option("--rows", "sizes", multiple=True, type=int, default=list(FRAMES))
@click.option("--seconds", default=0.1, help="Of replays in a row of one candidate.")
@click.option("--rounds", default=3)
@torch.no_grad()
def main(names: Sequence[Name], sizes: Sequence[int], seconds: float, rounds: int) -> None:
    device = torch.device("cuda", 0)
    reason = why_no_gpu() or why_not_hopper(device, torch.bfloat16)
    if reason is not None:
        raise click.ClickException(reason)
    started = time.perf_counter()
    gpu = torch.cuda.get_device_name(device)
    click.echo(f"{gpu}, torch {torch.__version__}, triton {triton_version()}, {CONFIG.depth} blocks")
    variants = sorted(
        {
            (name, in_order(shape, order))
            for name, rows, order in product(names, sizes, ORDERS.values())
            for shape in candidates(name, rows)
        },
        key=str,
    )
    fits = compile_ahead(launch_once, variants)
    fitting = {variant for variant, fit in zip(variants, fits, strict=True) if fit}
    click.echo(f"{len(fitting)} of {len(variants)} variants fit, {time.perf_counter() - started:.0f} s")
    with torch.device("cuda"):
        tower = VisionTower(CONFIG).bfloat16()
    for rows in sizes:
        tuner = Tuner(Stack(tower, FRAMES[rows]), rows, fitting, seconds, rounds)
        for name in names:
            tuner.tune(name)
        before, after = tuner.compare()
        click.echo(f"{rows}: shipped {before:.3f}, chosen {after:.3f} ms ({time.perf_counter() - started:.0f} s)")
        for name in names:
            click.echo(f"    {name}: {as_row(tuner.chosen[name])}")


if __name__ == "__main__":
    main()
