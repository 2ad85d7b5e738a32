"""The resampler: which rows make a token, its activation and its norms."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget, relative_error
from reference import SMALL, randomize
from torch import Tensor
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.kernels.rms_norm import rms_norm_ref
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.operators import TORCH_RESAMPLER, TRITON_RESAMPLER, ResamplerOperators
from ernie_vit.model.resampler import Resampler, ResamplerMLP

GRIDS = [[2, 4, 4], [1, 6, 8], [4, 2, 2], [1, 2, 2]]
ROWS = sum(t * h * w for t, h, w in GRIDS)
COUNT = torch.tensor([3], dtype=torch.int32)


def resample(resampler: Resampler, hidden: Tensor, ops: ResamplerOperators = TORCH_RESAMPLER) -> Tensor:
    metadata = prepare_encoder_metadata(GRIDS, device=hidden.device)
    tokens: Tensor = resampler(hidden, metadata.temporal_rows, metadata.live_counts, ops)
    return tokens


@torch.no_grad()
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_equal_float64_within_the_error_of_torch(device: str, dtype: torch.dtype) -> None:
    resampler = Resampler(SMALL)
    randomize(resampler, seed=1)
    resampler = resampler.to(device, dtype)
    hidden = torch.randn(ROWS, 160, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    plain, fused = (resample(resampler, hidden, ops) for ops in (TORCH_RESAMPLER, TRITON_RESAMPLER))
    assert_within_budget(fused, plain, resample(resampler.double(), hidden.double()), sums=5)


@torch.no_grad()
def test_equals_transformers(model: Ernie4_5_VLMoeForConditionalGeneration, encoder: ErnieVisionEncoder) -> None:
    hidden = torch.randn(ROWS, 160, generator=torch.Generator().manual_seed(1))
    tokens = resample(encoder.resampler_model, hidden)
    assert relative_error(tokens, model.model.resampler_model(hidden, torch.tensor(GRIDS))) < 1e-5


@torch.no_grad()
def test_a_token_depends_on_its_own_patches_alone(encoder: ErnieVisionEncoder) -> None:
    """NaN in one patch reaches exactly the token of its window, and in an image no other."""
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
        tokens = resample(encoder.resampler_model, poisoned)
        assert tokens.isnan().all(1).nonzero().flatten().tolist() == [token]


@torch.no_grad()
def test_activation_is_the_exact_gelu() -> None:
    mlp = ResamplerMLP(32, 32, eps=1e-6)
    for layer in (mlp.fc1, mlp.fc2):
        layer.weight.copy_(torch.eye(32))
        layer.bias.zero_()
    x = torch.linspace(-4, 4, 32 * 3).view(3, 32)
    out = mlp(x, COUNT, replace(TORCH_RESAMPLER, layer_norm=lambda x, *_, **__: x), norm_rows=COUNT)
    torch.testing.assert_close(out, 0.5 * x * (1 + torch.erf(x / math.sqrt(2))))
    assert (out - F.gelu(x, approximate="tanh")).abs().max() > 1e-4
    assert (out - x * torch.sigmoid(1.702 * x)).abs().max() > 0.01


@torch.no_grad()
def test_norms_take_the_configs_eps() -> None:
    """They differ; for a row of variance 9e-6 the norm of one is 38 % above that of the other."""
    config = ErnieVisionConfig(
        depth=1, hidden_size=8, num_heads=2, intermediate_size=8, text_hidden_size=32,
        norm_eps=1e-6, text_norm_eps=1e-5,
    )  # fmt: skip
    resampler = Resampler(config)
    row = 3e-3 * torch.tensor([1.0, -1.0]).repeat(1, 16)
    seen = []

    def norm(x: Tensor, *_: Tensor, eps: float, index: Tensor | None = None, **__: Tensor) -> Tensor:
        seen.append(eps)
        return x if index is None else x[index]

    resample(resampler, torch.zeros(ROWS, 8), replace(TORCH_RESAMPLER, layer_norm=norm, rms_norm=norm))
    assert seen == [1e-6, 1e-6, 1e-5]
    torch.testing.assert_close(rms_norm_ref(row, torch.ones(32), eps=1e-5), row / math.sqrt(9e-6 + 1e-5))
