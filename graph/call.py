"""The host's plan of a whole call: which graphs replay which frames, and what each of them is told."""

from dataclasses import dataclass
from functools import lru_cache

from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.packing import Chunk, pack_frames
from ernie_vit.model.metadata import EncoderPlan, Sizes, plan_sequences


@dataclass(frozen=True)
class CallPlan:
    """Attributes:
    chunks: the call's frames, cut; none without frames.
    plans: for each chunk, what its graph or the eager tower is told. A cut call's tokens are nobody's business there.
    whole: the call in one piece, for the tokens; the only chunk's own plan where a graph holds it all.
    """

    chunks: tuple[Chunk, ...]
    plans: tuple[EncoderPlan, ...]
    whole: EncoderPlan

    @property
    def capacity(self) -> Capacity | None:
        """The capacity that holds the whole call."""
        return self.chunks[0].capacity if len(self.chunks) == 1 else None


def plan_frames(frames: Sizes, capacity: Capacity | None) -> EncoderPlan:
    """A plan of the capacity's static size. One sequence may take all rows, so that is the bound of each."""
    if capacity is None:
        return plan_sequences(frames)
    return plan_sequences(frames, max_sequences=capacity.sequences, max_seqlen_override=capacity.rows)


@lru_cache(maxsize=256)  # sizes recur, and a plan takes longer than a launch
def plan_call(sizes: Sizes, capacities: tuple[Capacity, ...]) -> CallPlan:
    """Plan a call of checked sizes (``item_sizes``) for graphs of ascending capacities."""
    frames = tuple((1, height, width) for count, height, width in sizes for _ in range(count))
    chunks = tuple(pack_frames([height * width for _, height, width in frames], capacities))
    if len(chunks) == 1 and chunks[0].capacity is not None:
        whole = plan_frames(sizes, chunks[0].capacity)
        return CallPlan(chunks, (whole,), whole)
    plans = tuple(plan_frames(frames[chunk.first : chunk.end], chunk.capacity).without_tokens() for chunk in chunks)
    return CallPlan(chunks, plans, plan_sequences(sizes))
