"""Sequences, their padding, and the rows that make a token, against what loops over the items say."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ernie_vit import EncoderMetadata, prepare_encoder_metadata
from ernie_vit.kernels.attention import attention_ref
from ernie_vit.model.metadata import tokens_per_item

sides = st.integers(1, 5).map(lambda half: 2 * half)
frames = st.sampled_from([1, 2, 4, 6])
grids = st.lists(st.tuples(frames, sides, sides).map(list), max_size=6)

MIXED = [[1, 4, 6], [2, 2, 4], [1, 2, 2]]


def frame_pairs(grid: list[int]) -> list[tuple[int, int]]:
    """The even and the odd frame of each pair; an image is both."""
    return [(0, 0)] if grid[0] == 1 else [(frame, frame + 1) for frame in range(0, grid[0], 2)]


@given(grids=grids, more_sequences=st.integers(0, 5), more_rows=st.integers(0, 99))
def test_against_loops(grids: list[list[int]], more_sequences: int, more_rows: int) -> None:
    lengths = [h * w for t, h, w in grids for _ in range(t)]
    longest = max(lengths, default=0)
    metadata = prepare_encoder_metadata(
        grids, max_sequences=len(lengths) + more_sequences, max_seqlen_override=longest + more_rows
    )

    offsets = [0, *np.cumsum(lengths, dtype=int).tolist()]
    assert metadata.num_rows.tolist() == [sum(lengths)]
    assert metadata.num_patches == sum(lengths)
    assert metadata.cu_seqlens.tolist() == offsets + offsets[-1:] * more_sequences
    assert metadata.cu_seqlens_host.tolist() == offsets
    assert metadata.max_seqlen == longest + more_rows
    sizes = [[h, w] for t, h, w in grids for _ in range(t)]
    assert metadata.frame_sizes.tolist() == sizes + [[0, 0]] * more_sequences

    even_windows, odd_windows, item_start = [], [], 0
    for t, h, w in grids:
        windows = h * w // 4
        for even, odd in frame_pairs([t, h, w]):
            even_windows += range(item_start + even * windows, item_start + (even + 1) * windows)
            odd_windows += range(item_start + odd * windows, item_start + (odd + 1) * windows)
        item_start += t * windows
    assert metadata.temporal_rows.tolist() == list(map(list, zip(even_windows, odd_windows, strict=True)))
    tokens = len(even_windows)
    assert metadata.live_counts.tolist() == [sum(lengths) // 4, 2 * tokens, tokens]
    assert metadata.num_tokens == tokens
    assert tokens_per_item(metadata.grid_thw) == [len(frame_pairs(grid)) * grid[1] * grid[2] // 4 for grid in grids]


def test_an_offset_array_pads_by_repeating_its_last_value() -> None:
    metadata = prepare_encoder_metadata([[1, 2, 4], [2, 2, 2]], max_sequences=6)
    assert metadata.cu_seqlens.tolist() == [0, 8, 12, 16, 16, 16, 16]
    assert metadata.cu_seqlens.dtype == torch.int32


def test_parts_are_aligned_for_any_number_of_sequences() -> None:
    """A kernel sees one alignment, 16 bytes, whatever the call: another would compile again."""
    for sequences in range(4, 12):
        metadata = prepare_encoder_metadata(MIXED, max_sequences=sequences)
        base = metadata.num_rows.data_ptr()
        for part in (metadata.cu_seqlens, metadata.frame_sizes, metadata.temporal_rows):
            assert (part.data_ptr() - base) % 16 == 0
            assert part.is_contiguous()


@pytest.mark.parametrize(
    "form",
    [
        lambda grids: tuple(map(tuple, grids)),
        lambda grids: np.array(grids, np.int64),
        lambda grids: np.array(grids, np.int32),
        lambda grids: torch.tensor(grids),
        lambda grids: torch.tensor(grids, dtype=torch.int32),
    ],
    ids=["tuples", "numpy int64", "numpy int32", "tensor int64", "tensor int32"],
)
def test_forms_of_a_grid(form: Any) -> None:
    assert_same(prepare_encoder_metadata(form(MIXED)), prepare_encoder_metadata(MIXED))


@pytest.mark.parametrize("empty", [[], np.zeros((0, 3), int), torch.zeros(0, 3, dtype=torch.int64)], ids=str)
def test_no_items(empty: Any) -> None:
    metadata = prepare_encoder_metadata(empty, max_sequences=2)
    assert metadata.cu_seqlens.tolist() == [0, 0, 0]
    assert metadata.cu_seqlens_host.tolist() == [0]
    assert metadata.temporal_rows.shape == (0, 2)
    assert metadata.max_seqlen == 0
    assert tokens_per_item(metadata.grid_thw) == []


def assert_same(one: EncoderMetadata, other: EncoderMetadata) -> None:
    for name in EncoderMetadata.__dataclass_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype, name
            assert left.tolist() == right.tolist(), name
        else:
            assert left == right, name


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([1, 3, 4], r"even height and width.*got \[1, 3, 4\] for item 1"),
        ([1, 4, 5], r"even height and width.*got \[1, 4, 5\] for item 1"),
        ([3, 4, 4], r"one frame or an even number.*got \[3, 4, 4\] for item 1"),
        ([0, 4, 4], r"positive sizes, got \[0, 4, 4\] for item 1"),
        ([1, 0, 4], "positive sizes"),
        ([1, -2, -2], "positive sizes"),
    ],
)
def test_sizes_that_cannot_be_encoded(grid: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_encoder_metadata([[1, 4, 4], grid])


@pytest.mark.parametrize("wrong", [[256, 64], [0, 256, 320], [[4, 4]], [[1, 4, 4, 4]], [[[1, 4, 4]]]], ids=str)
def test_lengths_or_offsets_are_no_grid(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected shape \[items, 3\]"):
        prepare_encoder_metadata(wrong)


@pytest.mark.parametrize("wrong", [[[1.0, 4.0, 4.0]], torch.ones(1, 3), [[True, True, True]]], ids=str)
def test_sizes_that_are_no_integers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected integers"):
        prepare_encoder_metadata(wrong)


def test_bounds_below_the_call() -> None:
    with pytest.raises(ValueError, match=r"max_seqlen_override: expected at least .* 24 rows, got 23"):
        prepare_encoder_metadata(MIXED, max_seqlen_override=23)
    with pytest.raises(ValueError, match=r"max_sequences: expected at least the 4 frames .* got 3"):
        prepare_encoder_metadata(MIXED, max_sequences=3)
    prepare_encoder_metadata(MIXED, max_seqlen_override=24, max_sequences=4)
    for name in ("max_seqlen_override", "max_sequences"):
        with pytest.raises(TypeError, match=f"{name}: expected an int, got Tensor"):
            prepare_encoder_metadata(MIXED, **{name: torch.tensor(24)})


def test_more_rows_than_int32_counts() -> None:
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 patches"):
        prepare_encoder_metadata([[2, 32768, 32768]])


@pytest.mark.parametrize("wrong", [[256, 64], [0, 256, 64], [0, 64, 400]], ids=str)
def test_attention_refuses_what_is_no_offsets(wrong: list[int]) -> None:
    """Lengths in the place of offsets are right for one image by luck and wrong for two."""
    q = torch.zeros(320, 1, 16)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        attention_ref(q, q, q, torch.tensor(wrong, dtype=torch.int32), 320)
