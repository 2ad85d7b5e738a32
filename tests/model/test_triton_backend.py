"""The whole encoder on the Triton kernels is as near to float64 as transformers is, and its rows keep their bits."""

import copy

import pytest
import reference
import torch
from accuracy import assert_within_budget
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata

GRIDS = [[2, 4, 4], [1, 6, 10], [1, 2, 2]]
ROWS = sum(t * h * w for t, h, w in GRIDS)

device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ],
)


@device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_accuracy(
    model: Ernie4_5_VLMoeForConditionalGeneration, encoder: ErnieVisionEncoder, device: str, dtype: torch.dtype
) -> None:
    rows = reference.random_rows(GRIDS).to(dtype)
    exact = copy.deepcopy(encoder).double()(rows.double(), GRIDS)
    plain = reference.encode(copy.deepcopy(model.model).to(dtype), rows, GRIDS)
    ours = copy.deepcopy(encoder).to(device, dtype)
    ours.set_backend("triton")
    assert ours.backend == "triton"
    assert_within_budget(ours(rows.to(device), GRIDS).cpu(), plain, exact)


@device
@torch.no_grad()
def test_an_item_has_the_same_bits_alone_and_packed(encoder: ErnieVisionEncoder, device: str) -> None:
    """In the tower: one row, one result, whatever else is in the call and however it is padded."""
    ours = copy.deepcopy(encoder).to(device, torch.bfloat16)
    ours.set_backend("triton")
    rows = reference.random_rows(GRIDS).to(device, torch.bfloat16)
    ops = ours._operators()
    packed = ours.vision_tower(rows, prepare_encoder_metadata(GRIDS, max_sequences=9, device=device), ops)
    start = 0
    for t, h, w in GRIDS:
        end = start + t * h * w
        metadata = prepare_encoder_metadata([[t, h, w]], device=device)
        assert torch.equal(ours.vision_tower(rows[start:end], metadata, ops), packed[start:end])
        start = end


@device
def test_a_gradient_is_refused(encoder: ErnieVisionEncoder, device: str) -> None:
    """Never a result that is cut off from its gradient without a word."""
    ours = copy.deepcopy(encoder).to(device, torch.bfloat16)
    ours.set_backend("triton")
    rows = reference.random_rows([[1, 2, 2]]).to(device, torch.bfloat16).requires_grad_()
    with pytest.raises(RuntimeError, match='backend="torch"'):
        ours(rows, [[1, 2, 2]])
