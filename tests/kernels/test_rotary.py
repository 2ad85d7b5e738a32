"""Rotary positions, table and rotation against float64 and transformers' formulas."""

import math

import pytest
import torch
from accuracy import assert_within_budget, relative_error
from torch import Tensor

from ernie_vit.kernels.rotary import (
    apply_rotary,
    apply_rotary_ref,
    inverse_frequencies,
    rotary_table,
    rotary_table_ref,
    row_positions,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_DIM = 80
CPU = torch.device("cpu")
Frames = list[tuple[int, int]]


def plan(frames: Frames, device: str, *, padding: int = 0) -> tuple[Tensor, Tensor]:
    """``cu_seqlens`` and ``frame_sizes`` of these frames, with room for ``padding`` more."""
    ends = torch.tensor([0] + [h * w for h, w in frames]).cumsum(0).tolist()
    cu_seqlens = torch.tensor(ends + ends[-1:] * padding, dtype=torch.int32, device=device)
    sizes = torch.zeros(len(frames) + padding, 2, dtype=torch.int32, device=device)
    sizes[: len(frames)] = torch.tensor(frames, dtype=torch.int32).reshape(-1, 2)
    return cu_seqlens, sizes


def merge_order(height: int, width: int) -> Tensor:
    """(y, x) of the rows of a frame, cut out of a picture in which each patch holds its own row and column."""
    picture = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    windows = [picture[y : y + 2, x : x + 2] for y in range(0, height, 2) for x in range(0, width, 2)]
    return torch.cat([window.reshape(4, 2) for window in windows])


def exact_table(positions: Tensor, head_dim: int = HEAD_DIM, theta: float = 10000.0) -> Tensor:
    half = head_dim // 2
    frequencies = torch.tensor([theta ** (-2 * i / half) for i in range(half // 2)], dtype=torch.float64)
    angles = torch.cat([positions[:, :1].double() * frequencies, positions[:, 1:].double() * frequencies], 1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def qkv_and_table(
    rows: int,
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = 2,
    head_dim: int = HEAD_DIM,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, 3, heads, head_dim, generator=generator)
    angles = 1000 * torch.rand(rows, head_dim // 2, generator=generator)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    return qkv.to(device, dtype), table.to(device)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([(4, 6)], id="not-square"),
        pytest.param([(2, 10), (0, 0), (10, 2), (4, 4)], id="frames-and-an-empty-one"),
        pytest.param([(0, 0), (6, 4), (0, 0)], id="empty-at-the-ends"),
    ],
)
def test_row_positions(frames: Frames) -> None:
    expected = torch.cat([merge_order(*frame) for frame in frames if frame != (0, 0)])
    positions = row_positions(*plan(frames, "cpu", padding=3), len(expected))
    assert torch.equal(positions, expected)


def test_row_positions_and_angles_are_those_of_transformers() -> None:
    from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import Ernie4_5_VLMoeVisionConfig
    from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeVisionRotaryEmbedding,
        apply_rotary_pos_emb_vision,
    )
    from transformers.vision_utils import get_vision_position_ids

    frames = [(10, 6), (10, 6), (4, 16)]
    theirs = get_vision_position_ids(torch.tensor([[2, 10, 6], [1, 4, 16]]), 2)
    rows = len(theirs)
    cu_seqlens, sizes = plan(frames, "cpu")
    assert torch.equal(row_positions(cu_seqlens, sizes, rows), theirs)

    table = rotary_table_ref(cu_seqlens, sizes, num_rows=rows, head_dim=HEAD_DIM)
    cos, sin = Ernie4_5_VLMoeVisionRotaryEmbedding(Ernie4_5_VLMoeVisionConfig())(torch.empty(0), theirs)
    half = HEAD_DIM // 2
    for ours, their in ((table[:, 0], cos), (table[:, 1], sin)):
        assert torch.equal(ours, their[:, :half])
        assert torch.equal(ours, their[:, half:])

    qkv = torch.randn(rows, 3, 16, HEAD_DIM).bfloat16()
    rotated = apply_rotary_ref(qkv, table)
    q, k = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], cos, sin)
    assert torch.equal(rotated, torch.stack((q, k, qkv[:, 2]), dim=1))


@pytest.mark.parametrize(
    ("frames", "padding"),
    [
        pytest.param([(4, 6)], 0, id="one"),
        pytest.param([(2, 10), (0, 0), (10, 2), (6, 6)], 5, id="mixed-padded"),
        pytest.param([(2, 2)] * 200, 0, id="more-frames-than-a-block-of-cuts"),
    ],
)
def test_table_equals_float64_within_the_error_of_torch(device: str, frames: Frames, padding: int) -> None:
    cu_seqlens, sizes = plan(frames, device, padding=padding)
    rows = int(cu_seqlens[-1])
    table = rotary_table(cu_seqlens, sizes, num_rows=rows, head_dim=HEAD_DIM)
    plain = rotary_table_ref(cu_seqlens, sizes, num_rows=rows, head_dim=HEAD_DIM)
    exact = exact_table(row_positions(cu_seqlens, sizes, rows).cpu()).to(device)
    assert_within_budget(table, plain, exact)


@pytest.mark.parametrize("frame", [(2, 2000), (2000, 2)], ids=["wide", "tall"])
def test_table_far_from_the_origin(device: str, frame: tuple[int, int]) -> None:
    cu_seqlens, sizes = plan([frame], device)
    table = rotary_table(cu_seqlens, sizes, num_rows=4000, head_dim=HEAD_DIM)[-400:]
    plain = rotary_table_ref(cu_seqlens, sizes, num_rows=4000, head_dim=HEAD_DIM)[-400:]
    assert_within_budget(table, plain, exact_table(merge_order(*frame)[-400:]).to(device))


def test_angles_are_float32_where_a_bf16_cache_would_be_wrong(device: str) -> None:
    cu_seqlens, sizes = plan([(2, 202)], device)
    table = rotary_table(cu_seqlens, sizes, num_rows=404, head_dim=HEAD_DIM)[-4:].cpu()  # columns 200 and 201
    exact = exact_table(merge_order(2, 202)[-4:])
    assert relative_error(table, exact) < 1e-5
    angles = (
        merge_order(2, 202)[-4:, :, None].bfloat16() * inverse_frequencies(HEAD_DIM, 1e4, CPU).bfloat16()
    ).flatten(1)
    cache = torch.stack((angles.cos(), angles.sin()), dim=1)
    assert relative_error(cache, exact) > 1e-2


@pytest.mark.parametrize("head_dim", [16, 72, 128])
def test_table_of_other_heads_and_bases(device: str, head_dim: int) -> None:
    cu_seqlens, sizes = plan([(4, 6)], device)
    shape = {"num_rows": 24, "head_dim": head_dim, "theta": 500.0}
    exact = exact_table(merge_order(4, 6), head_dim, 500.0).to(device)
    assert_within_budget(rotary_table(cu_seqlens, sizes, **shape), rotary_table_ref(cu_seqlens, sizes, **shape), exact)


def test_table_rows_past_the_live_ones_are_not_written(device: str) -> None:
    launch = pytest.importorskip("ernie_vit.kernels.triton.rotary").launch_table
    frequencies = tuple(inverse_frequencies(HEAD_DIM, 1e4, CPU).tolist())
    cu_seqlens, sizes = plan([(2, 6), (6, 2)], device, padding=2)
    sizes[2:] = -1  # whatever the padding holds
    table = torch.full((40, 2, HEAD_DIM // 2), float("nan"), device=device)
    launch(cu_seqlens, sizes, table, frequencies)
    assert table[:24].isfinite().all()
    assert table[24:].isnan().all()
    launch(cu_seqlens, sizes, table[30:], frequencies)  # fewer rows than the offsets name: no write past the end
    assert table[30:].isfinite().all()


@pytest.mark.gpu
def test_table_of_4096_sequences() -> None:
    cu_seqlens, sizes = plan([(2, 2)] * 4095 + [(8, 64)], "cuda")
    rows = 4095 * 4 + 512
    table = rotary_table(cu_seqlens, sizes, num_rows=rows, head_dim=HEAD_DIM)
    plain = rotary_table_ref(cu_seqlens, sizes, num_rows=rows, head_dim=HEAD_DIM)
    exact = exact_table(torch.cat([merge_order(2, 2).repeat(4095, 1), merge_order(8, 64)])).cuda()
    assert_within_budget(table, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 72, 128, 36])
def test_rotation_equals_float64_within_the_error_of_torch(device: str, dtype: torch.dtype, head_dim: int) -> None:
    qkv, table = qkv_and_table(23, dtype, device, head_dim=head_dim)
    exact = apply_rotary_ref(qkv.double(), table.double())
    plain = apply_rotary_ref(qkv, table)
    v = qkv[:, 2].clone()
    out = apply_rotary(qkv, table)
    assert out is qkv
    assert torch.equal(out[:, 2], v)
    for part in (0, 1):
        assert_within_budget(out[:, part], plain[:, part], exact[:, part])


def test_rotation_of_the_tower(device: str) -> None:
    qkv, table = qkv_and_table(9, torch.bfloat16, device, heads=16)
    plain, exact = apply_rotary_ref(qkv, table), apply_rotary_ref(qkv.double(), table.double())
    assert_within_budget(apply_rotary(qkv, table)[:, :2], plain[:, :2], exact[:, :2])


def test_rotation_keeps_lengths_and_turns_by_the_difference_of_positions(device: str) -> None:
    cu_seqlens, sizes = plan([(8, 8)], device)
    table = rotary_table(cu_seqlens, sizes, num_rows=64, head_dim=HEAD_DIM)
    vector = torch.randn(2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    qkv = torch.zeros(64, 3, 1, HEAD_DIM)
    qkv[:, 0, 0], qkv[:, 1, 0] = vector[0], vector[1]
    q, k, _ = apply_rotary(qkv.to(device), table)[:, :, 0].unbind(1)
    torch.testing.assert_close(q.norm(dim=1).cpu(), vector[0].norm().expand(64))
    scores = q.double() @ k.double().T
    # rows 0 and 12: (0, 0) and (0, 6); rows 16 and 28: (2, 0) and (2, 6): the same step to the right
    assert math.isclose(scores[0, 12], scores[16, 28], rel_tol=1e-5)
    assert not math.isclose(scores[0, 12], scores[12, 0], rel_tol=1e-2)


@pytest.mark.parametrize("live", [0, 1, 6, 11])
def test_rows_past_the_live_ones_are_neither_read_nor_written(device: str, live: int) -> None:
    qkv, table = qkv_and_table(11, torch.bfloat16, device)
    alone = apply_rotary(qkv[:live].clone(), table[:live])
    qkv[live:], table[live:] = -7.0, float("nan")
    num_rows = torch.tensor([live], dtype=torch.int32, device=device)
    apply_rotary(qkv, table, num_rows=num_rows)
    assert torch.equal(qkv[:live], alone)
    assert (qkv[live:] == -7.0).all()


def test_count_past_the_capacity_stops_at_the_capacity(device: str) -> None:
    qkv, table = qkv_and_table(6, torch.bfloat16, device)
    last = qkv[5].clone()
    apply_rotary(qkv[:5], table[:5], num_rows=torch.tensor([6], dtype=torch.int32, device=device))
    assert torch.equal(qkv[5], last)


@pytest.mark.parametrize("stride", [512, 488, 481], ids=["aligned", "by-8", "odd"])
def test_strided_rows(device: str, stride: int) -> None:
    buffer, _ = qkv_and_table(7, torch.bfloat16, device, heads=1, head_dim=512)
    strided = buffer.flatten()[: 7 * stride].view(7, stride)[:, :480].unflatten(1, (3, 2, HEAD_DIM))
    assert strided.stride() == (stride, 160, 80, 1)
    _, table = qkv_and_table(7, torch.bfloat16, device)
    untouched = buffer.flatten()[: 7 * stride].view(7, stride)[:, 480:].clone()
    expected = apply_rotary(strided.clone(), table)
    assert torch.equal(apply_rotary(strided, table), expected)
    assert torch.equal(buffer.flatten()[: 7 * stride].view(7, stride)[:, 480:], untouched)


def test_misaligned_input(device: str) -> None:
    qkv, table = qkv_and_table(7, torch.bfloat16, device)
    buffer = torch.zeros(7 * 480 + 1, dtype=qkv.dtype, device=device)
    misaligned = buffer[1:].view_as(qkv).copy_(qkv)
    assert torch.equal(apply_rotary(misaligned, table), apply_rotary(qkv, table))


def test_empty_input(device: str) -> None:
    qkv, table = qkv_and_table(0, torch.bfloat16, device)
    assert apply_rotary(qkv, table) is qkv
    for frames in ([], [(0, 0)]):
        table = rotary_table(*plan(frames, device), num_rows=0, head_dim=HEAD_DIM)
        assert table.shape == (0, 2, HEAD_DIM // 2)
    assert rotary_table(*plan([], device), num_rows=3, head_dim=HEAD_DIM).shape == (3, 2, HEAD_DIM // 2)


def test_the_same_bits_twice_and_alone(device: str) -> None:
    frames = [(4, 6), (6, 8), (2, 2)]
    cu_seqlens, sizes = plan(frames, device)
    table = rotary_table(cu_seqlens, sizes, num_rows=76, head_dim=HEAD_DIM)
    assert torch.equal(rotary_table(cu_seqlens, sizes, num_rows=76, head_dim=HEAD_DIM), table)
    alone = rotary_table(*plan(frames[1:2], device), num_rows=48, head_dim=HEAD_DIM)
    assert torch.equal(table[24:72], alone)
    qkv, _ = qkv_and_table(76, torch.bfloat16, device)
    part = apply_rotary(qkv[24:72].clone(), alone)
    assert torch.equal(apply_rotary(qkv, table)[24:72], part)


def test_registered_ops(device: str) -> None:
    cu_seqlens, sizes = plan([(2, 4), (4, 2)], device, padding=1)
    # no rows past the live ones: opcheck compares outputs as a whole
    torch.library.opcheck(torch.ops.ernie_vit.rotary_table.default, (cu_seqlens, sizes, 16, HEAD_DIM, 10000.0))
    qkv, table = qkv_and_table(5, torch.bfloat16, device)
    for count in (None, torch.tensor([4], dtype=torch.int32, device=device)):
        torch.library.opcheck(torch.ops.ernie_vit.apply_rotary.default, (qkv, table, count))


@pytest.mark.gpu
def test_compiles_as_one_graph() -> None:
    cu_seqlens, sizes = plan([(4, 6), (8, 8)], "cuda")
    qkv, _ = qkv_and_table(88, torch.bfloat16, "cuda", heads=16)

    def rotated(qkv: Tensor) -> Tensor:
        table = rotary_table(cu_seqlens, sizes, num_rows=88, head_dim=HEAD_DIM)
        return apply_rotary(qkv * 2, table) + 1

    assert torch.equal(torch.compile(rotated, fullgraph=True)(qkv), rotated(qkv))


@pytest.mark.gpu
def test_replay_follows_the_plan() -> None:
    capacity = 4096
    cu_seqlens, sizes = plan([(64, 64)], "cuda", padding=7)
    qkv = torch.empty(capacity, 3, 16, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def forward() -> Tensor:
        table = rotary_table(cu_seqlens, sizes, num_rows=capacity, head_dim=HEAD_DIM)
        apply_rotary(qkv, table, num_rows=cu_seqlens[-1:])
        return table

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = forward()
    for seed, frames in enumerate([[(64, 64)], [(2, 2)], [(10, 20), (30, 4)] * 4]):
        new_cu_seqlens, new_sizes = plan(frames, "cuda", padding=8 - len(frames))
        cu_seqlens.copy_(new_cu_seqlens)
        sizes.copy_(new_sizes)
        live = int(new_cu_seqlens[-1])
        fresh, _ = qkv_and_table(capacity, torch.bfloat16, "cuda", heads=16, seed=seed)
        qkv.copy_(fresh)
        table.fill_(float("nan"))
        graph.replay()
        expected = rotary_table(new_cu_seqlens, new_sizes, num_rows=live, head_dim=HEAD_DIM)
        assert torch.equal(table[:live], expected)
        assert torch.equal(qkv[:live], apply_rotary(fresh[:live].clone(), expected))
        assert torch.equal(qkv[live:], fresh[live:])


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31_elements() -> None:
    rows = 560_000  # [560000, 3840]
    if torch.cuda.get_device_properties(0).total_memory < 6e9:
        pytest.skip("needs 6 GB of GPU memory")
    few, few_table = qkv_and_table(16, torch.bfloat16, "cuda", heads=16)
    qkv = torch.zeros(rows, 3, 16, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(rows, 2, HEAD_DIM // 2, device="cuda")
    qkv[-16:], table[-16:] = few, few_table
    apply_rotary(qkv, table)
    assert torch.equal(qkv[-16:], apply_rotary(few, few_table))
    assert not qkv[:-16].any()


def test_reference_is_differentiable() -> None:
    qkv, table = qkv_and_table(2, torch.float64, "cpu", head_dim=8)
    assert torch.autograd.gradcheck(apply_rotary_ref, (qkv.requires_grad_(), table.double()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qkv": torch.zeros(4, 2, 2, 80)}, ValueError, r"qkv: expected shape \[\*, 3, \*, \*\]"),
        ({"qkv": torch.zeros(4, 3, 2, 81)}, ValueError, "qkv: expected an even head_dim, got 81"),
        ({"qkv": torch.zeros(4, 2, 3, 80).transpose(1, 2)}, ValueError, "qkv: expected strides"),
        ({"qkv": torch.zeros(1, 3, 2, 80).expand(4, 3, 2, 80)}, ValueError, "qkv: expected rows that do not"),
        ({"qkv": torch.zeros(4, 3, 2, 80).double()}, TypeError, "qkv: expected .*, got torch.float64"),
        ({"table": torch.zeros(4, 2, 39)}, ValueError, r"table: expected shape \[4, 2, 40\]"),
        ({"table": torch.zeros(4, 2, 40).bfloat16()}, TypeError, "table: expected torch.float32"),
        ({"table": torch.zeros(2, 4, 40).transpose(0, 1)}, ValueError, "table: expected a contiguous tensor"),
        ({"num_rows": torch.zeros(2, dtype=torch.int32)}, ValueError, r"num_rows: expected shape \[1\]"),
    ],
)
def test_rotation_refuses_bad_arguments(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {"qkv": torch.zeros(4, 3, 2, 80), "table": torch.zeros(4, 2, 40)} | change
    with pytest.raises(error, match=message):
        apply_rotary(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 8])}, TypeError, "cu_seqlens: expected torch.int32"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, "cu_seqlens: expected at least 1"),
        ({"frame_sizes": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"frame_sizes: expected shape \[1, 2\]"),
        ({"frame_sizes": torch.zeros(1, 2, dtype=torch.int32, device="meta")}, ValueError, "frame_sizes: .* meta"),
        ({"num_rows": -1}, ValueError, "num_rows: expected at least 0, got -1"),
        ({"head_dim": 78}, ValueError, "head_dim: expected a multiple of 4, got 78"),
    ],
)
def test_table_refuses_bad_arguments(change: dict[str, object], error: type[Exception], message: str) -> None:
    cu_seqlens, frame_sizes = plan([(2, 4)], "cpu")
    arguments = {"cu_seqlens": cu_seqlens, "frame_sizes": frame_sizes, "num_rows": 8, "head_dim": 80} | change
    with pytest.raises(error, match=message):
        rotary_table(**arguments)
