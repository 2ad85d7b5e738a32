"""The vision tower: patch embedding, pre-norm transformer blocks with 2D rotary attention, a last LayerNorm.

Written once over the stages' operators, Triton's or PyTorch's. ``nn.Linear`` and ``nn.LayerNorm`` hold the parameters
under transformers' names (``Ernie4_5_VLMoeVisionTransformerPretrainedModel``) and each norm its own eps; the operators
compute with them.
"""

from typing import Any

from torch import Tensor, nn

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import EncoderMetadata
from ernie_vit.model.operators import Operators


class PatchEmbed(nn.Module):
    def __init__(self, config: ErnieVisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_width, config.hidden_size, bias=False)

    def forward(self, pixel_values: Tensor, num_rows: Tensor, ops: Operators) -> Tensor:
        return ops.patch_embed(pixel_values, self.proj.weight, num_rows=num_rows)


class Attention(nn.Module):
    def __init__(self, config: ErnieVisionConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.num_heads = config.num_heads

    def forward(
        self, x: Tensor, residual: Tensor, rotary: Tensor, sequences: dict[str, Any], num_rows: Tensor, ops: Operators
    ) -> Tensor:
        qkv = ops.qkv_rotary(x, self.qkv.weight, self.qkv.bias, rotary, num_heads=self.num_heads, num_rows=num_rows)
        mixed = ops.attention(*qkv.unbind(1), **sequences).flatten(1)
        return ops.linear(mixed, self.proj.weight, self.proj.bias, residual=residual, num_rows=num_rows)


class MLP(nn.Module):
    def __init__(self, config: ErnieVisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor, num_rows: Tensor, ops: Operators) -> Tensor:
        return ops.mlp(
            x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, residual=residual, num_rows=num_rows
        )


class Block(nn.Module):
    """``x += proj(attention(norm1(x)))``, ``x += fc2(quick_gelu(fc1(norm2(x))))``."""

    def __init__(self, config: ErnieVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor, sequences: dict[str, Any], num_rows: Tensor, ops: Operators) -> Tensor:
        x = self.attn(_norm(self.norm1, x, num_rows, ops), x, rotary, sequences, num_rows, ops)
        x = self.mlp(_norm(self.norm2, x, num_rows, ops), x, num_rows, ops)
        return x


class VisionTower(nn.Module):
    """Pixel rows to hidden rows, in the same order."""

    def __init__(self, config: ErnieVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.ln = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, pixel_values: Tensor, metadata: EncoderMetadata, ops: Operators) -> Tensor:
        """``[rows, patch_width]`` to ``[rows, hidden_size]`` at the parameters' dtype.

        Args:
            pixel_values: the processor's normalised rows, any floating dtype. There may be more rows than live ones (a
                captured graph's capacity); those may hold anything and their results are undefined.
            metadata: the rows' sequences, on the same device.
            ops: the stages' operators.
        """
        config, rows, num_rows = self.config, pixel_values.shape[0], metadata.num_rows
        x = self.patch_embed(pixel_values, num_rows, ops)
        rotary = ops.rotary_table(
            metadata.cu_seqlens,
            metadata.frame_sizes,
            num_rows=rows,
            head_dim=config.head_dim,
            theta=config.rope_theta,
        )
        sequences = ops.attention_arguments(
            metadata, num_rows=rows, num_heads=config.num_heads, head_dim=config.head_dim, dtype=x.dtype
        )
        for block in self.blocks:
            x = block(x, rotary, sequences, num_rows, ops)
        return _norm(self.ln, x, num_rows, ops)


def _norm(norm: nn.LayerNorm, x: Tensor, num_rows: Tensor, ops: Operators) -> Tensor:
    return ops.layer_norm(x, norm.weight, norm.bias, eps=norm.eps, num_rows=num_rows)
