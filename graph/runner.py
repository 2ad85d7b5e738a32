"""Replays the tower from captured graphs, whatever the call holds.

A call is a plan in numpy, a pinned copy of it, a copy of the pixel rows and a launch, for each graph that it takes. The
resampler follows eagerly on the live rows, or is part of the graphs; then the tokens of a call that one graph holds are
copied out, and a cut call's frames are resampled together, eagerly by the same kernels. Nothing is read back from the
device.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ernie_vit.graph.call import CallPlan, plan_call
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.inputs import GraphInputs, allocate_inputs
from ernie_vit.graph.packing import Chunk
from ernie_vit.graph.recording import Recorder, Recording
from ernie_vit.graph.staging import StagingRing
from ernie_vit.graph.stats import GraphStats
from ernie_vit.graph.weights import WeightWatch
from ernie_vit.kernels.checks import FLOAT_DTYPES
from ernie_vit.model.metadata import EncoderMetadata, EncoderPlan, Grid, Sizes, item_sizes, unpack_metadata
from ernie_vit.model.operators import Operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower

logger = logging.getLogger(__name__)

WEIGHTS_MOVED = "weights moved"


class GraphRunner:
    """The captured tower of one encoder. Calls from several threads and streams follow one another.

    Args:
        tower: replayed; its weights must stay where they are, in-place changes take effect.
        resampler: runs behind it.
        ops: what is captured, and what computes the frames that no graph holds.
        capacities: ascending.
        record: how a forward pass is recorded.
        capture_resampler: whether the resampler is replayed too, as the tower; its operators must stop at live rows.
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
        capture_resampler: bool = False,
        lazy: bool = False,
        progress: Callable[[Iterable[Capacity]], Iterable[Capacity]] = iter,
    ) -> None:
        self._tower, self._resampler, self._ops, self._record = tower, resampler, ops, record
        self.capacities = tuple(capacities)
        self.captures_resampler = capture_resampler
        self.stats = GraphStats()
        weight = tower.patch_embed.proj.weight
        self._device, self._dtype = weight.device, weight.dtype
        parts = [tower, resampler]
        self._weights = WeightWatch(parts, []) if capture_resampler else WeightWatch(parts[:1], parts[1:])
        self._lock = threading.Lock()
        self._last_use = torch.cuda.Event() if self._device.type == "cuda" else None
        self._inputs: dict[Capacity, GraphInputs] = {}
        self._recordings: dict[Capacity, Recording] = {}
        self._tokens: Tensor | None = None  # of a captured resampler, in one buffer for all graphs
        self._staging: StagingRing | None = None
        self._released: str | None = None  # why there are no graphs any more
        with self._on_device():
            try:
                self._allocate()
                for capacity in progress([] if lazy else sorted(self.capacities, reverse=True)):
                    self._recording(capacity)
            except BaseException:
                self._release()
                raise
            self._mark_use()

    def __call__(self, pixel_values: Tensor, grid_thw: Grid | Sizes) -> Tensor | None:
        """Tokens ``[tokens, text_hidden_size]`` of a call, whose rows and sizes fit each other.

        ``grid_thw`` as the encoder's; a tuple is taken for what ``item_sizes`` has checked. None if the call must run
        eagerly as a whole; it is counted with the reason. If the weights have moved, the graphs are dropped.
        """
        with self._lock, self._on_device():
            obstacle = self._obstacle(pixel_values)
            if obstacle is not None:
                self.stats.count_fallback(obstacle)
                return None
            sizes = grid_thw if isinstance(grid_thw, tuple) else item_sizes(grid_thw)
            call = plan_call(sizes, self.capacities)
            with torch.no_grad():
                tokens = self._run(pixel_values, call)
            # Asked while the device computes, for it takes longer than the launch. The graphs' own weights are kept
            # until here, so a replay on old ones reads memory that is still theirs; its tokens go no further.
            if self._drop_if_moved():
                self.stats.count_fallback(WEIGHTS_MOVED)
                return None
            self._count(call.chunks)
            return tokens

    def check_weights(self) -> None:
        """Drop the graphs, and with them the memory of their weights, if the weights have moved."""
        with self._lock:
            self._drop_if_moved()

    def release(self) -> None:
        """Give the graphs' and buffers' memory back; later calls run eagerly."""
        with self._lock:
            self._release()

    def _obstacle(self, pixel_values: Tensor) -> str | None:
        """Why a call cannot be replayed now, or None."""
        if self._released is not None:
            return self._released
        if self._tower.training:
            return "training mode"
        if torch.is_autocast_enabled(self._device.type):
            return "autocast"
        if pixel_values.dtype not in FLOAT_DTYPES:
            return "dtype of the pixel rows"
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "inside another capture"
        if torch.is_grad_enabled() and (pixel_values.requires_grad or self._weights.want_gradient()):
            return "gradient needed"
        return None

    def _drop_if_moved(self) -> bool:
        moved = self._released is None and self._weights.moved()
        if moved:
            logger.warning("ernie-vit: captured weights have moved; their graphs are dropped, capture() makes new ones")
            self._release(WEIGHTS_MOVED)
        return moved

    def _run(self, pixel_values: Tensor, call: CallPlan) -> Tensor:
        stream = self._await_last_use()
        try:
            if call.capacity is not None:
                inputs = self._inputs[call.capacity]
                hidden_states, *captured = self._replay(pixel_values, call.whole, inputs)
                if captured:
                    return captured[0].narrow_copy(0, 0, call.whole.num_tokens)
                # the tokens' rows travel with the plan, the hidden rows stay where they are
                hidden_states, temporal_rows = hidden_states[: call.whole.num_patches], inputs.temporal_rows(call.whole)
                live_counts = inputs.metadata.live_counts
            else:
                hidden_states, metadata = self._gather(pixel_values, call), self._to_device(call.whole)
                temporal_rows, live_counts = metadata.temporal_rows, metadata.live_counts
            tokens: Tensor = self._resampler(hidden_states, temporal_rows, live_counts, self._ops.resampler)
            return tokens
        finally:
            self._mark_use(stream)

    def _gather(self, pixel_values: Tensor, call: CallPlan) -> Tensor:
        """The hidden rows of several graphs, and of frames that no graph holds."""
        hidden_states = pixel_values.new_empty(len(pixel_values), self._tower.config.hidden_size, dtype=self._dtype)
        start = 0
        for chunk, plan in zip(call.chunks, call.plans, strict=True):
            rows = slice(start, start + chunk.rows)
            start += chunk.rows
            if chunk.capacity is None:
                hidden_states[rows] = self._tower(pixel_values[rows], self._to_device(plan), self._ops)
            else:
                replayed = self._replay(pixel_values[rows], plan, self._inputs[chunk.capacity])
                hidden_states[rows] = replayed[0][: chunk.rows]
        return hidden_states

    def _replay(self, pixel_values: Tensor, plan: EncoderPlan, inputs: GraphInputs) -> tuple[Tensor, ...]:
        """The graph's outputs, which the next replay of any graph overwrites; past the live rows they are undefined."""
        recording = self._recording(inputs.capacity)
        assert self._staging is not None  # released together with the inputs
        inputs.fill(pixel_values, plan, self._staging)
        recording.replay()
        return recording.outputs

    def _forward(self, inputs: GraphInputs) -> tuple[Tensor, ...]:
        """What a graph holds: hidden rows, and behind them the tokens if it has the resampler."""
        metadata, ops = inputs.metadata, self._ops
        hidden_states: Tensor = self._tower(inputs.pixel_values, metadata, ops)
        if self._tokens is None:
            return (hidden_states,)
        tokens = self._resampler(hidden_states, metadata.temporal_rows, metadata.live_counts, ops.resampler)
        # a result that stayed in the pool could keep a segment from the smaller graphs, which would then need more
        return hidden_states, self._tokens[: len(tokens)].copy_(tokens)

    def _allocate(self) -> None:
        # outside of inference mode: else calls outside of it could not write to the buffers
        with torch.inference_mode(False), self._metered():
            config = self._tower.config
            self._inputs = allocate_inputs(self.capacities, config.patch_width, self._dtype, self._device)
            self._staging = StagingRing(max(map(GraphInputs.packed_size, self.capacities)), self._device)
            if self.captures_resampler:
                tokens = self.capacities[-1].rows // 4
                self._tokens = torch.empty(tokens, config.text_hidden_size, dtype=self._dtype, device=self._device)

    def _recording(self, capacity: Capacity) -> Recording:
        if capacity not in self._recordings:
            inputs = self._inputs[capacity]
            with torch.inference_mode(False), torch.no_grad(), self._metered():
                inputs.clear()
                self._recordings[capacity] = self._record(lambda: self._forward(inputs))
        return self._recordings[capacity]

    def _release(self, reason: str = "graphs released") -> None:
        self._released = reason
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._weights.let_go()
        self._inputs.clear()
        self._tokens = None
        self._staging = None
        self.stats.memory_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _to_device(self, plan: EncoderPlan) -> EncoderMetadata:
        packed = torch.from_numpy(plan.packed)
        if self._device.type == "cuda":
            packed = packed.pin_memory()  # the allocator of pinned memory keeps it until the copy has ended
        return unpack_metadata(packed.to(self._device, non_blocking=True), plan)

    def _on_device(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda" or torch.cuda.current_device() == self._device.index:
            return nullcontext()
        return torch.cuda.device(self._device)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count the device memory that is gone afterwards."""
        before = _free_bytes(self._device)
        yield
        self.stats.memory_bytes += before - _free_bytes(self._device)

    def _await_last_use(self) -> torch.cuda.Stream | None:
        """Let the current stream wait for the last call; returns it, for to ask for it again takes microseconds."""
        if self._last_use is None:
            return None
        stream = torch.cuda.current_stream(self._device.index)
        stream.wait_event(self._last_use)
        return stream

    def _mark_use(self, stream: torch.cuda.Stream | None = None) -> None:
        """The buffers are in use up to here on the current stream; the next call, on whatever stream, waits for it."""
        if self._last_use is not None:
            self._last_use.record(stream)

    def _count(self, chunks: Sequence[Chunk]) -> None:
        replayed = [(chunk.rows, chunk.capacity.rows) for chunk in chunks if chunk.capacity is not None]
        self.stats.replays += len(replayed)
        self.stats.live_rows += sum(rows for rows, _ in replayed)
        self.stats.captured_rows += sum(rows for _, rows in replayed)
        if len(replayed) == len(chunks):
            self.stats.hits += 1
        else:
            self.stats.count_fallback("frame larger than every graph")


def _free_bytes(device: torch.device) -> int:
    """Free device memory, PyTorch's cache emptied: warm-up leaves some behind. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
