"""Time candidate tiles of attention over sizes of input, to choose the rows of ``kernels/tiles/attention.py``.

Correctness first: a tile whose error is above PyTorch's, or whose bits differ from those of the other tiles of its
backend, is named, not timed, and makes the exit status 1. Then CUDA graphs of many calls on rotated inputs; the median
of several replays. The work list is made before: a forward pass makes it once for all its blocks.

Run: ``python -m bench.tune_attention``.

With ``--errors`` nothing is timed: the errors against float64 of our attention, of PyTorch's backends, and of the
formula in plain PyTorch, which is the tests' budget.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.compile_ahead import compile_ahead
from bench.measure import Inputs, capture, relative_error, seconds
from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention, attention_ref
from ernie_vit.kernels.tiles.attention import (
    HOPPER_LONG,
    HOPPER_MIDDLE,
    HOPPER_SHORT,
    HOPPER_TWO_ROUNDS,
    HopperTile,
    PlainTile,
    attention_tile,
)
from ernie_vit.kernels.triton.work_list import make_work_list
from ernie_vit.machine import why_no_gpu

HEADS, HEAD_DIM = 16, 80
INPUTS = 3  # rotated
REPLAYS = 7
GRAPH_SECONDS = 3e-3  # of calls in one graph, about
FUSED_RATIO = 1.05  # of errors: PyTorch's flash backend splits the keys of few rows, which spares some roundings
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
# Heads and lengths. For 2 heads of 1,296 rows the flash backend splits the keys.
ERROR_CASES = [(2, (1296,)), (16, (1296,)), (2, (1296,) * 8), (16, (1296,) * 8)]

# Columns of the table.
HOPPER_CANDIDATES = {
    "1 persistent": HOPPER_SHORT,
    "2 persistent": HOPPER_TWO_ROUNDS,
    "2 an item": replace(HOPPER_TWO_ROUNDS, persistent=False),
    "3 persistent": replace(HOPPER_MIDDLE, cut=False),
    "3 pers., cut": HOPPER_MIDDLE,
    "3 an item": replace(HOPPER_LONG, cut=False),
    "3 an item, cut": HOPPER_LONG,
}
PLAIN_CANDIDATES = {
    "64, 2 stages, 2": PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=2),
    "64, 2 stages, 3": PlainTile(rows=64, keys=64, num_warps=4, num_stages=2, programs=3),
    "64, 3 stages, 3": PlainTile(rows=64, keys=64, num_warps=4, num_stages=3, programs=3),
    "128, 2 stages, 1": PlainTile(rows=128, keys=64, num_warps=8, num_stages=2, programs=1),
}
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

    @property
    def max_seqlen(self) -> int:
        """As the tower gives it: a graph's is its capacity."""
        return self.rows or max(self.lengths)

    def __str__(self) -> str:
        same = len(set(self.lengths)) == 1
        name = f"{len(self.lengths)} x {self.lengths[0]:,}" if same else "+".join(map(str, self.lengths))
        name = name.removeprefix("1 x ")
        return f"{name} in {self.rows:,}, {self.sequences}" if self.rows else name

    def offsets(self) -> Tensor:
        padded = [0] * ((self.sequences or len(self.lengths)) - len(self.lengths))
        return torch.tensor([0, *self.lengths, *padded]).cumsum(0).to(torch.int32).cuda()


CASES = [
    *(Case((rows,)) for rows in (256, 576, 1024, 1296, 1728, 2304, 3996, 4096, 6912, 16_060)),
    *(Case((rows,) * count) for count, rows in ((16, 256), (8, 576), (8, 1296))),
    Case((576, 1296, 4096, 256, 1728)),
    # capacities: of graphs for few and for many sequences, one image in them
    Case((1296,), 1536, 8),
    Case((1728,), 2048, 8),
    Case((3996,), 4096, 16),
    Case((1296,), 16_384, 1),
    Case((1296,), 16_384, 64),
    Case((16_060,), 16_384, 64),
]


def launcher(tile: Tile, case: Case) -> Callable[[Tensor, Tensor], None]:
    """Attention by ``tile`` on a fused qkv and into an output, its work list made."""
    if isinstance(tile, HopperTile):
        from ernie_vit.kernels.hopper.attention import launch_attention
    else:
        from ernie_vit.kernels.triton.attention import launch_attention
    work_list = make_work_list(case.offsets(), tile, num_rows=case.capacity, num_heads=HEADS)

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
    calls = len(inputs) * max(1, round(GRAPH_SECONDS / seconds(trial) / len(inputs)))
    graph = capture(run, rotated, calls)
    return 1e6 * median(seconds(graph) for _ in range(REPLAYS)) / calls


class Measurement:
    """The inputs of a case, its exact result in float32, and what its tiles gave."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.live = case, sum(case.lengths)
        shape = (case.capacity, 3, HEADS, HEAD_DIM)
        self.inputs = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(INPUTS)]
        q, k, v = (x.contiguous() for x in self.inputs[0][: self.live].unbind(1))
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
        self.exact = attention_ref(q.float(), k.float(), v.float(), cu_seqlens, max(case.lengths))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # it has our rounding points, whatever the size
            plain = attention_ref(q, k, v, cu_seqlens, max(case.lengths))
        self.budget = relative_error(plain, self.exact)
        self.out = torch.empty((case.capacity, HEADS, HEAD_DIM), dtype=dtype, device="cuda")
        self.first: dict[type, Tensor] = {}

    def time(self, tile: Tile) -> float | str:
        """The tile's microseconds, or what is wrong with its result."""
        launch = launcher(tile, self.case)
        self.out.fill_(float("nan"))
        launch(self.inputs[0], self.out)
        live = self.out[: self.live]
        if not relative_error(live, self.exact) <= FUSED_RATIO * self.budget:
            return "wrong"
        if not torch.equal(self.first.setdefault(type(tile), live.clone()), live):
            return "other bits"
        return microseconds(launch, self.inputs, self.out)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, ``[sequences, heads, rows, head_dim]``, rounded as by transformers' eager attention."""
    scores = q @ k.mT * HEAD_DIM**-0.5
    return scores.float().softmax(-1).to(q.dtype) @ v


def backend_error(batch: Sequence[Tensor], exact: Tensor, name: str) -> float | str:
    """The error of one of PyTorch's backends, or why it does not run."""
    try:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return relative_error(F.scaled_dot_product_attention(*batch), exact)
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def errors(heads: int, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[str, float | str]:
    """Relative errors of our attention and of PyTorch's on sequences of one length."""
    case = Case(lengths)
    q, k, v = torch.randn(case.capacity, 3, heads, HEAD_DIM, dtype=dtype, device="cuda").unbind(1)
    batch = [x.unflatten(0, (len(lengths), -1)).transpose(1, 2).contiguous() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(x.double() for x in batch))
    ours = attention(q, k, v, case.offsets(), case.max_seqlen)
    ours = ours.unflatten(0, (len(lengths), -1)).transpose(1, 2)
    found: dict[str, float | str] = {
        "ours": relative_error(ours, exact),
        "formula": relative_error(eager(*batch), exact),
    }
    found |= {name: backend_error(batch, exact, name) for name in BACKENDS}
    return found


def launch_once(variant: tuple[Tile, torch.dtype]) -> None:
    tile, dtype = variant
    case = Case((64,))
    qkv = torch.zeros(64, 3, HEADS, HEAD_DIM, dtype=dtype, device="cuda")
    launcher(tile, case)(qkv, torch.empty_like(qkv[:, 0]).contiguous())
    torch.cuda.synchronize()


def line(name: object, cells: Sequence[float | str], marked: int | None = None) -> str:
    shown = [cell if isinstance(cell, str) else f"{cell:.1f}" for cell in cells]
    return f"{name!s:32}" + "".join(f"{cell + ('*' if i == marked else ''):>17}" for i, cell in enumerate(shown))


@click.command(help=__doc__)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--plain", is_flag=True, help="Plain Triton's tiles, also where Gluon serves the GPU.")
@click.option("--errors", "only_errors", is_flag=True, help="Errors alone.")
def main(dtype: str, plain: bool, only_errors: bool) -> None:
    reason = why_no_gpu()
    if reason is not None:
        raise click.ClickException(reason)
    started = time.perf_counter()
    element = getattr(torch, dtype)
    if only_errors:
        for heads, lengths in ERROR_CASES:
            click.echo(f"{Case(lengths)} rows, {heads} heads, {dtype}")
            for name, error in errors(heads, lengths, element).items():
                click.echo(f"  {name.lower():20} {error if isinstance(error, str) else f'{error:.3e}'}")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    gluon = not plain and dispatch.why_not_hopper(device, element) is None
    candidates: Mapping[str, Tile] = HOPPER_CANDIDATES if gluon else PLAIN_CANDIDATES
    tiles = list(candidates.values())
    compile_ahead(launch_once, [(tile, element) for tile in tiles])

    table = [line("us of attention; * as shipped", list(candidates))]
    for case in CASES:
        found = Measurement(case, element)
        times = [found.time(tile) for tile in tiles]
        sequences = case.sequences or len(case.lengths)
        sizes = {"num_rows": case.capacity, "max_seqlen": case.max_seqlen, "num_sequences": sequences}
        shipped = attention_tile(device, element, HEAD_DIM, **sizes)
        marked = tiles.index(shipped) if shipped in tiles else None
        table.append(line(case, times, marked))
        del found
    click.echo("\n".join(table))
    bad = any(word in row for row in table for word in ("wrong", "other bits"))
    click.echo(
        f"{'FAILED' if bad else 'passed'}: {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {dispatch.triton_version()}, {dtype}, {time.perf_counter() - started:.0f} s"
    )
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
