"""The resampler: four patches of two frames become one token of the text model's width.

Plain PyTorch. Which rows make a token comes from the metadata, so nothing is read back from the device.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ernie_vit.model.config import ErnieVisionConfig


class ResamplerMLP(nn.Module):
    """``LayerNorm(fc2(gelu(fc1(x))))`` with the exact GELU (the tower's is quick_gelu)."""

    def __init__(self, in_features: int, out_features: int, eps: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, out_features)
        self.fc2 = nn.Linear(out_features, out_features)
        self.ln = nn.LayerNorm(out_features, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.ln(self.fc2(F.gelu(self.fc1(x))))
        return normed


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, statistics in float32, rounded once before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype.itemsize > 4 else x.float()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * normed.to(x.dtype)


class Resampler(nn.Module):
    """Merges 2x2 patches, then two frames, then maps to the text model's width.

    Parameter names are transformers' (``Ernie4_5_VLMoeVariableResolutionResamplerModel``).
    """

    def __init__(self, config: ErnieVisionConfig) -> None:
        super().__init__()
        merged = config.hidden_size * config.spatial_merge_size**2
        self.spatial_linear = ResamplerMLP(merged, merged, config.norm_eps)
        self.temporal_linear = ResamplerMLP(config.temporal_merge_size * merged, merged, config.norm_eps)
        self.mlp = nn.Linear(merged, config.text_hidden_size)
        self.after_norm = RMSNorm(config.text_hidden_size, config.text_norm_eps)

    def forward(self, hidden_states: Tensor, temporal_rows: Tensor) -> Tensor:
        """``[rows, hidden_size]`` to ``[tokens, text_hidden_size]``.

        Args:
            hidden_states: the tower's rows, merge window by merge window; no rows past the live ones.
            temporal_rows: integers ``[2, tokens]``, each token's merge windows in its even and odd frame.
        """
        spatial = self.spatial_linear(rearrange(hidden_states, "(windows patches) c -> windows (patches c)", patches=4))
        even, odd = temporal_rows
        frames = rearrange([spatial.index_select(0, even), spatial.index_select(0, odd)], "two n c -> n (two c)")
        tokens: Tensor = self.after_norm(self.mlp(self.temporal_linear(frames)))
        return tokens
