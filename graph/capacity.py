"""How large the captured graphs are.

The kernels read the live counts from device memory, so a capacity costs buffers, not time: a few, at the row counts
where the kernels' tiles change, serve every call below the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import packed_size

# The image processor's bounds of an image's area are 56 * 56 and 6177 * 28 * 28 pixels: 4 and 6,177 tokens.
LARGEST_IMAGE_TOKENS = 6177
# Sequences (frames) of a capacity by default: one for each 64 tokens of an image of 224x224 pixels, but at least 8.
ROWS_PER_SEQUENCE = 256
MIN_SEQUENCES = 8


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
    """A capacity for each row regime below ``4 * max_tokens`` rows, and one of that size.

    Args:
        regimes: row counts up to which the kernels keep one tile choice, ascending.
        max_tokens: image tokens (four rows each) of the largest graph; default: the largest image there is.
        max_sequences: sequences of each capacity; default: as many as images of 224 pixels would fill.

    Raises:
        ValueError: a limit is below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    largest = 4 * (max_tokens or LARGEST_IMAGE_TOKENS)
    rows = [*(regime for regime in regimes if regime < largest), largest]
    return tuple(Capacity(n, max_sequences or max(MIN_SEQUENCES, n // ROWS_PER_SEQUENCE)) for n in rows)


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
                f"capacities: expected 1 to {capacity.rows // 4} sequences (a frame has at least 4 rows), got {capacity}"
            )
    if any(a >= b for a, b in zip(checked, checked[1:], strict=False)):
        raise ValueError(f"capacities: expected an ascending list without repeats, got {list(checked)}")
    return checked


def graph_bytes(capacities: Sequence[Capacity], config: ErnieVisionConfig, dtype: torch.dtype) -> int:
    """Device memory that capturing takes: static buffers, the shared pool's peak, each graph's output.

    The pool peaks in a block's MLP, which holds the residual stream, its normed copy, fc1's output and fc2's; smaller
    graphs fit into the largest one's pool but for their outputs.
    """
    largest = max(capacity.rows for capacity in capacities)
    width, item = config.hidden_size, dtype.itemsize
    inputs = largest * config.patch_width * item + 4 * max(packed_size(c.sequences, c.rows // 4) for c in capacities)
    scratch = largest * (3 * width + config.intermediate_size) * item + largest * 4 * config.head_dim
    outputs = sum(capacity.rows for capacity in capacities) * width * item
    return inputs + scratch + outputs
