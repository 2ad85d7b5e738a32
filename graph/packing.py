"""Which graph replays which frames of a call.

Attention never crosses frames, so a call may be cut between any two, a video too. Chunks are runs of frames in the
order of the call: the replays' rows, one after the other, are the call's rows, and nothing is reordered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ernie_vit.graph.capacity import Capacity


@dataclass(frozen=True)
class Chunk:
    """Frames ``first`` to ``end - 1`` of a call, ``rows`` together; ``capacity`` is None if no graph holds them."""

    first: int
    end: int
    rows: int
    capacity: Capacity | None


def pack_frames(lengths: Sequence[int], capacities: Sequence[Capacity]) -> list[Chunk]:
    """Cut a call into as few chunks as a run of frames allows, each with the smallest capacity that holds it.

    Args:
        lengths: rows of each frame, in the order of the call.
        capacities: what the graphs hold, ascending.

    Returns:
        Chunks that cover all frames, in order. A frame larger than every capacity is a chunk by itself, without one.
    """
    whole = _smallest(sum(lengths), len(lengths), capacities)
    if lengths and whole is not None:  # most calls: nothing to cut
        return [Chunk(0, len(lengths), sum(lengths), whole)]
    chunks: list[Chunk] = []
    first, rows = 0, 0
    for frame, length in enumerate(lengths):
        if frame > first and _smallest(rows + length, frame + 1 - first, capacities) is None:
            chunks.append(Chunk(first, frame, rows, _smallest(rows, frame - first, capacities)))
            first, rows = frame, 0
        rows += length
    if lengths:
        chunks.append(Chunk(first, len(lengths), rows, _smallest(rows, len(lengths) - first, capacities)))
    return chunks


def _smallest(rows: int, sequences: int, capacities: Sequence[Capacity]) -> Capacity | None:
    return next((capacity for capacity in capacities if capacity.holds(rows, sequences)), None)
