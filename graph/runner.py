"""Replays the tower from captured graphs, whatever the call holds.

A call is a plan in numpy, a pinned copy of it, a copy of the pixel rows and a launch, for each graph that it takes; the
resampler follows eagerly on the live rows. Nothing is read back from the device.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.packing import Chunk, pack_frames
from ernie_vit.graph.recording import Recorder, Recording
from ernie_vit.graph.staging import StagingRing
from ernie_vit.graph.stats import GraphStats
from ernie_vit.model.metadata import (
    EncoderMetadata,
    EncoderPlan,
    Grid,
    packed_size,
    plan_sequences,
    read_grid,
    unpack_metadata,
)
from ernie_vit.model.operators import Operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Slot:
    """A capacity's views of the shared input buffers, and the metadata that its graph reads there."""

    pixel_values: Tensor
    packed: Tensor
    metadata: EncoderMetadata


class GraphRunner:
    """The captured tower of one encoder.

    Args:
        tower: replayed; its weights must stay where they are, in-place changes take effect.
        resampler: runs eagerly behind it.
        ops: what is captured, and what computes the frames that no graph holds.
        capacities: ascending.
        record: how a forward pass is recorded.
        lazy: record a capacity when a call first needs it, not now.
        progress: wraps the capacities while they are recorded, as ``tqdm`` does.
    """

    def __init__(
        self,
        tower: VisionTower,
        resampler: Resampler,
        ops: Operators,
        capacities: Sequence[Capacity],
        *,
        record: Recorder,
        lazy: bool = False,
        progress: Callable[[Iterable[Capacity]], Iterable[Capacity]] = iter,
    ) -> None:
        self._tower, self._resampler, self._ops, self._record = tower, resampler, ops, record
        self.capacities = tuple(capacities)
        self.stats = GraphStats()
        weight = tower.patch_embed.proj.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._parameters = [(m._parameters, name) for m in tower.modules() for name in m._parameters]
        self._addresses = self._weight_addresses()

        with torch.inference_mode(False):  # else calls outside of inference mode could not write to the buffers
            self._allocate(weight)
        self._recordings: dict[Capacity, Recording] = {}
        self._lock = threading.Lock()
        self._last_use = torch.cuda.Event() if self._device.type == "cuda" else None
        try:
            for capacity in progress([] if lazy else sorted(self.capacities, reverse=True)):
                self._recording(capacity)
        except BaseException:
            self.release()
            raise
        self._mark_use()

    def obstacle(self, pixel_values: Tensor) -> str | None:
        """Why a call cannot be replayed now, or None. Drops the graphs if the weights have moved."""
        if not self._slots:
            return "graphs released"
        if self._tower.training:
            return "training mode"
        if torch.is_autocast_enabled(self._device.type):
            return "autocast"
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "inside another capture"
        if torch.is_grad_enabled() and (
            pixel_values.requires_grad or any(parameters[name].requires_grad for parameters, name in self._parameters)
        ):
            return "gradient needed"
        if self._weight_addresses() != self._addresses:
            logger.warning(
                "ernie-vit: the tower's weights have moved; its graphs are dropped, capture() makes new ones"
            )
            with self._lock:
                self.release()
            return "weights moved"
        return None

    def __call__(self, pixel_values: Tensor, grid_thw: Grid) -> Tensor:
        """Tokens ``[tokens, text_hidden_size]`` of a call without obstacle; arguments as the encoder's."""
        grid = read_grid(grid_thw)
        frames = np.repeat(grid, grid[:, 0], axis=0)
        chunks = pack_frames((frames[:, 1] * frames[:, 2]).tolist(), self.capacities)
        with self._lock, torch.no_grad():
            if self._last_use is not None:
                torch.cuda.current_stream(self._device).wait_event(self._last_use)
            if len(chunks) == 1 and chunks[0].capacity is not None:
                hidden_states, temporal_rows = self._replay_all(pixel_values, grid, chunks[0].capacity)
            else:
                hidden_states, temporal_rows = self._run_chunks(pixel_values, grid, frames, chunks)
            tokens: Tensor = self._resampler(hidden_states, temporal_rows)
            self._mark_use()
            self._count(chunks)
        return tokens

    def release(self) -> None:
        """Give the graphs' and buffers' memory back."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._slots.clear()
        del self._pixel_values, self._packed
        self.stats.memory_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _replay_all(self, pixel_values: Tensor, grid: Grid, capacity: Capacity) -> tuple[Tensor, Tensor]:
        """The whole call in one graph: its tokens' rows travel with the plan, its hidden rows stay where they are."""
        plan = plan_sequences(grid, max_sequences=capacity.sequences, max_seqlen_override=capacity.rows)
        hidden_states = self._replay(pixel_values, plan, capacity)
        metadata = unpack_metadata(self._slots[capacity].packed, plan)
        return hidden_states, metadata.temporal_rows

    def _run_chunks(
        self, pixel_values: Tensor, grid: Grid, frames: "np.ndarray", chunks: list[Chunk]
    ) -> tuple[Tensor, Tensor]:
        """Several graphs, or frames that no graph holds: the hidden rows are gathered."""
        width = self._tower.config.hidden_size
        hidden_states = pixel_values.new_empty(pixel_values.shape[0], width, dtype=self._dtype)
        frames[:, 0] = 1
        start = 0
        for chunk in chunks:
            rows = slice(start, start + chunk.rows)
            start += chunk.rows
            chunk_frames = frames[chunk.first : chunk.end]
            if chunk.capacity is None:
                metadata = self._to_device(plan_sequences(chunk_frames))
                hidden_states[rows] = self._tower(pixel_values[rows], metadata, self._ops)
            else:
                plan = plan_sequences(
                    chunk_frames, max_sequences=chunk.capacity.sequences, max_seqlen_override=chunk.capacity.rows
                )
                hidden_states[rows] = self._replay(pixel_values[rows], plan, chunk.capacity)
        return hidden_states, self._to_device(plan_sequences(grid)).temporal_rows

    def _replay(self, pixel_values: Tensor, plan: EncoderPlan, capacity: Capacity) -> Tensor:
        """The live hidden rows, a view of the graph's output that the next replay overwrites."""
        slot = self._slots[capacity]
        recording = self._recording(capacity)
        self._staging.copy(plan.packed, slot.packed)
        slot.pixel_values[: plan.num_patches].copy_(pixel_values, non_blocking=True)
        recording.replay()
        return recording.output[: plan.num_patches]

    def _allocate(self, weight: Tensor) -> None:
        """The input buffers, shared by all graphs: replays follow one another."""
        self._pixel_values = weight.new_zeros(max(c.rows for c in self.capacities), weight.shape[1])
        size = max(packed_size(c.sequences, c.rows // 4) for c in self.capacities)
        self._packed = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._slots = {capacity: self._slot(capacity) for capacity in self.capacities}
        self._staging = StagingRing(size, self._device)

    def _recording(self, capacity: Capacity) -> Recording:
        if capacity not in self._recordings:
            slot = self._slots[capacity]
            slot.packed.zero_()  # no live rows: recording computes nothing
            with torch.inference_mode(False), torch.no_grad():
                self._recordings[capacity] = self._record(
                    lambda: self._tower(slot.pixel_values, slot.metadata, self._ops)
                )
        return self._recordings[capacity]

    def _slot(self, capacity: Capacity) -> _Slot:
        plan = plan_sequences([], max_sequences=capacity.sequences, max_seqlen_override=capacity.rows)
        packed = self._packed[: packed_size(capacity.sequences, capacity.rows // 4)]
        return _Slot(self._pixel_values[: capacity.rows], packed, unpack_metadata(packed, plan))

    def _to_device(self, plan: EncoderPlan) -> EncoderMetadata:
        return unpack_metadata(torch.from_numpy(plan.packed).to(self._device, non_blocking=True), plan)

    def _weight_addresses(self) -> list[object]:
        addresses: list[object] = [parameters[name].data_ptr() for parameters, name in self._parameters]
        # memory that went away and came back may hold another dtype
        return [*addresses, self._tower.patch_embed.proj.weight.dtype]

    def _mark_use(self) -> None:
        """The buffers are in use up to here on this stream; the next call, on whatever stream, waits for it there."""
        if self._last_use is not None:
            self._last_use.record(torch.cuda.current_stream(self._device))

    def _count(self, chunks: list[Chunk]) -> None:
        replayed = [chunk for chunk in chunks if chunk.capacity is not None]
        self.stats.replays += len(replayed)
        self.stats.live_rows += sum(chunk.rows for chunk in replayed)
        self.stats.captured_rows += sum(chunk.capacity.rows for chunk in replayed if chunk.capacity is not None)
        if len(replayed) == len(chunks):
            self.stats.hits += 1
        else:
            self.stats.count_fallback("frame larger than every graph")
