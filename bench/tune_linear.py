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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import click
import torch
from torch import Tensor

from bench.compile_ahead import compile_ahead
from bench.sizes import FRAMES
from ernie_vit.kernels.dispatch import triton_version, why_not_hopper
from ernie_vit.kernels.tiles import linear as tiles
from ernie_vit.kernels.tiles.linear import HOPPER_TILES, HopperTile, Regimes
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
FINALISTS = 3  # tried with every order of work

Name = str
Choice = dict[Name, HopperTile]


@dataclass(frozen=True)
class Order:
    """How a shape's tiles are walked, and whether they are launched early."""

    group_rows: int
    pdl: bool


ORDERS = (Order(8, False), Order(0, True), Order(8, True))


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
    cooperative(128, 160, 2, 5),
    cooperative(128, 192, 2, 4),
    cooperative(128, 256, 2, 3),
    cooperative(192, 96, 3, 5),
    cooperative(192, 128, 3, 4),
    cooperative(192, 160, 3, 3),
    cooperative(192, 192, 3, 3),
    cooperative(256, 128, 2, 4),
    cooperative(320, 128, 3, 3),
    ping_pong(64, 128, 6),
    ping_pong(64, 128, 4, block_k=128),
    ping_pong(64, 160, 6),
    ping_pong(64, 256, 4),
    ping_pong(128, 128, 5),
    ping_pong(128, 160, 4),
)


def cost(tile: HopperTile, n: int, rows: int, multiprocessors: int) -> int:
    """Rounds of tiles times a tile's area."""
    return -(-(-(-rows // tile.rows) * -(-n // tile.columns)) // multiprocessors) * tile.rows * tile.columns


def suits(tile: HopperTile, name: Name) -> bool:
    """Whether the tile can have the weight's epilogue: see ``rotary_fits``."""
    return name != "qkv" or (tile.block_k == 64 and 2560 % tile.columns == 0)


def candidates(name: Name, rows: int, multiprocessors: int) -> list[HopperTile]:
    n = WEIGHTS[name][0]
    costs = {shape: cost(shape, n, rows, multiprocessors) for shape in SHAPES if suits(shape, name)}
    limit = HOPELESS * min(costs.values())
    return sorted((shape for shape in costs if costs[shape] <= limit), key=costs.__getitem__)[:MOST_CANDIDATES]


def ordered(shape: HopperTile, order: Order) -> HopperTile:
    return replace(shape, group_rows=order.group_rows, pdl=order.pdl)


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


def best(stack: Stack, choices: Iterable[Choice], exact: Tensor, time_of: Callable[..., list[float]]) -> list:  # type: ignore[type-arg]
    """The choices that have the right bits, with their times, fastest first."""
    right = [choice for choice in choices if torch.equal(stack.run(choice), exact)]
    times = time_of([stack.record(choice) for choice in right])
    return sorted(zip(times, right, strict=True), key=lambda pair: pair[0])


@torch.no_grad()
def launch_once(task: tuple[Name, HopperTile]) -> bool:
    """Compile the tower's kernel of one tile; False if it does not fit this GPU or spills."""
    from triton.runtime.errors import OutOfResources, PTXASError

    from ernie_vit.kernels.hopper.linear import _launch

    name, tile = task
    with torch.device("cuda"):
        tower = VisionTower(replace(CONFIG, depth=1)).bfloat16()
    _launch._compiled.clear()
    try:
        Stack(tower, [(2, 2)]).run({name: tile})
    except (OutOfResources, PTXASError):
        return False
    (kernel,) = (compiled for key, compiled in _launch._compiled.items() if _plan_is_of(key, tile, name))
    kernel._init_handles()
    return bool(kernel.n_spills == 0)


def _plan_is_of(key: tuple, tile: HopperTile, name: Name) -> bool:  # type: ignore[type-arg]
    plan = key[1][0]
    n, k = WEIGHTS[name]
    return plan.N.value == n and plan.STEPS.value == -(-k // tile.block_k)


def as_row(tile: HopperTile) -> str:
    """The tile as the table spells it."""
    depth = "" if tile.block_k == 64 else f", block_k={tile.block_k}"
    kind = (
        f"_ping_pong({tile.rows}, {tile.columns}, "
        if tile.ping_pong
        else f"_cooperative({tile.rows}, {tile.columns}, {tile.groups}, "
    )
    return f"{kind}{tile.stages}{depth}, group_rows={tile.group_rows}, pdl={tile.pdl})"


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--weight", "names", multiple=True, type=click.Choice(list(WEIGHTS)), default=list(WEIGHTS))
@click.option("--rows", "sizes", multiple=True, type=int, default=list(FRAMES))
@click.option("--seconds", default=0.1, help="Of replays in a row of one candidate.")
@click.option("--rounds", default=3)
@torch.no_grad()
def main(names: Sequence[Name], sizes: Sequence[int], seconds: float, rounds: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reason = why_not_hopper(device, torch.bfloat16)
    if reason is not None:
        raise click.ClickException(reason)
    started = time.perf_counter()
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = properties.multi_processor_count
    click.echo(f"{properties.name}, torch {torch.__version__}, triton {triton_version()}, {CONFIG.depth} blocks")

    tasks = sorted(
        {
            (name, ordered(shape, order))
            for name, rows, order in product(names, sizes, ORDERS)
            for shape in candidates(name, rows, multiprocessors)
        },
        key=str,
    )
    fitting = {task for task, fits in zip(tasks, compile_ahead(launch_once, tasks), strict=True) if fits}
    click.echo(f"{len(fitting)} of {len(tasks)} variants fit, {time.perf_counter() - started:.0f} s")
    with torch.device("cuda"):
        tower = VisionTower(CONFIG).bfloat16()

    def time_of(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        return milliseconds(graphs, seconds, rounds)

    for rows in sizes:
        stack = Stack(tower, FRAMES[rows])
        shipped = {name: HOPPER_TILES[of].at(rows) for name, of in WEIGHTS.items()}
        exact = stack.run(shipped).clone()
        now = dict(shipped)
        for name in names:
            usual = Order(now[name].group_rows, now[name].pdl)
            first = [
                now[name],
                *(
                    ordered(shape, usual if usual in ORDERS else ORDERS[0])
                    for shape in candidates(name, rows, multiprocessors)
                ),
            ]
            found = best(
                stack,
                [now | {name: tile} for tile in dict.fromkeys(first) if (name, tile) in fitting or tile == now[name]],
                exact,
                time_of,
            )
            finalists = [choice[name] for _, choice in found[:FINALISTS]]
            more = [
                now | {name: tile}
                for tile in dict.fromkeys([now[name], *(ordered(f, order) for f in finalists for order in ORDERS)])
                if (name, tile) in fitting or tile == now[name]
            ]
            ranking = best(stack, more, exact, time_of)
            now[name] = ranking[0][1][name]
            click.echo(f"{rows} {name}: shapes " + "; ".join(f"{ms:.3f} {as_row(c[name])}" for ms, c in found[:6]))
            click.echo(f"{rows} {name}: orders " + "; ".join(f"{ms:.3f} {as_row(c[name])}" for ms, c in ranking[:9]))
        before, after = time_of([stack.record(shipped), stack.record(now)])
        click.echo(f"{rows}: shipped {before:.3f}, chosen {after:.3f} ms ({time.perf_counter() - started:.0f} s)")
        for name, tile in now.items():
            click.echo(f"    {name}: {as_row(tile)}")


if __name__ == "__main__":
    main()
