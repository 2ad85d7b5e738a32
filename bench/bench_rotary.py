"""The rotary table of a pass, and the rotation of q and k: alone, and in the qkv projection's epilogue.

    pytest bench/bench_rotary.py -k projection

measures the projection whose epilogue rotates against the projection and the rotation one after the other.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.measure import Case, Inputs, Provider, Reference
from bench.sizes import FRAMES, HEAD_DIM, HEADS, HIDDEN
from ernie_vit.kernels.linear import linear
from ernie_vit.kernels.qkv_rotary import leaves_paired, natural_order, qkv_rotary, qkv_rotary_ref
from ernie_vit.kernels.rotary import apply_rotary, apply_rotary_ref, rotary_table, rotary_table_ref, row_positions


def plan(rows: int, *, share: int = 1) -> tuple[Tensor, Tensor]:
    """``cu_seqlens`` and ``frame_sizes`` of the frames of ``rows``; with ``share`` of frames that much lower."""
    frames = [(height // share // 2 * 2, width) for height, width in FRAMES[rows]]
    ends = torch.tensor([0] + [height * width for height, width in frames]).cumsum(0)
    return ends.int().cuda(), torch.tensor(frames, dtype=torch.int32, device="cuda")


def exact_table(cu_seqlens: Tensor, frame_sizes: Tensor, rows: int) -> Tensor:
    half = HEAD_DIM // 2
    frequencies = 10000.0 ** (-torch.arange(0, half, 2, dtype=torch.float64, device="cuda") / half)
    angles = (row_positions(cu_seqlens, frame_sizes, rows).double().unsqueeze(-1) * frequencies).flatten(1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("rows", FRAMES)
def test_table(rows: int, run_case: Callable[[Case], None]) -> None:
    def inputs(seed: int) -> Inputs:  # noqa: ARG001  the plan is the input
        cu_seqlens, frame_sizes = plan(rows)
        return {"cu_seqlens": cu_seqlens, "frame_sizes": frame_sizes}

    sizes = {"num_rows": rows, "head_dim": HEAD_DIM}
    reference = Reference(
        lambda i: exact_table(i["cu_seqlens"], i["frame_sizes"], rows), lambda i: rotary_table_ref(**i, **sizes)
    )
    providers = {
        "ours": Provider(lambda i: rotary_table(**i, **sizes), reference),
        "eager": Provider(reference.plain, reference),
    }
    run_case(Case("rotary", "table", rows, inputs, providers, 0, 4 * rows * HEAD_DIM))


def rotate_eagerly(inputs: Inputs) -> Tensor:
    """q and k alone, as the eager model rotates them: v is not copied."""
    q_and_k = inputs["qkv"][:, :2].float()
    cos, sin = inputs["table"].repeat(1, 1, 2)[:, :, None, None].unbind(1)
    first, second = q_and_k.chunk(2, dim=-1)
    return (q_and_k * cos + torch.cat((-second, first), dim=-1) * sin).to(inputs["qkv"].dtype)


compiled = torch.compile(rotate_eagerly, dynamic=True)


@pytest.mark.parametrize("rows", FRAMES)
def test_rotation(rows: int, run_case: Callable[[Case], None]) -> None:
    every, eighth = (torch.tensor([live], dtype=torch.int32, device="cuda") for live in (rows, rows // 8))
    table = rotary_table(*plan(rows), num_rows=rows, head_dim=HEAD_DIM)

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        qkv = torch.randn(rows, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        return {"qkv": qkv, "table": table.clone()}

    reference = Reference(
        lambda i: apply_rotary_ref(i["qkv"].double(), i["table"].double())[:, :2],
        rotate_eagerly,
        part=lambda out: out[:, :2],
    )
    providers = {
        "ours": Provider(lambda i: apply_rotary(**i, num_rows=every), reference),
        "ours, 1/8 live": Provider(lambda i: apply_rotary(**i, num_rows=eighth), reference, live=rows // 8),
        "eager": Provider(rotate_eagerly, reference),
        "torch.compile": Provider(compiled, reference),
    }
    moved = 2 * rows * 2 * HIDDEN * 2 + 4 * rows * HEAD_DIM
    run_case(Case("rotary", "rotation", rows, inputs, providers, 6 * rows * HIDDEN, moved))


def project_then_rotate(inputs: Inputs, num_rows: Tensor) -> Tensor:
    qkv = linear(inputs["x"], inputs["weight"], inputs["bias"], num_rows=num_rows)
    return apply_rotary(qkv.view(-1, 3, HEADS, HEAD_DIM), inputs["table"], num_rows=num_rows)


def project_and_rotate_eagerly(inputs: Inputs) -> Tensor:
    qkv = torch.nn.functional.linear(inputs["x"], inputs["weight"], inputs["bias"]).view(-1, 3, HEADS, HEAD_DIM)
    qkv[:, :2] = rotate_eagerly({"qkv": qkv, "table": inputs["table"]})
    return qkv


@pytest.mark.parametrize("rows", FRAMES)
def test_projection(rows: int, run_case: Callable[[Case], None]) -> None:
    every, eighth = (torch.tensor([live], dtype=torch.int32, device="cuda") for live in (rows, rows // 8))
    table = rotary_table(*plan(rows), num_rows=rows, head_dim=HEAD_DIM)

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        return {
            "x": torch.randn(rows, HIDDEN, **like),
            "weight": torch.randn(3 * HIDDEN, HIDDEN, **like) / HIDDEN**0.5,
            "bias": torch.randn(3 * HIDDEN, **like),
            "table": table.clone(),
        }

    def exact(i: Inputs) -> Tensor:
        return qkv_rotary_ref(*(i[name].double() for name in ("x", "weight", "bias", "table")), num_heads=HEADS)

    separate = Reference(exact, lambda i: qkv_rotary_ref(**i, num_heads=HEADS))
    example = inputs(0)
    paired = leaves_paired(example["x"], example["weight"], HEADS)
    fused = replace(separate, part=natural_order) if paired else separate
    providers = {
        "ours": Provider(lambda i: qkv_rotary(**i, num_heads=HEADS, num_rows=every), fused),
        "ours, 1/8 live": Provider(lambda i: qkv_rotary(**i, num_heads=HEADS, num_rows=eighth), fused, live=rows // 8),
        "linear, then rotary": Provider(lambda i: project_then_rotate(i, every), separate),
        "cuBLAS + eager rotation": Provider(project_and_rotate_eagerly, separate),
    }
    elements = rows * HIDDEN + 3 * HIDDEN**2 + rows * 3 * HIDDEN
    flops = 2 * rows * 3 * HIDDEN**2
    run_case(Case("rotary", "projection", rows, inputs, providers, flops, 2 * elements + 4 * rows * HEAD_DIM))
