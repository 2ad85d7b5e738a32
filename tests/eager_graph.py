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
from ernie_vit.model.metadata import EncoderMetadata, Grid, prepare_encoder_metadata
from ernie_vit.model.operators import Operators, choose_operators

NAN = float("nan")


class EagerGraph:
    """One recorded pass. ``output`` is poisoned before every replay, also with what other graphs put out."""

    def __init__(self, forward: Callable[[], Tensor], recorder: "EagerRecorder") -> None:
        self._forward: Callable[[], Tensor] | None = forward
        self._recorder = recorder
        self.output = torch.full_like(forward(), NAN)

    def replay(self) -> None:
        assert self._forward is not None, "replayed after release"
        for graph in self._recorder.graphs:
            graph.output.fill_(NAN)  # they share a pool
        self._recorder.before_replay()
        self.output.copy_(self._forward())
        self._recorder.replays += 1

    def release(self) -> None:
        self._forward = None
        self._recorder.graphs.remove(self)
        self.output = torch.empty(0)


class EagerRecorder:
    """Records ``EagerGraph``s. ``fail_at``: the recording, counted from 0, that raises instead."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.graphs: list[EagerGraph] = []
        self.recorded = 0
        self.replays = 0
        self.before_replay: Callable[[], None] = lambda: None
        self.fail_at = fail_at

    def __call__(self, forward: Callable[[], Tensor]) -> EagerGraph:
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
    otherwise.
    """
    operators = choose_operators("torch")
    return replace(
        operators,
        linear=_linear,
        patch_embed=lambda x, weight, **_: _linear(x.to(weight.dtype), weight),
        mlp=_mlp,
        attention_arguments=_attention_arguments,
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, **_: Any) -> Tensor:
    if not len(x):
        return x.new_empty(0, len(weight))
    out = torch.cat([F.linear(rows, weight, bias) for rows in x.split(4)])
    return out if residual is None else out + residual


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, residual: Tensor, **_: Any) -> Tensor:
    hidden = _linear(x, w1, b1)
    return _linear(hidden * torch.sigmoid(1.702 * hidden), w2, b2, residual=residual)


def _attention_arguments(metadata: EncoderMetadata, **_: Any) -> dict[str, Any]:
    return {"cu_seqlens": metadata.cu_seqlens, "max_seqlen": metadata.max_seqlen}


def eager(encoder: ErnieVisionEncoder, pixel_values: Tensor, grid_thw: Grid) -> Tensor:
    """The call without graphs, with the operators that they record."""
    metadata = prepare_encoder_metadata(grid_thw)
    with torch.no_grad():
        hidden_states = encoder.vision_tower(pixel_values, metadata, device_operators())
        tokens: Tensor = encoder.resampler_model(hidden_states, metadata.temporal_rows)
    return tokens
