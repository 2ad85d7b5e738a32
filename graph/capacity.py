"""How large the captured graphs are.

The kernels read the live counts from device memory, so rows that are not live cost buffers, not time. What a capacity
fixes is the shape of the tiles: a few capacities, at the row counts where it changes, serve every call below the
largest (H200: a tower of 1,296 rows takes as long at 1,536 as at exact size, and 1.4 times as long at 16,384).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import packed_size

# The image processor's bounds of an image's area are 56 * 56 and 6177 * 28 * 28 pixels: 4 and 6,177 tokens.
LARGEST_IMAGE_TOKENS = 6177
# Sequences (frames) of a capacity by default: one for each image of 224x224 pixels (16x16 patches) that its rows hold.
ROWS_PER_SEQUENCE = 256
MIN_SEQUENCES = 8
MIB = 1 << 20


@dataclass(frozen=True, order=True)
class Capacity:
    """What one graph holds.

    Attributes:
        rows: patches, a multiple of 4.
        sequences: frames. One may take all rows.
    """

    rows: int
    sequences: int

    def holds(self, rows: int, sequences: int) -> bool:
        return rows <= self.rows and sequences <= self.sequences


def default_capacities(
    regimes: Sequence[int], *, max_tokens: int | None = None, max_sequences: int | None = None
) -> tuple[Capacity, ...]:
    """A capacity for each row regime below ``4 * max_tokens`` rows, and one of that size; ascending, no two alike.

    Args:
        regimes: row counts up to which the kernels keep one tile choice, ascending.
        max_tokens: image tokens (four rows each) of the largest graph; default: the largest image there is.
        max_sequences: sequences of each capacity, as far as its rows allow; default: as many as images of 224 pixels
            would fill, but at least 8.

    Raises:
        ValueError: a limit is below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    largest = 4 * (max_tokens or LARGEST_IMAGE_TOKENS)
    return tuple(
        Capacity(rows, min(max_sequences or max(MIN_SEQUENCES, rows // ROWS_PER_SEQUENCE), rows // 4))
        for rows in (*(regime for regime in regimes if regime < largest), largest)
    )


def check_capacities(capacities: Sequence[Capacity | tuple[int, int]]) -> tuple[Capacity, ...]:
    """A user's list, ascending.

    Raises:
        ValueError: the list is empty, not ascending, holds one twice, or one that no call fits in; it is named.
    """
    checked = tuple(Capacity(*c) if isinstance(c, tuple) else c for c in capacities)
    if not checked:
        raise ValueError("capacities: expected at least one, got none")
    for capacity in checked:
        if capacity.rows < 4 or capacity.rows % 4:
            raise ValueError(f"capacities: expected a positive multiple of 4 rows (a token takes four), got {capacity}")
        if not 1 <= capacity.sequences <= capacity.rows // 4:
            raise ValueError(
                f"capacities: expected 1 to {capacity.rows // 4} sequences (a frame takes four rows or more), "
                f"got {capacity}"
            )
    if any(a >= b for a, b in pairwise(checked)):
        raise ValueError(f"capacities: expected an ascending list without repeats, got {list(checked)}")
    return checked


def graph_bytes(
    capacities: Sequence[Capacity], config: ErnieVisionConfig, dtype: torch.dtype, *, resampler: bool = False
) -> int:
    """Device memory that capturing takes: the static buffers, and one pool, in the segments that PyTorch allocates.

    A block of the largest graph holds at once its input, the attention's result, a normed copy and fc1's and fc2's
    output (or, before, a normed copy, the fused projection, the heads' result and the attention's result). The segments
    of the projection and of fc1's output cannot serve each other, so the pool has both. Smaller graphs find room in it,
    and so do the patch embedding's copies, before the first block, and a captured ``resampler``, which holds four times
    its input at most when the tower's blocks hold nothing; its tokens have a buffer of their own.
    """
    largest, item = max(capacity.rows for capacity in capacities), dtype.itemsize
    row = config.hidden_size * item
    of_a_row = [row, row, row, row, 3 * row, config.intermediate_size * item, 4 * config.head_dim]
    pool = max(_segments([capacity.rows * width for width in of_a_row]) for capacity in capacities)
    packed = max(4 * packed_size(capacity.sequences, capacity.rows // 4) for capacity in capacities)
    tokens = largest // 4 * config.text_hidden_size * item if resampler else 0
    return pool + _segments([largest * config.patch_width * item, packed, tokens])


def affordable_capacities(
    capacities: Sequence[Capacity], free: int, config: ErnieVisionConfig, dtype: torch.dtype, *, resampler: bool = False
) -> tuple[Capacity, ...]:
    """Those of an ascending list, from the smallest on, that leave half of ``free`` bytes free; at least one."""
    count = len(capacities)
    while count > 1 and 2 * graph_bytes(capacities[:count], config, dtype, resampler=resampler) > free:
        count -= 1
    return tuple(capacities[:count])


def _segments(tensors: Sequence[int]) -> int:
    """Bytes that PyTorch's caching allocator takes from the device for tensors that live together.

    Up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB; others get their own, in steps of 2 MiB.
    """
    small = sum(size for size in tensors if size <= MIB)
    middle = sum(size for size in tensors if MIB < size < 10 * MIB)
    large = [size for size in tensors if size >= 10 * MIB]
    return _round_up(small, 2 * MIB) + _round_up(middle, 20 * MIB) + sum(_round_up(size, 2 * MIB) for size in large)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
