"""``torch.compile`` of the encoder on the Triton backend: one graph without breaks, the bits of the eager call."""

import copy

import pytest
import reference
import torch
from accuracy import assert_within_budget

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.operators import choose_operators

# another number of patches, another shape of the same number, a video: each is traced anew
GRIDS = ([[1, 8, 8]], [[1, 10, 10]], [[1, 4, 16]], [[2, 4, 8], [1, 2, 2]])


def random_rows(grid: list[list[int]], encoder: ErnieVisionEncoder) -> torch.Tensor:
    rows = torch.randn(sum(t * h * w for t, h, w in grid), encoder.config.patch_width)
    return rows.to(encoder.device, encoder.dtype)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_one_graph_for_each_list_of_sizes(device: str, dtype: torch.dtype) -> None:
    encoder = ErnieVisionEncoder.from_config(reference.SMALL, device=device, dtype=dtype, backend="triton")
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    for grid in GRIDS[1:]:
        pixel_values = random_rows(grid, encoder)
        assert torch.equal(compiled(pixel_values, grid), encoder(pixel_values, grid))


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [[[1, 16, 16]], [[1, 20, 20]]], ids=str)
@torch.no_grad()
def test_the_encoder_by_inductor_is_as_near_to_float64(grid: list[list[int]]) -> None:
    """It fuses PyTorch's resampler, whose bits change by that."""
    encoder = ErnieVisionEncoder.from_config(reference.SMALL, device="cuda", dtype=torch.bfloat16, backend="triton")
    reference.randomize(encoder, seed=0)
    plain, exact = copy.deepcopy(encoder), copy.deepcopy(encoder).double()
    for other in (plain, exact):
        other.set_backend("torch")
    pixel_values = random_rows(grid, encoder)
    tokens = torch.compile(encoder, fullgraph=True)(pixel_values, grid)
    assert_within_budget(tokens, plain(pixel_values, grid), exact(pixel_values.double(), grid))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_the_towers_bits_stay(mode: str) -> None:
    encoder = ErnieVisionEncoder.from_config(reference.SMALL, device="cuda", dtype=torch.bfloat16)
    ops = choose_operators("triton")
    compiled = torch.compile(encoder.vision_tower, fullgraph=True, mode=mode)
    for grid in GRIDS[:2]:
        pixel_values = random_rows(grid, encoder)
        metadata = prepare_encoder_metadata(grid, device="cuda")
        for _ in range(3):  # reduce-overhead records at the second call
            out = compiled(pixel_values, metadata, ops).clone()
            assert torch.equal(out, encoder.vision_tower(pixel_values, metadata, ops))
