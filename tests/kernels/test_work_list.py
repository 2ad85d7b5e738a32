"""The list of attention's items: which query rows of which sequence and head, longest sequences first."""

from collections import Counter
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie_vit.kernels.attention import attention_work_list, attention_work_list_ref, items_ref
from ernie_vit.kernels.tiles.attention import work_list_shape

CASES = {
    "one": [65],
    "ties keep their order": [64, 65, 64, 65, 1],
    "empty ones anywhere": [0, 0, 130, 0, 3, 0],
    "all empty": [0, 0],
    "longest last": [1, 15, 16, 17, 63, 64, 65, 129, 300],
    "padded as in a graph": [256, 64] + [0] * 1200,
}


def offsets(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def assert_equals_reference(cu_seqlens: torch.Tensor, **sizes: object) -> None:
    made, reference = attention_work_list(cu_seqlens, **sizes), attention_work_list_ref(cu_seqlens, **sizes)
    assert made.shape == reference.shape
    assert made.dtype == torch.int32
    count = int(reference[0, 0])
    assert torch.equal(made[: 1 + count], reference[: 1 + count])


@pytest.mark.parametrize("num_heads", [1, 3, 16])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_equals_the_reference(device, lengths, num_heads):
    assert_equals_reference(
        offsets(lengths, device),
        num_rows=sum(lengths) + 37,
        max_seqlen=max(lengths),
        num_heads=num_heads,
        head_dim=80,
        dtype=torch.bfloat16,
    )


@pytest.mark.interpreter
@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=12), slack=st.integers(0, 200))
@settings(max_examples=25, deadline=None)
def test_equals_the_reference_for_any_lengths(lengths, slack):
    assert_equals_reference(
        offsets(lengths, "cpu"),
        num_rows=sum(lengths) + slack,
        max_seqlen=400,
        num_heads=2,
        head_dim=72,
        dtype=torch.float32,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[4] * 4096, [449_280], [0] * 4095 + [4096]], ids=["many", "long", "mostly empty"])
def test_extremes(lengths):
    assert_equals_reference(
        offsets(lengths, "cuda"),
        num_rows=sum(lengths),
        max_seqlen=max(lengths),
        num_heads=16,
        head_dim=80,
        dtype=torch.bfloat16,
    )


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=10), num_heads=st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_reference_covers_every_row_of_every_head_once(lengths, num_heads):
    cu_seqlens = offsets(lengths, "cpu")
    made = attention_work_list_ref(
        cu_seqlens, num_rows=sum(lengths), max_seqlen=300, num_heads=num_heads, head_dim=80, dtype=torch.float32
    )
    (count, *_), *items = made.tolist()
    assert_covers_every_row_once(items[:count], lengths, num_heads)
    assert all(row_end - row <= 32 for row, row_end, *_ in items[:count])  # float32's tile
    walked = [end - first for _, _, first, end, _ in items[:count]]
    assert walked == sorted(walked, reverse=True)


def assert_covers_every_row_once(items: list[list[int]], lengths: list[int], num_heads: int) -> None:
    seen = [(r, head) for row, row_end, _, _, head in items for r in range(row, row_end)]
    assert sorted(seen) == [(r, head) for r in range(sum(lengths)) for head in range(num_heads)]


LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=12)


@given(
    lengths=LENGTHS, slack=st.integers(0, 300), tile_rows=st.sampled_from([32, 64, 192]), at_once=st.integers(1, 140)
)
def test_shape_holds_every_item(lengths, slack, tile_rows, at_once):
    offsets_ = [0, *accumulate(lengths)]
    items = items_ref(offsets_, 2, tile_rows, at_once)
    assert work_list_shape(offsets_[-1] + slack, len(lengths), 2, tile_rows, at_once)[0] >= 1 + len(items)


@pytest.mark.parametrize(
    ("rows", "heights"),
    [(10 * 192, {192: 10}), (12 * 192, {192: 10, 64: 6}), (14 * 192, {192: 10, 128: 4, 64: 4}), (16 * 192, {192: 16})],
    ids=["full rounds", "thirds", "two and one", "more than half"],
)
def test_heights_in_the_last_round(rows, heights):
    """Rounds of ten: a last round of two items becomes six pieces, one of four becomes eight, one of six stays."""
    items = items_ref([0, rows], 1, 192, 10)
    assert Counter(row_end - row for row, row_end, *_ in items) == heights


@pytest.mark.interpreter
@given(lengths=LENGTHS, num_heads=st.integers(1, 3), at_once=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_cut_of_the_last_round(lengths, num_heads, at_once):
    """The kernel cuts as the reference does: each row of each head once, and the pieces end the last round."""
    assert_cut_as_the_reference(lengths, num_heads, at_once, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[16_060], [6912], [1728], [1296], [576, 1296, 0, 4096, 256, 1728]], ids=str)
def test_cut_of_the_last_round_at_sizes_of_the_model(lengths):
    assert_cut_as_the_reference(lengths, 16, 132, "cuda")


def assert_cut_as_the_reference(lengths: list[int], num_heads: int, at_once: int, device: str) -> None:
    from ernie_vit.kernels.triton.work_list import launch_work_list

    cu_seqlens, num_rows = offsets(lengths, device), sum(lengths) + 100
    shape = work_list_shape(num_rows, len(lengths), num_heads, 192, at_once)
    made = torch.full(shape, -7, dtype=torch.int32, device=device)
    launch_work_list(cu_seqlens, made, num_rows=num_rows, num_heads=num_heads, tile_rows=192, at_once=at_once)
    (count, *_), *items = made.tolist()
    assert [tuple(item) for item in items[:count]] == items_ref(cu_seqlens.tolist(), num_heads, 192, at_once)
    assert_covers_every_row_once(items[:count], lengths, num_heads)
    uncut = sum(-(-length // 192) for length in lengths) * num_heads
    assert -(-count // at_once) == -(-uncut // at_once)


@pytest.mark.parametrize("at_once", [1, 7])
def test_offsets_that_no_host_saw_stay_inside(device, at_once):
    """On a GPU nobody reads the offsets: whatever they hold, items lie in the rows and in the list."""
    from ernie_vit.kernels.triton.work_list import launch_work_list

    num_rows, num_heads, tile_rows = 100, 2, 128
    cu_seqlens = torch.tensor([-50, 500, 100, 900, 20], dtype=torch.int32, device=device)
    shape = work_list_shape(num_rows, 4, num_heads, tile_rows, at_once)
    memory = torch.full((shape[0] + 8, 5), -7, dtype=torch.int32, device=device)
    launch_work_list(
        cu_seqlens, memory[: shape[0]], num_rows=num_rows, num_heads=num_heads, tile_rows=tile_rows, at_once=at_once
    )
    (count, *_), *items = memory.tolist()
    assert 0 < count < shape[0]
    for row, row_end, first, end, head in items[:count]:
        assert 0 <= first <= row < num_rows
        assert first < row_end <= end <= num_rows
        assert 0 <= head < num_heads
    assert memory[shape[0] :].eq(-7).all()


SIZES = {"num_rows": 512, "max_seqlen": 256, "num_heads": 2, "head_dim": 80, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_seqlen": torch.tensor(256)}, TypeError, "max_seqlen: expected an int, got Tensor"),
        ({"head_dim": 84}, ValueError, "head_dim: expected a multiple of 8 from 16 to 128, got 84"),
        ({"dtype": torch.float64}, TypeError, "dtype"),
        ({"cu_seqlens": torch.tensor([0, 256])}, TypeError, "cu_seqlens: expected torch.int32, got torch.int64"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "cu_seqlens: expected shape"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, "cu_seqlens: expected at least 1 value"),
    ],
    ids=["max_seqlen as a tensor", "head_dim", "dtype", "long offsets", "two dimensions", "no offsets"],
)
def test_refusals(change, error, message):
    arguments = {"cu_seqlens": torch.tensor([0, 256], dtype=torch.int32), **SIZES, **change}
    with pytest.raises(error, match=message):
        attention_work_list(**arguments)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("offsets_", "message"),
    [
        ([256, 64], "start at 0 and do not decrease, got .256, 64."),
        ([0, 256, 64], "do not decrease"),
        ([0, 200, 600], "up to the 512 rows"),
        ([0, 300], "at least the longest sequence's 300 rows, got 256"),
    ],
    ids=["lengths", "decreasing", "past the rows", "longer than max_seqlen"],
)
def test_offsets_on_the_host_are_checked(offsets_, message):
    with pytest.raises(ValueError, match=message):
        attention_work_list(torch.tensor(offsets_, dtype=torch.int32), **SIZES)
    with pytest.raises(ValueError, match=message):
        attention_work_list_ref(torch.tensor(offsets_, dtype=torch.int32), **SIZES)


def test_op(device):
    cu_seqlens = offsets([65, 65], device)  # as many items as the list holds: no undefined rows to compare
    torch.library.opcheck(torch.ops.ernie_vit.attention_work_list.default, (cu_seqlens, 130, 65, 2, 80, torch.bfloat16))
