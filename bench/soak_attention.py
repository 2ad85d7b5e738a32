"""Soak of the Gluon attention tiles: thousands of launches into poisoned outputs, compared bit by bit on the device.

A missing barrier shows once in many launches, so one comparison proves nothing. Each tile runs on round and ragged
lengths, from buffers whose rows past the sequences hold NaN; every launch must give the same bits, no NaN in a live
row, and must leave the poison in all others. Run: ``python -m bench.soak_attention``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from bench.measure import relative_error
from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention_ref
from ernie_vit.kernels.hopper.attention import launch_attention
from ernie_vit.kernels.tiles.attention import HOPPER_TILES, HopperTile, work_list_shape
from ernie_vit.kernels.triton.work_list import launch_work_list

HEADS, HEAD_DIM = 16, 80
SPARE_ROWS = 200
LENGTHS = {
    "16 x 256": [256] * 16,
    "ragged": [1, 15, 16, 17, 63, 64, 65, 129, 300, 1296, 7],
}
LAUNCHES_A_GRAPH = 50
REPLAYS_A_BATCH = 10  # then new inputs, and one read of the counters


@dataclass
class Counters:
    """On the device: launches with a NaN in a live row, and launches whose bits differ anywhere from the first."""

    nan: Tensor
    different: Tensor


def capture(launch: Callable[[Tensor], None], expected: Tensor, live: int) -> tuple[torch.cuda.CUDAGraph, Counters]:
    """A graph of launches, each into a new poison, and of their comparison with ``expected``."""
    counters = Counters(*torch.zeros(2, dtype=torch.int64, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.empty_like(expected)  # of the graph's own memory, so that nothing else takes its place
        for _ in range(LAUNCHES_A_GRAPH):
            out.fill_(float("nan"))
            launch(out)
            counters.nan += out[:live].isnan().any()
            counters.different += (out.view(torch.int16) != expected.view(torch.int16)).any()
    return graph, counters


def soak(tile: HopperTile, lengths: list[int], dtype: torch.dtype, count: int) -> tuple[int, int, int, float, float]:
    """Run at least ``count`` launches.

    Returns:
        launches, those with NaN, those with other bits, and the largest errors against float32: its own and that of
        PyTorch's attention.
    """
    live = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths, 0, 0]).cumsum(0).to(torch.int32).cuda()
    qkv = torch.full((live + SPARE_ROWS, 3, HEADS, HEAD_DIM), float("nan"), dtype=dtype, device="cuda")
    q, k, v = qkv.unbind(1)
    shape = work_list_shape(len(qkv), len(cu_seqlens) - 1, HEADS, tile.rows)
    work_list = torch.empty(shape, dtype=torch.int32, device="cuda")
    launch_work_list(cu_seqlens, work_list, num_rows=len(qkv), num_heads=HEADS, tile_rows=tile.rows)

    def launch(out: Tensor) -> None:
        launch_attention(q, k, v, out, work_list, scale=HEAD_DIM**-0.5, tile=tile)

    expected = torch.full(q.shape, float("nan"), dtype=dtype, device="cuda")
    launch(expected)
    graph, counters = capture(launch, expected, live)
    launches, error, budget = 0, 0.0, 0.0
    while launches < count:
        qkv[:live].normal_()
        expected.fill_(float("nan"))
        launch(expected)
        for _ in range(REPLAYS_A_BATCH):
            graph.replay()
        launches += LAUNCHES_A_GRAPH * REPLAYS_A_BATCH
        inputs = [x[:live] for x in (q, k, v)]
        exact = attention_ref(*(x.float() for x in inputs), cu_seqlens, max(lengths))
        of_batch = relative_error(expected[:live], exact)
        error = of_batch if of_batch != of_batch else max(error, of_batch)
        budget = max(budget, relative_error(attention_ref(*inputs, cu_seqlens, max(lengths)), exact))
    return launches, int(counters.nan), int(counters.different), error, budget


@click.command(help=__doc__)
@click.option("--count", default=10_000, show_default=True, help="Launches of each tile, dtype and set of lengths.")
def main(count: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reason = dispatch.why_not_hopper(device, torch.bfloat16)
    if reason is not None:
        raise click.ClickException(f"there is no Gluon kernel to soak: {reason}")
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {dispatch.triton_version()}")
    bad = False
    for tile in HOPPER_TILES:
        for dtype in (torch.bfloat16, torch.float16):
            for name, lengths in LENGTHS.items():
                launches, nan, different, error, budget = soak(tile, lengths, dtype, count)
                failed = nan > 0 or different > 0 or not error <= 1.02 * budget
                bad |= failed
                click.echo(
                    f"{'FAILED' if failed else 'passed'}  {tile}  {str(dtype).removeprefix('torch.')}  {name}: "
                    f"{launches:,} launches, {nan} with NaN, {different} with other bits, "
                    f"error {error:.5f} (PyTorch {budget:.5f})"
                )
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
