"""What the GPU tests of graphs share: encoders, the eager call, and poisoned memory."""

from typing import Any

import pytest
import torch
from reference import SMALL, Grids, random_rows, randomize
from torch import Tensor

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.graph.inputs import GraphInputs
from ernie_vit.graph.recording import CudaGraphRecorder, Forward
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import prepare_encoder_metadata

MIB = 1 << 20
NAN = float("nan")


def small_encoder(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> ErnieVisionEncoder:
    """Two blocks, 160 wide, every parameter random."""
    encoder = ErnieVisionEncoder.from_config(SMALL, device=device, dtype=dtype, backend="triton")
    randomize(encoder, seed=0)
    return encoder


def wide_encoder(depth: int = 4) -> ErnieVisionEncoder:
    """The model's own sizes in bfloat16 but for the number of blocks; drawn on the GPU, which is quick."""
    with torch.device("cuda"):
        encoder = ErnieVisionEncoder(ErnieVisionConfig(depth=depth), backend="triton")
    return encoder.to(torch.bfloat16)


def rows_of(encoder: ErnieVisionEncoder, grid: Grids, seed: int = 0) -> Tensor:
    return random_rows(grid, seed).to(encoder.device, encoder.dtype)


def eager(encoder: ErnieVisionEncoder, pixel_values: Tensor, grid: Any) -> Tensor:
    """The same call without a graph, by the operators that the graphs hold."""
    metadata, ops = prepare_encoder_metadata(grid, device=encoder.device), encoder._operators()
    with torch.no_grad():
        hidden_states = encoder.vision_tower(pixel_values, metadata, ops)
        tokens: Tensor = encoder.resampler_model(
            hidden_states, metadata.temporal_rows, metadata.live_counts, ops.resampler
        )
    return tokens


def assert_same(encoder: ErnieVisionEncoder, grid: Grids, seed: int = 0) -> None:
    """A call is a hit, finite, and has the bits of the eager one."""
    hits = encoder.graph_stats().hits
    pixel_values = rows_of(encoder, grid, seed)
    tokens, expected = encoder(pixel_values, grid), eager(encoder, pixel_values, grid)
    assert encoder.graph_stats().hits == hits + 1, encoder.graph_stats()
    assert bool(tokens.isfinite().all()), grid
    assert torch.equal(tokens, expected), grid


def poison(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Make all that a replay may not rely on NaN, at every replay.

    The captured pass starts by filling ``num_bytes`` of the graphs' pool, in large and in small blocks, which its own
    tensors then lie in. And what lies past a call's rows and plan in the inputs is filled after each copy into them,
    the plan's with rows that nobody has.
    """
    record, fill = CudaGraphRecorder.__call__, GraphInputs.fill

    def poisoned_record(recorder: CudaGraphRecorder, forward: Forward) -> Any:
        def poisoned_forward() -> tuple[Tensor, ...]:
            sizes = [num_bytes, *[MIB // 2] * 64]  # tensors up to 1 MiB come from segments of their own
            blocks = [torch.full((size // 2,), NAN, dtype=torch.bfloat16, device="cuda") for size in sizes]
            del blocks
            return forward()

        return record(recorder, poisoned_forward)

    def poisoned_fill(inputs: GraphInputs, pixel_values: Tensor, plan: Any, staging: Any) -> None:
        fill(inputs, pixel_values, plan, staging)
        inputs.pixel_values[plan.num_patches :].fill_(NAN)
        inputs.packed[len(plan.packed) :].fill_(2**30)

    monkeypatch.setattr(CudaGraphRecorder, "__call__", poisoned_record)
    monkeypatch.setattr(GraphInputs, "fill", poisoned_fill)
