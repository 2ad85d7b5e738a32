"""The whole encoder on the Triton kernels is as near to float64 as transformers is, and its rows keep their bits."""

import copy
import random

import pytest
import reference
import torch
from accuracy import assert_within_budget
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.kernels.compilation import compilations
from ernie_vit.model.metadata import tokens_per_item
from ernie_vit.model.operators import TOWER_STAGES, Backend, choose_operators

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
@pytest.mark.parametrize("stage", TOWER_STAGES)
@torch.no_grad()
def test_accuracy_with_one_stage_of_torch(encoder: ErnieVisionEncoder, device: str, stage: str) -> None:
    tower = copy.deepcopy(encoder.vision_tower).to(device, torch.bfloat16)
    rows = reference.random_rows(GRIDS).to(device, torch.bfloat16)
    metadata = prepare_encoder_metadata(GRIDS, device=device)
    mixed, plain = choose_operators("triton", {stage: "torch"}), choose_operators("torch")
    exact = copy.deepcopy(tower).double()(rows.double(), metadata, plain)
    assert_within_budget(tower(rows, metadata, mixed), tower(rows, metadata, plain), exact)


@device
@pytest.mark.filterwarnings("ignore:invalid value")  # NaN in the interpreter
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
    middle = slice(GRIDS[0][0] * GRIDS[0][1] * GRIDS[0][2], ROWS - GRIDS[2][1] * GRIDS[2][2])
    beside_nan = torch.full_like(rows, float("nan"))
    beside_nan[middle] = rows[middle]
    assert torch.equal(ours(beside_nan, GRIDS).split(tokens_per_item(GRIDS))[1], tokens[1])


@device
def test_a_gradient_is_refused(encoder: ErnieVisionEncoder, device: str) -> None:
    """Never a result that is cut off from its gradient without a word."""
    ours = copy.deepcopy(encoder).to(device, torch.bfloat16)
    ours.set_backend("triton")
    rows = reference.random_rows([[1, 2, 2]]).to(device, torch.bfloat16).requires_grad_()
    with pytest.raises(RuntimeError, match='backend="torch"'):
        ours(rows, [[1, 2, 2]])


@pytest.mark.gpu
@torch.no_grad()
def test_a_video_of_449280_rows() -> None:
    """More than 2^31 elements between the linears of the MLP: the last frames have the bits that they have alone."""
    frames, last, height, width = 180, 2, 48, 52
    config = ErnieVisionConfig(depth=1)
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    encoder = ErnieVisionEncoder.from_config(config, device="cuda", dtype=torch.bfloat16, backend="triton")
    rows = torch.randn(frames * height * width, config.patch_width, device="cuda", dtype=torch.bfloat16)
    ops = choose_operators("triton")
    hidden, alone = (
        encoder.vision_tower(x, prepare_encoder_metadata([[count, height, width]], device="cuda"), ops)
        for x, count in ((rows, frames), (rows[-last * height * width :], last))
    )
    assert torch.equal(hidden[-last * height * width :], alone)
    assert hidden.isfinite().all()


@pytest.mark.gpu
@torch.no_grad()
def test_500_sizes_compile_nothing_and_take_no_memory(encoder: ErnieVisionEncoder) -> None:
    ours = copy.deepcopy(encoder).to("cuda", torch.bfloat16)
    ours.set_backend("triton")
    ours.warm_up()
    rng = random.Random(0)
    sides = [(2 * height, 2 * width) for height in range(1, 31) for width in range(1, 31)]
    largest = torch.randn(60 * 60, ours.config.patch_width, device="cuda")
    ours(largest, [[1, 60, 60]])
    torch.cuda.empty_cache()
    compiled, allocated, reserved = compilations(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for height, width in rng.sample(sides, 500):
        ours(largest[: height * width], [[1, height, width]])
    torch.cuda.empty_cache()
    assert compilations() == compiled
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved
