"""The resampler: four patches of two frames become one token of the text model's width.

Written once over its stage's operators, PyTorch's or Triton's, as the tower is over its. Which rows make a token and
how many are live comes from the metadata, so nothing is read back from the device.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.operators import ResamplerOperators


class ResamplerMLP(nn.Module):
    """``ln(fc2(gelu(fc1(x))))`` with the exact GELU (the tower's is quick_gelu)."""

    def __init__(self, in_features: int, out_features: int, eps: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, out_features)
        self.fc2 = nn.Linear(out_features, out_features)
        self.ln = nn.LayerNorm(out_features, eps=eps)

    def forward(
        self, x: Tensor, num_rows: Tensor, ops: ResamplerOperators, *, norm_rows: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """``[rows, in_features]`` to ``[rows, out_features]``.

        Args:
            x: the rows.
            num_rows: int32 ``[1]``, how many are live.
            ops: the stage's operators.
            norm_rows: int32 ``[1]``, how many rows of the result are live.
            index: int32, in place of all rows, those that the result consists of; the others need no norm.
        """
        fc1, fc2, ln = self.fc1, self.fc2, self.ln
        hidden = ops.linear(x, fc1.weight, fc1.bias, activation="gelu", num_rows=num_rows)
        mixed = ops.linear(hidden, fc2.weight, fc2.bias, num_rows=num_rows)
        return ops.layer_norm(mixed, ln.weight, ln.bias, eps=ln.eps, num_rows=norm_rows, index=index)


class RMSNorm(nn.Module):
    """Holds the parameter of ``ernie_vit.kernels.rms_norm``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps


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

    def forward(
        self, hidden_states: Tensor, temporal_rows: Tensor, live_counts: Tensor, ops: ResamplerOperators
    ) -> Tensor:
        """``[rows, hidden_size]`` to ``[tokens, text_hidden_size]``.

        There may be more rows and tokens than live ones (a captured graph's capacity), if the operators stop at the
        live ones: those behind may hold anything and their results are undefined.

        Args:
            hidden_states: the tower's rows, contiguous, merge window by merge window.
            temporal_rows: int32 ``[tokens, 2]``, contiguous, each token's merge windows in its even and odd frame.
            live_counts: int32 ``[3]``, how many merge windows, rows of ``temporal_rows.flatten()`` and tokens are live.
            ops: the stage's operators.
        """
        spatial, temporal = self.spatial_linear, self.temporal_linear
        num_windows, num_halves, num_tokens = live_counts.split(1)
        windows = rearrange(hidden_states, "(windows patches) channels -> windows (patches channels)", patches=4)
        halves = spatial(windows, num_windows, ops, norm_rows=num_halves, index=temporal_rows.view(-1))
        frames = rearrange(halves, "(tokens frames) channels -> tokens (frames channels)", frames=2)
        merged = temporal(frames, num_tokens, ops, norm_rows=num_tokens)
        tokens = ops.linear(merged, self.mlp.weight, self.mlp.bias, num_rows=num_tokens)
        return ops.rms_norm(tokens, self.after_norm.weight, eps=self.after_norm.eps, num_rows=num_tokens)
