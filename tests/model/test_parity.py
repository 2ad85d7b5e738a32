"""The torch backend computes what transformers' tower and resampler compute."""

import copy

import pytest
import reference
import torch
from accuracy import assert_within_budget, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as theirs

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.operators import choose_operators

Model = Ernie4_5_VLMoeForConditionalGeneration
Grids = list[list[int]]

# Both round each float32 operation alike, but nothing fixes the order of a matrix product's sums.
FLOAT32 = 1e-5

GRIDS: list[Grids] = [
    [[1, 4, 4]],
    [[1, 6, 10]],
    [[1, 4, 4], [1, 6, 8]],
    [[4, 4, 4]],
    [[1, 2, 2]],
    [[2, 4, 4], [1, 6, 8], [4, 2, 2]],
]
grids = pytest.mark.parametrize("grids", GRIDS, ids=str)

sides = st.integers(1, 6).map(lambda half: 2 * half)
frames = st.sampled_from([1, 1, 2, 4, 6])
items = st.tuples(frames, sides, sides).map(list)


@grids
def test_float32(model: Model, encoder: ErnieVisionEncoder, grids: Grids) -> None:
    assert_equals_transformers(model, encoder, grids, seed=1)


@given(grids=st.lists(items, min_size=1, max_size=5), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_float32_random_grids(model: Model, encoder: ErnieVisionEncoder, grids: Grids, seed: int) -> None:
    assert_equals_transformers(model, encoder, grids, seed)


@torch.no_grad()
def assert_equals_transformers(model: Model, encoder: ErnieVisionEncoder, grids: Grids, seed: int) -> None:
    pixel_values = reference.random_rows(grids, seed)
    expected = reference.encode(model.model, pixel_values, grids)
    tokens = encoder(pixel_values, grids)
    assert tokens.dtype == expected.dtype
    assert tokens.shape == expected.shape
    assert relative_error(tokens, expected) < FLOAT32


@torch.no_grad()
def test_tower_alone(model: Model, encoder: ErnieVisionEncoder) -> None:
    """The resampler's last norm cannot hide a wrong scale, nor its row order a wrong order."""
    grids = GRIDS[-1]
    pixel_values = reference.random_rows(grids)
    expected = model.model.vision_tower(pixel_values, torch.tensor(grids)).last_hidden_state
    hidden = encoder.vision_tower(pixel_values, prepare_encoder_metadata(grids), choose_operators("torch"))
    assert relative_error(hidden, expected) < FLOAT32


@grids
@torch.no_grad()
def test_bfloat16_is_as_near_to_float64(model: Model, encoder: ErnieVisionEncoder, grids: Grids) -> None:
    # Ten draws: one image of 4 patches has 128 values, few enough that luck would decide between two roundings.
    pixel_values = [reference.random_rows(grids, seed).bfloat16() for seed in range(10)]
    exact, coarse = copy.deepcopy(encoder).double(), copy.deepcopy(encoder).bfloat16()
    theirs = copy.deepcopy(model.model).bfloat16()
    assert_within_budget(
        torch.cat([coarse(rows, grids) for rows in pixel_values]),
        torch.cat([reference.encode(theirs, rows, grids) for rows in pixel_values]),
        torch.cat([exact(rows.double(), grids) for rows in pixel_values]),
    )


@torch.no_grad()
def test_float64_keeps_its_precision(model: Model, encoder: ErnieVisionEncoder) -> None:
    """It is what other dtypes are measured by. transformers turns q and k in float32, which is its error here."""
    pixel_values = reference.random_rows([[1, 4, 6]]).double()
    exact = copy.deepcopy(encoder).double()(pixel_values, [[1, 4, 6]])
    expected = reference.encode(copy.deepcopy(model.model).double(), pixel_values, [[1, 4, 6]])
    assert exact.dtype == torch.float64
    assert relative_error(exact, expected) < 1e-7


def test_gradients() -> None:
    grids = [[2, 4, 4], [1, 6, 8]]
    model = reference.small_model(seed=3).model
    encoder = ErnieVisionEncoder(reference.SMALL, backend="torch")
    encoder.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("language_model")})
    encoder.requires_grad_()
    ours, theirs = (reference.random_rows(grids).requires_grad_() for _ in range(2))
    towards = torch.randn(4 + 12, 128, generator=torch.Generator().manual_seed(4))

    encoder(ours, grids).backward(towards)
    reference.encode(model, theirs, grids).backward(towards)

    compared = {"pixel_values": (ours.grad, theirs.grad)}
    for name, parameter in encoder.named_parameters():
        compared[name] = (parameter.grad, model.get_parameter(name).grad)
    for name, (grad, expected) in compared.items():
        assert expected.abs().max() > 0, name
        assert relative_error(grad, expected) < FLOAT32, name


@pytest.mark.parametrize(
    "name",
    ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "ln", "spatial", "temporal", "after"],
)
@torch.no_grad()
def test_each_norm_has_its_own_eps(name: str) -> None:
    """An eps that is changed in one module alone changes the tokens, and as in transformers."""
    grids = [[1, 4, 6]]
    pixel_values = reference.random_rows(grids)
    model = reference.small_model(seed=5).model
    encoder = ErnieVisionEncoder.from_transformers(model, backend="torch")
    before = encoder(pixel_values, grids)
    if name == "after":
        model.resampler_model.after_norm.variance_epsilon = encoder.resampler_model.after_norm.eps = 0.5
    else:
        path = f"resampler_model.{name}_linear.ln" if name in ("spatial", "temporal") else f"vision_tower.{name}"
        for module in (model, encoder):
            norm = module.get_submodule(path)
            assert isinstance(norm, nn.LayerNorm)
            norm.eps = 0.5
    after = encoder(pixel_values, grids)
    assert relative_error(after, before) > 1e-3
    assert relative_error(after, reference.encode(model, pixel_values, grids)) < FLOAT32


@torch.no_grad()
def test_full_size() -> None:
    """All 32 blocks at the real widths: 774.7 M parameters, shared by both models, in float32 (3.1 GB)."""
    config = Ernie4_5_VLMoeConfig()
    with torch.device("meta"):
        model = nn.Module()
        model.vision_tower = theirs.Ernie4_5_VLMoeVisionTransformerPretrainedModel(config.vision_config)
        model.resampler_model = theirs.Ernie4_5_VLMoeVariableResolutionResamplerModel(config)
    model.config = config
    model.to_empty(device="cpu").eval()
    model.vision_tower.rotary_pos_emb = theirs.Ernie4_5_VLMoeVisionRotaryEmbedding(config.vision_config)
    # Drawing 774.7 M values would take most of the time. A prime number of them, repeated, leaves no two rows alike.
    drawn = 0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(6))
    for name, parameter in model.named_parameters():
        for piece in parameter.view(-1).split(len(drawn)):
            piece.copy_(drawn[: len(piece)])
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(1)

    grids = [[1, 4, 4], [2, 2, 6]]
    pixel_values = reference.random_rows(grids)
    encoder = ErnieVisionEncoder.from_transformers(model, backend="torch")
    assert sum(p.numel() for p in encoder.parameters()) == 630_433_280 + 144_225_280
    expected = reference.encode(model, pixel_values, grids)
    assert relative_error(encoder(pixel_values, grids), expected) < FLOAT32
