"""The rotary table of a pass, and the rotation of q and k: alone, and in the qkv projection's epilogue.

    pytest bench/bench_rotary.py -k projection

measures the projection whose epilogue rotates against the projection and the rotation one after the other.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.compiled import compiled
from bench.ideal import linear_flops
from bench.measure import Case, Inputs, Provider, Reference, Work
from bench.sizes import DEVICE, FRAMES, HEAD_DIM, HEADS, HIDDEN, drawn, live
from ernie_vit.kernels.linear import linear
from ernie_vit.kernels.qkv_rotary import leaves_paired, natural_order, qkv_rotary, qkv_rotary_ref
from ernie_vit.kernels.rotary import apply_rotary, apply_rotary_ref, rotary_table, rotary_table_ref, row_positions


def plan(rows: int) -> tuple[Tensor, Tensor]:
    """``cu_seqlens`` and ``frame_sizes`` of the frames of ``rows``."""
    ends = torch.tensor([0] + [height * width for height, width in FRAMES[rows]]).cumsum(0)
    return ends.int().to(DEVICE), torch.tensor(FRAMES[rows], dtype=torch.int32, device=DEVICE)


def random_table(rows: int, seed: int) -> Tensor:
    angles = 3 * torch.randn(rows, HEAD_DIM // 2, **drawn(seed, torch.float32))
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def exact_table(cu_seqlens: Tensor, frame_sizes: Tensor, rows: int) -> Tensor:
    half = HEAD_DIM // 2
    frequencies = 10000.0 ** (-torch.arange(0, half, 2, dtype=torch.float64, device=DEVICE) / half)
    angles = (row_positions(cu_seqlens, frame_sizes, rows).double().unsqueeze(-1) * frequencies).flatten(1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("rows", FRAMES)
def test_table(rows: int, run_case: Callable[[Case], None]) -> None:
    def inputs(seed: int) -> Inputs:  # noqa: ARG001  the plan is the input
        cu_seqlens, frame_sizes = plan(rows)
        return {"cu_seqlens": cu_seqlens, "frame_sizes": frame_sizes}

    sizes: dict[str, Any] = {"num_rows": rows, "head_dim": HEAD_DIM}
    reference = Reference(
        lambda i: exact_table(i["cu_seqlens"], i["frame_sizes"], rows), lambda i: rotary_table_ref(**i, **sizes)
    )
    providers = {
        "ours": Provider(lambda i: rotary_table(**i, **sizes), reference),
        "eager": Provider(reference.plain, reference),
    }
    run_case(Case("rotary", "table", rows, inputs, providers, Work(0, 4 * rows * HEAD_DIM)))


def rotate_eagerly(qkv: Tensor, table: Tensor) -> Tensor:
    """q and k alone, as the eager model rotates them: v is not copied."""
    q_and_k = qkv[:, :2].float()
    cos, sin = table.repeat(1, 1, 2)[:, :, None, None].unbind(1)
    first, second = q_and_k.chunk(2, dim=-1)
    return (q_and_k * cos + torch.cat((-second, first), dim=-1) * sin).to(qkv.dtype)


compiled_rotation = compiled(rotate_eagerly, "qkv", "table")


@pytest.mark.parametrize("rows", FRAMES)
def test_rotation(rows: int, run_case: Callable[[Case], None]) -> None:
    few = rows // 8
    every, eighth = live(rows), live(few)

    def inputs(seed: int) -> Inputs:
        qkv = torch.randn(rows, 3, HEADS, HEAD_DIM, **drawn(seed))
        return {"qkv": qkv, "table": random_table(rows, seed)}

    def work(live_rows: int) -> Work:
        return Work(6 * live_rows * HIDDEN, 2 * live_rows * 2 * HIDDEN * 2 + 4 * live_rows * HEAD_DIM)

    reference = Reference(
        lambda i: apply_rotary_ref(i["qkv"].double(), i["table"].double())[:, :2],
        lambda i: rotate_eagerly(**i),
        part=lambda out: out[:, :2],
    )
    providers = {
        "ours": Provider(lambda i: apply_rotary(**i, num_rows=every), reference),
        "ours, 1/8 live": Provider(lambda i: apply_rotary(**i, num_rows=eighth), reference, few, work(few)),
        "eager": Provider(reference.plain, reference),
        "torch.compile": Provider(lambda i: compiled_rotation(**i), reference, quick=False),
    }
    run_case(Case("rotary", "rotation", rows, inputs, providers, work(rows)))


def project_then_rotate(inputs: Inputs, num_rows: Tensor) -> Tensor:
    qkv = linear(inputs["x"], inputs["weight"], inputs["bias"], num_rows=num_rows)
    return apply_rotary(qkv.view(-1, 3, HEADS, HEAD_DIM), inputs["table"], num_rows=num_rows)


def project_and_rotate_eagerly(x: Tensor, weight: Tensor, bias: Tensor, table: Tensor) -> Tensor:
    qkv = F.linear(x, weight, bias).view(-1, 3, HEADS, HEAD_DIM)
    qkv[:, :2] = rotate_eagerly(qkv, table)
    return qkv


compiled_projection = compiled(project_and_rotate_eagerly, "x", "table")


@pytest.mark.parametrize("rows", FRAMES)
def test_projection(rows: int, run_case: Callable[[Case], None]) -> None:
    few = rows // 8
    every, eighth = live(rows), live(few)

    def inputs(seed: int) -> Inputs:
        like = drawn(seed)
        return {
            "x": torch.randn(rows, HIDDEN, **like),
            "weight": torch.randn(3 * HIDDEN, HIDDEN, **like) / HIDDEN**0.5,
            "bias": torch.randn(3 * HIDDEN, **like),
            "table": random_table(rows, seed),
        }

    def exact(i: Inputs) -> Tensor:
        return qkv_rotary_ref(*(i[name].double() for name in ("x", "weight", "bias", "table")), num_heads=HEADS)

    def work(live_rows: int) -> Work:
        elements = live_rows * HIDDEN + 3 * HIDDEN**2 + live_rows * 3 * HIDDEN
        moved = 2 * elements + 4 * live_rows * HEAD_DIM
        return Work(2 * live_rows * 3 * HIDDEN**2, moved, linear_flops(live_rows, 3 * HIDDEN, HIDDEN, capacity=rows))

    separate = Reference(exact, lambda i: qkv_rotary_ref(**i, num_heads=HEADS))
    example = inputs(0)
    paired = leaves_paired(example["x"], example["weight"], HEADS)
    fused = replace(separate, part=natural_order) if paired else separate
    providers = {
        "ours": Provider(lambda i: qkv_rotary(**i, num_heads=HEADS, num_rows=every), fused),
        "ours, 1/8 live": Provider(lambda i: qkv_rotary(**i, num_heads=HEADS, num_rows=eighth), fused, few, work(few)),
        "ours, linear then rotary": Provider(lambda i: project_then_rotate(i, every), separate),
        "cuBLAS + eager rotation": Provider(lambda i: project_and_rotate_eagerly(**i), separate),
        "torch.compile": Provider(lambda i: compiled_projection(**i), separate, quick=False),
    }
    run_case(Case("rotary", "projection", rows, inputs, providers, work(rows)))
