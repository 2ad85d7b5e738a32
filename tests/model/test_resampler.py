"""The resampler: which rows make a token, its activation and its norms."""

import math

import pytest
import torch
import torch.nn.functional as F
from accuracy import relative_error
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.resampler import Resampler, ResamplerMLP, RMSNorm

GRIDS = [[2, 4, 4], [1, 6, 8], [4, 2, 2], [1, 2, 2]]
ROWS = sum(t * h * w for t, h, w in GRIDS)


@torch.no_grad()
def test_equals_transformers(model: Ernie4_5_VLMoeForConditionalGeneration, encoder: ErnieVisionEncoder) -> None:
    hidden = torch.randn(ROWS, 160, generator=torch.Generator().manual_seed(1))
    tokens = encoder.resampler_model(hidden, prepare_encoder_metadata(GRIDS).temporal_rows)
    assert relative_error(tokens, model.model.resampler_model(hidden, torch.tensor(GRIDS))) < 1e-5


@torch.no_grad()
def test_a_token_depends_on_its_own_patches_alone(encoder: ErnieVisionEncoder) -> None:
    """NaN in one patch reaches exactly the token of its window, and in an image no other."""
    temporal_rows = prepare_encoder_metadata(GRIDS).temporal_rows
    hidden = torch.randn(ROWS, 160, generator=torch.Generator().manual_seed(2))
    for row, token in [
        (0, 0),  # the video's even frame
        (16 + 5, 1),  # its odd frame
        (32 + 47, 4 + 11),  # the image's last window
        (80 + 2 * 4, 16 + 1),  # the second video's third frame opens its second token
        (96, 18),  # the last image's only window
    ]:
        poisoned = hidden.clone()
        poisoned[row] = torch.nan
        tokens = encoder.resampler_model(poisoned, temporal_rows)
        assert tokens.isnan().all(1).nonzero().flatten().tolist() == [token]


@torch.no_grad()
def test_activation_is_the_exact_gelu() -> None:
    mlp = ResamplerMLP(32, 32, eps=1e-6)
    for layer in (mlp.fc1, mlp.fc2):
        layer.weight.copy_(torch.eye(32))
        layer.bias.zero_()
    mlp.ln = torch.nn.Identity()
    x = torch.linspace(-4, 4, 32 * 3).view(3, 32)
    torch.testing.assert_close(mlp(x), 0.5 * x * (1 + torch.erf(x / math.sqrt(2))))
    assert (mlp(x) - F.gelu(x, approximate="tanh")).abs().max() > 1e-4
    assert (mlp(x) - x * torch.sigmoid(1.702 * x)).abs().max() > 0.01


@torch.no_grad()
def test_norms_take_the_configs_eps() -> None:
    """A row of variance 9e-6: between 1e-6 and 1e-5 its norm differs by 38 %."""
    config = ErnieVisionConfig(
        depth=1, hidden_size=8, num_heads=2, intermediate_size=8, text_hidden_size=32,
        norm_eps=1e-6, text_norm_eps=1e-5,
    )  # fmt: skip
    resampler = Resampler(config)
    row = 3e-3 * torch.tensor([1.0, -1.0]).repeat(1, 16)
    for norm in (resampler.spatial_linear.ln, resampler.temporal_linear.ln):
        torch.testing.assert_close(norm(row), row / math.sqrt(9e-6 + 1e-6))
    torch.testing.assert_close(resampler.after_norm(row), row / math.sqrt(9e-6 + 1e-5))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_counts_in_float32(dtype: torch.dtype) -> None:
    """The squares of 300 and more pass float16's largest number; the mean of many in bfloat16 loses digits."""
    norm = RMSNorm(128, eps=1e-5).to(dtype)
    x = (300 + torch.arange(128.0)).to(dtype).view(1, 128)
    exact = x.double() / (x.double().square().mean() + 1e-5).sqrt()
    assert torch.equal(norm(x), exact.to(dtype))
