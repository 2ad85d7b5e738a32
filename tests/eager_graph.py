"""A stand-in for a captured graph that runs on a CPU: replaying computes the recorded forward pass again.

As with a graph, a replay sees the static buffers and nothing else of the call, and its output stays in one place. It is
worse than a graph in what it leaves behind: all that a replay must not rely on is NaN.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.graph.recording import Forward
from ernie_vit.kernels.layer_norm import layer_norm_ref
from ernie_vit.kernels.rms_norm import rms_norm_ref
from ernie_vit.model.metadata import EncoderMetadata, Grid, prepare_encoder_metadata
from ernie_vit.model.operators import Operators, ResamplerOperators, choose_operators

NAN = float("nan")


class EagerGraph:
    """One recorded pass. ``outputs`` are poisoned before every replay, also with what other graphs put out."""

    def __init__(self, forward: Forward, recorder: "EagerRecorder") -> None:
        self._forward: Forward | None = forward
        self._recorder = recorder
        self.outputs = tuple(torch.full_like(output, NAN) for output in forward())

    def replay(self) -> None:
        assert self._forward is not None, "replayed after release"
        for graph in self._recorder.graphs:
            for output in graph.outputs:
                output.fill_(NAN)  # they share a pool
        self._recorder.before_replay()
        for output, computed in zip(self.outputs, self._forward(), strict=True):
            output.copy_(computed)
        self._recorder.replays += 1

    def release(self) -> None:
        self._forward = None
        self._recorder.graphs.remove(self)
        self.outputs = ()


class EagerRecorder:
    """Records ``EagerGraph``s. ``fail_at``: the recording, counted from 0, that raises instead."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.graphs: list[EagerGraph] = []
        self.recorded = 0
        self.replays = 0
        self.before_replay: Callable[[], None] = lambda: None
        self.fail_at = fail_at

    def __call__(self, forward: Forward) -> EagerGraph:
        if self.recorded == self.fail_at:
            raise torch.OutOfMemoryError("out of memory, as planned")
        self.recorded += 1
        graph = EagerGraph(forward, self)
        self.graphs.append(graph)
        return graph


def poison_past_live_rows(encoder: ErnieVisionEncoder) -> Callable[[], None]:
    """Fill the pixel rows past the live ones with NaN; for ``EagerRecorder.before_replay``."""

    def poison() -> None:
        runner = encoder._graphs
        assert runner is not None
        largest = runner._inputs[runner.capacities[-1]]
        largest.pixel_values[int(largest.packed[0]) :] = NAN

    return poison


def device_operators() -> Operators:
    """PyTorch's operators as the kernels are: all that they know of a call they read from the metadata's tensors.

    And one row, one result: matrix products take four rows at a time, since a product of more rows may round
    otherwise. The resampler's leave NaN in rows past the live ones, as memory may hold.
    """
    operators = choose_operators("torch")
    return replace(
        operators,
        linear=_linear,
        patch_embed=lambda x, weight, **_: _linear(x.to(weight.dtype), weight),
        mlp=_mlp,
        attention_arguments=_attention_arguments,
        resampler=ResamplerOperators(_resampler_linear, _resampler_norm, _resampler_rms_norm),
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, **_: Any) -> Tensor:
    if not len(x):
        return x.new_empty(0, len(weight))
    padded = F.pad(x, (0, 0, 0, -len(x) % 4))
    out = torch.cat([F.linear(rows, weight, bias) for rows in padded.split(4)])[: len(x)]
    return out if residual is None else out + residual


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, residual: Tensor, **_: Any) -> Tensor:
    hidden = _linear(x, w1, b1)
    return _linear(hidden * torch.sigmoid(1.702 * hidden), w2, b2, residual=residual)


def _resampler_linear(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_rows: Tensor, activation: str | None = None
) -> Tensor:
    out = _linear(x, weight, bias)
    return _poison_past(F.gelu(out) if activation else out, num_rows)


def _resampler_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, num_rows: Tensor, index: Tensor | None = None
) -> Tensor:
    if index is not None:
        index = index.clamp(0, max(len(x) - 1, 0))  # indices past the live ones may be anything
    return _poison_past(layer_norm_ref(x, weight, bias, eps=eps, index=index), num_rows)


def _resampler_rms_norm(x: Tensor, weight: Tensor, *, eps: float, num_rows: Tensor) -> Tensor:
    return _poison_past(rms_norm_ref(x, weight, eps=eps), num_rows)


def _poison_past(out: Tensor, num_rows: Tensor) -> Tensor:
    live = torch.arange(len(out)) < num_rows
    return out.where(live[:, None], NAN)


def _attention_arguments(metadata: EncoderMetadata, **_: Any) -> dict[str, Any]:
    return {"cu_seqlens": metadata.cu_seqlens, "max_seqlen": metadata.max_seqlen}


def eager(encoder: ErnieVisionEncoder, pixel_values: Tensor, grid_thw: Grid) -> Tensor:
    """The call without graphs, with the operators that they record."""
    metadata, ops = prepare_encoder_metadata(grid_thw), device_operators()
    with torch.no_grad():
        hidden_states = encoder.vision_tower(pixel_values, metadata, ops)
        tokens: Tensor = encoder.resampler_model(
            hidden_states, metadata.temporal_rows, metadata.live_counts, ops.resampler
        )
    return tokens
