"""Thousands of launches of each shipped Hopper tile on poisoned outputs: a race shows seldom, or on some lengths only.

A graph holds pairs of launches, each with a live count of its own, round or ragged; the second of a pair starts while
the first one ends. Every output is compared bit by bit, dead rows included, which must still hold the poison.

Kernels are compiled by several processes before, into Triton's cache.

    python -m bench.soak_linear --launches 10000
"""

import sys
import time
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from bench.compile_ahead import compile_ahead
from ernie_vit.kernels.dispatch import why_not_gluon
from ernie_vit.kernels.hopper.linear import launch_linear
from ernie_vit.kernels.linear import linear_ref
from ernie_vit.kernels.qkv_rotary import natural_order, qkv_rotary_ref
from ernie_vit.kernels.tiles.linear import HOPPER_DEFAULT, HOPPER_TILES, HopperTile
from ernie_vit.kernels.triton.grid import multiprocessors
from ernie_vit.machine import why_no_gpu

PAIRS = 10  # a graph
POISON = -777.0
HEAD_DIM = 80
# as in the tower: fc1 has the activation, proj and fc2 the residual; and in the resampler
ACTIVATIONS = {(5120, 1280): "quick_gelu", (5120, 5120): "gelu"}


@dataclass(frozen=True)
class Case:
    """A weight and its tile; ``rotary``: of a qkv projection, whose q and k are rotated."""

    n: int
    k: int
    tile: HopperTile
    dtype: torch.dtype
    rotary: bool = False

    def __str__(self) -> str:
        return f"{self.n}x{self.k}{' with rotary' * self.rotary}, {self.dtype}, {self.tile}"


def shipped_cases() -> list[Case]:
    """Every Gluon tile with every weight that it serves."""
    tables = {shape: regimes.tiles for shape, regimes in HOPPER_TILES.items()}
    tables[5120, 5120] = HOPPER_DEFAULT.tiles
    tables[1280, 592] = tuple(tile.late() for tile in HOPPER_DEFAULT.tiles)  # the patch embedding, zeros behind a row
    return [
        Case(n, k, tile, dtype, rotary)
        for dtype in (torch.bfloat16, torch.float16)
        for (n, k), tiles in tables.items()
        for tile in dict.fromkeys(tiles)
        for rotary in ((False, True) if n == 3 * k else (False,))
    ]


class Soak:
    """A graph of a case's poisoned launches, and how many numbers were wrong."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        n, k, tile, dtype = case.n, case.k, case.tile, case.dtype
        # two tiles and a bit for each program: the ring and the output blocks are used again
        columns = -(-n // tile.columns)
        self.rows = tile.rows * -(-2 * multiprocessors(generator.device) // columns) + 17
        self.tile = tile
        self.x = random(self.rows, k).to(dtype)
        self.weight = (random(n, k) / k**0.5).to(dtype)
        self.bias = random(n).to(dtype)
        self.activation = ACTIVATIONS.get((n, k))
        self.residual = random(self.rows, n).to(dtype) if n == 1280 else None
        angles = random(self.rows, HEAD_DIM // 2)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=1) if case.rotary else None
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.outs = [torch.empty(self.rows, n, dtype=dtype, device="cuda") for _ in range(2)]

        round_and_ragged = [0, 1, tile.rows, tile.rows + 1, self.rows - 17, self.rows - 1, self.rows]
        drawn = torch.randint(self.rows + 1, (2 * PAIRS - len(round_and_ragged),), generator=generator, device="cuda")
        self.lives = [*round_and_ragged, *drawn.tolist()]

    def launch(self, num_rows: Tensor, out: Tensor) -> None:
        arguments = (self.x, self.weight, self.bias, self.residual, num_rows, out)
        launch_linear(*arguments, activation=self.activation, tile=self.tile, table=self.table)

    def relative_error(self) -> tuple[float, float]:
        """Of the tile and of plain PyTorch, to float64, on the first rows."""
        rows = slice(256)
        self.launch(torch.tensor([self.rows], dtype=torch.int32, device="cuda"), self.outs[0])
        out = self.outs[0][rows]
        if self.table is not None:
            out = natural_order(out.unflatten(1, (3, -1, HEAD_DIM))).flatten(1)
        exact = self.reference(rows, torch.float64)
        plain = self.reference(rows, self.x.dtype)
        errors = [(result.double() - exact).norm() / exact.norm() for result in (out, plain)]
        return errors[0].item(), errors[1].item()

    def reference(self, rows: slice, dtype: torch.dtype) -> Tensor:
        x, weight, bias = self.x[rows].to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        if self.table is not None:
            table = self.table[rows].to(torch.promote_types(dtype, torch.float32))
            return qkv_rotary_ref(x, weight, bias, table, num_heads=len(weight) // (3 * HEAD_DIM)).flatten(1)
        residual = None if self.residual is None else self.residual[rows].to(dtype)
        return linear_ref(x, weight, bias, activation=self.activation, residual=residual)

    def run(self, launches: int) -> int:
        """The wrong numbers among the outputs of at least ``launches`` launches."""
        full = self.outs[0].clone()
        counts = torch.tensor(self.lives, dtype=torch.int32, device="cuda")
        row = torch.arange(self.rows, device="cuda")[:, None]
        poison = torch.full_like(full, POISON)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for first in range(0, 2 * PAIRS, 2):
                pair = range(first, first + 2)
                for out in self.outs:
                    out.fill_(POISON)
                for index, out in zip(pair, self.outs, strict=True):
                    self.launch(counts[index : index + 1], out)
                for index, out in zip(pair, self.outs, strict=True):
                    expected = torch.where(row < counts[index], full, poison)
                    self.wrong += (out.view(torch.int16) != expected.view(torch.int16)).sum()
        for _ in range(-(-launches // (2 * PAIRS))):
            graph.replay()
        return int(self.wrong.item())


@torch.no_grad()
def launch_once(case: Case) -> None:
    Soak(case, torch.Generator("cuda")).relative_error()


@click.command(help=__doc__)
@click.option("--launches", default=10_000, show_default=True, help="Of each tile and weight.")
@click.option("--seed", default=0, show_default=True)
def main(launches: int, seed: int) -> None:
    device = torch.device("cuda", 0)
    reason = why_no_gpu() or why_not_gluon(device, torch.bfloat16)
    if reason is not None:
        raise click.ClickException(reason)
    cases = shipped_cases()
    compile_ahead(launch_once, cases)
    generator = torch.Generator(device).manual_seed(seed)
    failed = False
    for case in cases:
        start = time.perf_counter()
        soak = Soak(case, generator)
        error, budget = soak.relative_error()
        wrong = soak.run(launches)
        right = wrong == 0 and error <= 1.02 * budget
        failed |= not right
        click.echo(
            f"{'ok  ' if right else 'FAIL'} {case}, rows {soak.rows}: {wrong} wrong numbers, "
            f"error {error:.2e} (plain PyTorch {budget:.2e}), {time.perf_counter() - start:.1f} s"
        )
    click.echo(f"{launches} launches of each of {len(cases)} cases: {'FAILED' if failed else 'passed'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
