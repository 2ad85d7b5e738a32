"""Where each row belongs: sequences, their sizes, and the rows that make a token.

Computed once a call, outside of the forward pass, in numpy; one copy takes it to the device. Eager calls, capture and
replay share it.

An item is an image, ``t = 1``, or a video of an even number of frames. A frame of ``h x w`` patches is one attention
sequence of ``h * w`` rows. Its rows come merge window by merge window: 2x2 windows row-major, row-major inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Grid = Tensor | npt.NDArray[np.integer] | Sequence[Sequence[int]]
Sizes = tuple[tuple[int, int, int], ...]
Ints = npt.NDArray[np.int32]

# Parts of the packed plan start at multiples of 16 bytes, so that every kernel sees the same alignment.
_ALIGN = 4


@dataclass(frozen=True)
class EncoderPlan:
    """The metadata on the host: one int32 array to copy, and the numbers that the host itself needs.

    Attributes:
        packed: int32, one part behind the other, each aligned: the live counts ``[4]`` (patches and the resampler's),
            ``cu_seqlens [max_sequences + 1]``, ``frame_sizes [max_sequences, 2]``, ``temporal_rows [num_tokens, 2]``.
        max_sequences: the static number of sequences; those past the call's frames are empty.
        max_seqlen: upper bound of a sequence's rows.
        num_frames: the call's sequences.
        num_patches: the call's rows.
        num_tokens: the call's tokens.
        grid_thw: the items' checked sizes.
    """

    packed: Ints
    max_sequences: int
    max_seqlen: int
    num_frames: int
    num_patches: int
    num_tokens: int
    grid_thw: Sizes

    def without_tokens(self) -> "EncoderPlan":
        """The same rows, of which no token is made: for a resampler that reads these counts nothing is live."""
        packed = self.packed[: packed_size(self.max_sequences, 0)].copy()
        packed[1:_ALIGN] = 0
        return replace(self, packed=packed, num_tokens=0)


@dataclass(frozen=True)
class EncoderMetadata:
    """What the tower and the resampler need to know about the rows, on their device.

    Attributes:
        num_rows: int32 ``[1]``, the live rows, for the kernels.
        cu_seqlens: int32 ``[max_sequences + 1]``, the sequences' offsets, padded by repeating the last value.
        frame_sizes: int32 ``[max_sequences, 2]``, height and width of each sequence in patches, zero in the padding.
        temporal_rows: int32 ``[num_tokens, 2]``, for each token the merge windows of its even and its odd frame
            (an image's one frame twice).
        live_counts: int32 ``[3]``, the live merge windows, twice the live tokens, and the live tokens, for the
            resampler's kernels.
        max_seqlen: upper bound of a sequence's rows, on the host. It may size a launch, never decide a result.
        cu_seqlens_host: the same offsets on the CPU without padding, for PyTorch's attention.
        grid_thw: frames, height and width of each image or video, in the order of the call.
    """

    num_rows: Tensor
    cu_seqlens: Tensor
    frame_sizes: Tensor
    temporal_rows: Tensor
    live_counts: Tensor
    max_seqlen: int
    cu_seqlens_host: Tensor
    grid_thw: Sizes

    @property
    def num_patches(self) -> int:
        """Live rows, on the host."""
        return int(self.cu_seqlens_host[-1])

    @property
    def num_tokens(self) -> int:
        return self.temporal_rows.shape[0]


def item_sizes(grid_thw: Grid) -> Sizes:
    """Check the items' sizes: frames, height and width in patches of each image or video, as plain integers.

    A tensor on a GPU is read back, which waits for that GPU; keep grids on the host.

    Raises:
        TypeError: the sizes are not integers.
        ValueError: the shape is another, a size is not positive, a height or width is odd, or a video has an odd number
            of frames above one (a token takes two frames; nothing is dropped without a word).
    """
    rows = grid_thw.tolist() if isinstance(grid_thw, (Tensor, np.ndarray)) else grid_thw
    if torch.compiler.is_compiling():
        # sizes decide what is traced: len(range()) makes a symbolic integer a constant, with a guard
        rows = [[len(range(size)) for size in row] for row in rows]
    return tuple(_item_size(item, row) for item, row in enumerate(rows))


def tokens_per_item(sizes: Sizes) -> list[int]:
    """Tokens of each image or video: a quarter of an image's patches, an eighth of a video's."""
    return [max(frames // 2, 1) * height * width // 4 for frames, height, width in sizes]


def plan_sequences(
    sizes: Sizes, *, max_sequences: int | None = None, max_seqlen_override: int | None = None
) -> EncoderPlan:
    """The host's part of :func:`prepare_encoder_metadata`, of sizes that :func:`item_sizes` has checked."""
    for name, bound in (("max_sequences", max_sequences), ("max_seqlen_override", max_seqlen_override)):
        if bound is not None and not isinstance(bound, int):  # a tensor would make every launch wait for the device
            raise TypeError(f"{name}: expected an int, got {type(bound).__name__}")
    grid = np.array(sizes, np.int64).reshape(-1, 3)
    frames, height, width = grid.T
    tokens_per_frame = height * width // 4
    lengths = np.repeat(4 * tokens_per_frame, frames)  # a frame is a sequence
    num_patches, longest = int(lengths.sum()), int(lengths.max(initial=0))
    if num_patches >= 2**31:
        raise ValueError(f"grid_thw: expected fewer than 2**31 patches in a call, got {num_patches}")
    if max_sequences is None:
        max_sequences = len(lengths)
    elif max_sequences < len(lengths):
        raise ValueError(f"max_sequences: expected at least the {len(lengths)} frames of grid_thw, got {max_sequences}")
    if max_seqlen_override is None:
        max_seqlen_override = longest
    elif max_seqlen_override < longest:
        raise ValueError(
            f"max_seqlen_override: expected at least the longest sequence, {longest} rows, got {max_seqlen_override}"
        )

    num_tokens = sum(tokens_per_item(sizes))
    offsets = _packed_offsets(max_sequences, num_tokens)
    packed = np.zeros(offsets.end, np.int32)
    packed[:_ALIGN] = num_patches, num_patches // 4, 2 * num_tokens, num_tokens
    cu_seqlens = packed[offsets.cu_seqlens : offsets.cu_seqlens + max_sequences + 1]
    np.cumsum(lengths, out=cu_seqlens[1 : len(lengths) + 1])
    cu_seqlens[len(lengths) + 1 :] = num_patches
    frame_sizes = packed[offsets.frame_sizes : offsets.frame_sizes + 2 * len(lengths)]
    frame_sizes.reshape(-1, 2)[:] = np.repeat(grid[:, 1:], frames, axis=0)
    _fill_temporal_rows(packed[offsets.temporal_rows :].reshape(num_tokens, 2), frames, tokens_per_frame)
    return EncoderPlan(
        packed=packed,
        max_sequences=max_sequences,
        max_seqlen=max_seqlen_override,
        num_frames=len(lengths),
        num_patches=num_patches,
        num_tokens=num_tokens,
        grid_thw=sizes,
    )


@dataclass(frozen=True)
class _PackedOffsets:
    """Where the parts of a packed plan start, in int32 elements; ``end`` is its size."""

    cu_seqlens: int
    frame_sizes: int
    temporal_rows: int
    end: int


def _packed_offsets(max_sequences: int, num_tokens: int) -> _PackedOffsets:
    cu_seqlens = _ALIGN  # four counts stand in front
    frame_sizes = cu_seqlens + _round_up(max_sequences + 1)
    temporal_rows = frame_sizes + _round_up(2 * max_sequences)
    return _PackedOffsets(cu_seqlens, frame_sizes, temporal_rows, temporal_rows + 2 * num_tokens)


def packed_size(max_sequences: int, num_tokens: int) -> int:
    """int32 elements of a plan of this size, or of the static buffer that holds every smaller one."""
    return _packed_offsets(max_sequences, num_tokens).end


def unpack_metadata(packed: Tensor, plan: EncoderPlan) -> EncoderMetadata:
    """The metadata as views of ``packed``: a device copy of ``plan.packed``, or a buffer with room for more tokens."""
    offsets = _packed_offsets(plan.max_sequences, plan.num_tokens)
    host = torch.from_numpy(plan.packed)
    return EncoderMetadata(
        num_rows=packed[:1],
        cu_seqlens=packed[offsets.cu_seqlens : offsets.cu_seqlens + plan.max_sequences + 1],
        frame_sizes=packed[offsets.frame_sizes : offsets.frame_sizes + 2 * plan.max_sequences].view(-1, 2),
        temporal_rows=packed[offsets.temporal_rows :].view(-1, 2),
        live_counts=packed[1:_ALIGN],
        max_seqlen=plan.max_seqlen,
        cu_seqlens_host=host[offsets.cu_seqlens : offsets.cu_seqlens + plan.num_frames + 1],
        grid_thw=plan.grid_thw,
    )


@torch.compiler.assume_constant_result  # torch.compile runs it while it traces
def prepare_encoder_metadata(
    grid_thw: Grid,
    *,
    max_sequences: int | None = None,
    max_seqlen_override: int | None = None,
    device: torch.device | str | None = None,
) -> EncoderMetadata:
    """Everything that the forward pass needs to know about the rows of a call.

    Args:
        grid_thw: ``[items, 3]`` integers: frames, height and width in patches of each image or video. A list, a numpy
            array or a tensor.
        max_sequences: static number of sequences (frames) to pad to; default: no padding.
        max_seqlen_override: upper bound of a sequence's rows, for launches; default: the longest sequence.
        device: where the tensors go; default: the CPU.

    Raises:
        TypeError: ``grid_thw`` holds no integers, or a bound is no int.
        ValueError: a size cannot be encoded (see :func:`item_sizes`), there are more frames than ``max_sequences``, or
            ``max_seqlen_override`` is below the longest sequence.
    """
    sizes = item_sizes(grid_thw)
    plan = plan_sequences(sizes, max_sequences=max_sequences, max_seqlen_override=max_seqlen_override)
    packed = torch.from_numpy(plan.packed).to(device or "cpu", non_blocking=True)
    return unpack_metadata(packed, plan)


def _fill_temporal_rows(
    temporal_rows: Ints, frames: npt.NDArray[np.int64], tokens_per_frame: npt.NDArray[np.int64]
) -> None:
    """Number the merge windows that make each token: those of an even frame, and of the odd one after it.

    An image is its own even and odd frame.
    """
    pairs = np.maximum(frames // 2, 1)  # frame pairs of each item
    tokens = np.repeat(tokens_per_frame, pairs)  # of each pair: as many as its even frame has windows
    odd_windows = np.repeat(tokens_per_frame * (frames > 1), pairs)
    skipped = np.cumsum(odd_windows) - odd_windows  # windows of the odd frames before each pair
    even, odd = temporal_rows.T
    even[:] = np.arange(len(temporal_rows)) + np.repeat(skipped, tokens)
    odd[:] = even + np.repeat(odd_windows, tokens)


def _item_size(item: int, row: Sequence[int]) -> tuple[int, int, int]:
    if not isinstance(row, (Sequence, np.ndarray, Tensor)) or len(row) != 3:
        raise ValueError(f"grid_thw: expected shape [items, 3] of frames, height, width, got {row} for item {item}")
    for size in row:
        if type(size) is not int and not isinstance(size, np.integer):  # a bool is an int too
            raise TypeError(f"grid_thw: expected integers, got {row} for item {item}")
    frames, height, width = map(int, row)
    if frames < 1 or height < 1 or width < 1:
        expected = "positive sizes"
    elif height % 2 or width % 2:
        expected = "an even height and width (a token takes 2x2 patches)"
    elif frames > 1 and frames % 2:
        expected = "one frame or an even number of them (a token takes two)"
    else:
        return frames, height, width
    raise ValueError(f"grid_thw: expected {expected}, got {[frames, height, width]} for item {item}")


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
