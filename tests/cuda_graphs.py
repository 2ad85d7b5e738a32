"""What the GPU tests of graphs share: encoders, the eager call, and poisoned memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import SMALL, Grids, random_rows, randomize
from torch import Tensor

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.graph.inputs import GraphInputs
from ernie_vit.graph.recording import CudaGraphRecorder
from ernie_vit.model.config import ErnieVisionConfig

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
    """The same call as if nothing had been captured."""
    graphs, encoder._graphs = encoder._graphs, None
    try:
        tokens: Tensor = encoder(pixel_values, grid)
    finally:
        encoder._graphs = graphs
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
    tensors then lie in. And the input rows past the live ones are filled after each copy into them.
    """
    record, fill = CudaGraphRecorder.__call__, GraphInputs.fill

    def poisoned_record(recorder: CudaGraphRecorder, forward: Callable[[], Tensor]) -> Any:
        def poisoned_forward() -> Tensor:
            sizes = [num_bytes, *[MIB // 2] * 64]  # tensors up to 1 MiB come from segments of their own
            blocks = [torch.full((size // 2,), NAN, dtype=torch.bfloat16, device="cuda") for size in sizes]
            del blocks
            return forward()

        return record(recorder, poisoned_forward)

    def poisoned_fill(inputs: GraphInputs, pixel_values: Tensor, plan: Any, staging: Any) -> None:
        fill(inputs, pixel_values, plan, staging)
        inputs.pixel_values[plan.num_patches :].fill_(NAN)

    monkeypatch.setattr(CudaGraphRecorder, "__call__", poisoned_record)
    monkeypatch.setattr(GraphInputs, "fill", poisoned_fill)
