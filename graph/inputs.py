"""The static inputs of a graph: who captures and who replays meet in them.

They are views of two plain buffers, so that whoever owns the buffers can drive a capture of their own: allocate, run
the tower on ``pixel_values`` and ``metadata`` while capturing, then ``fill`` and replay.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ernie_vit.graph.call import plan_frames
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.staging import StagingRing
from ernie_vit.model.metadata import EncoderMetadata, EncoderPlan, Grid, item_sizes, packed_size, unpack_metadata


@dataclass(frozen=True)
class GraphInputs:
    """What a graph of one capacity reads.

    Attributes:
        capacity: rows and sequences.
        pixel_values: ``[rows, patch_width]`` at the weights' dtype; rows past the live ones may hold anything.
        packed: int32, the plan.
        metadata: views of ``packed`` for tower and resampler: counts and offsets are data, shapes the capacity's.
    """

    capacity: Capacity
    pixel_values: Tensor
    packed: Tensor
    metadata: EncoderMetadata

    @staticmethod
    def packed_size(capacity: Capacity) -> int:
        """int32 elements of ``packed``: room for every plan that fits, its tokens' rows included."""
        return packed_size(capacity.sequences, capacity.rows // 4)

    @classmethod
    def of(cls, capacity: Capacity, pixel_values: Tensor, packed: Tensor) -> "GraphInputs":
        """Views of buffers that may be longer: graphs that replay one after the other can share them."""
        packed = packed[: cls.packed_size(capacity)]
        metadata = unpack_metadata(packed, plan_frames((), capacity))
        return cls(capacity, pixel_values[: capacity.rows], packed, metadata)

    def plan(self, grid_thw: Grid) -> EncoderPlan:
        """The host's plan of a call that this graph holds.

        Raises:
            ValueError: a size cannot be encoded, or there are more frames or rows than the capacity's.
        """
        plan = plan_frames(item_sizes(grid_thw), self.capacity)
        if plan.num_patches > self.capacity.rows:
            raise ValueError(f"grid_thw: expected at most {self.capacity.rows} patches, got {plan.num_patches}")
        return plan

    def clear(self) -> None:
        """No live rows: a forward pass then computes nothing."""
        self.packed.zero_()

    def fill(self, pixel_values: Tensor, plan: EncoderPlan, staging: StagingRing) -> None:
        """Write a call's plan and rows on the current stream, without waiting for the device."""
        staging.copy(plan.packed, self.packed)
        self.pixel_values[: plan.num_patches].copy_(pixel_values, non_blocking=True)

    def temporal_rows(self, plan: EncoderPlan) -> Tensor:
        """The tokens' merge windows of the plan filled in last, for a resampler behind the graph."""
        return self.metadata.temporal_rows[: plan.num_tokens]


def allocate_inputs(
    capacities: tuple[Capacity, ...], patch_width: int, dtype: torch.dtype, device: torch.device
) -> dict[Capacity, GraphInputs]:
    """Inputs of several graphs that replay one after the other, in shared buffers."""
    rows = max(capacity.rows for capacity in capacities)
    size = max(GraphInputs.packed_size(capacity) for capacity in capacities)
    pixel_values = torch.zeros(rows, patch_width, dtype=dtype, device=device)
    packed = torch.zeros(size, dtype=torch.int32, device=device)
    return {capacity: GraphInputs.of(capacity, pixel_values, packed) for capacity in capacities}
