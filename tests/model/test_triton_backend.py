"""The whole encoder on the Triton kernels is as near to float64 as transformers is, and its rows keep their bits."""

import copy

import pytest
import reference
import torch
from accuracy import assert_within_budget
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.metadata import tokens_per_item
from ernie_vit.model.operators import Backend

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
@pytest.mark.parametrize("resampler", ["torch", "triton"])
@torch.no_grad()
def test_accuracy(
    model: Ernie4_5_VLMoeForConditionalGeneration,
    encoder: ErnieVisionEncoder,
    device: str,
    dtype: torch.dtype,
    resampler: Backend,
) -> None:
    rows = reference.random_rows(GRIDS).to(dtype)
    exact = copy.deepcopy(encoder).double()(rows.double(), GRIDS)
    plain = reference.encode(copy.deepcopy(model.model).to(dtype), rows, GRIDS)
    ours = copy.deepcopy(encoder).to(device, dtype)
    ours.set_backend("triton", {"resampler": resampler})
    assert ours.backend == "triton"
    assert_within_budget(ours(rows.to(device), GRIDS).cpu(), plain, exact)


@device
@torch.no_grad()
def test_an_item_has_the_same_bits_alone_and_packed(encoder: ErnieVisionEncoder, device: str) -> None:
    """One row, one result, whatever else is in the call and however it is padded; with the kernels' resampler too."""
    ours = copy.deepcopy(encoder).to(device, torch.bfloat16)
    ours.set_backend("triton", {"resampler": "triton"})
    rows = reference.random_rows(GRIDS).to(device, torch.bfloat16)
    packed = ours(rows, metadata=prepare_encoder_metadata(GRIDS, max_sequences=9, device=device))
    tokens = packed.split(tokens_per_item(GRIDS))
    start = 0
    for item, (t, h, w) in enumerate(GRIDS):
        end = start + t * h * w
        assert torch.equal(ours(rows[start:end], [[t, h, w]]), tokens[item])
        start = end


@device
def test_a_gradient_is_refused(encoder: ErnieVisionEncoder, device: str) -> None:
    """Never a result that is cut off from its gradient without a word."""
    ours = copy.deepcopy(encoder).to(device, torch.bfloat16)
    ours.set_backend("triton")
    rows = reference.random_rows([[1, 2, 2]]).to(device, torch.bfloat16).requires_grad_()
    with pytest.raises(RuntimeError, match='backend="torch"'):
        ours(rows, [[1, 2, 2]])
