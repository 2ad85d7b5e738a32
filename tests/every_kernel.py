"""A small call of every public kernel, for tests of what all of them do alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ernie_vit.kernels.attention import attention, attention_work_list
from ernie_vit.kernels.layer_norm import layer_norm
from ernie_vit.kernels.linear import linear
from ernie_vit.kernels.mlp import mlp
from ernie_vit.kernels.patch_embed import patch_embed
from ernie_vit.kernels.qkv_rotary import qkv_rotary
from ernie_vit.kernels.rms_norm import rms_norm
from ernie_vit.kernels.rotary import apply_rotary, rotary_table

ROWS, HEAD_DIM, PIXELS = 130, 80, 588
FRAMES = [(2, 8), (6, 10), (6, 9 * 2)]  # in patches; the last one is left empty
LENGTHS = [65, 65]  # with them a work list is full, whatever the tile: no undefined rows


@dataclass(frozen=True)
class Call:
    function: Callable[..., Tensor]
    arguments: dict[str, Any]

    def __call__(self, **changed: Any) -> Tensor:
        return self.function(**(self.arguments | changed))

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}


def rotate_a_copy(qkv: Tensor, table: Tensor, num_rows: Tensor) -> Tensor:
    """``apply_rotary``, which works in place, on arguments that stay as they are."""
    return apply_rotary(qkv.clone(), table, num_rows=num_rows)


def every_kernel(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Call]:
    """Calls by name, the same on every device; every row is live. On a GPU they have the tower's widths."""
    heads = 16 if device.startswith("cuda") else 2
    width, hidden = heads * HEAD_DIM, 4 * heads * HEAD_DIM
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def weight(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=generator) / k**0.5).to(device, dtype)

    def integers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    live = {"num_rows": integers([ROWS])}
    x, bias, residual = random(ROWS, width), random(width), random(ROWS, width)
    q, k, v = random(ROWS, 3, heads, HEAD_DIM).unbind(1)
    angles = random(ROWS, HEAD_DIM // 2, dtype=torch.float32)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    offsets = {"cu_seqlens": integers([0, *LENGTHS]).cumsum(0, dtype=torch.int32), "max_seqlen": max(LENGTHS)}
    ends = torch.tensor([0, *(height * width for height, width in FRAMES[:-1])]).cumsum(0).tolist()
    in_two = {"fc1_weight": weight(hidden, width), "fc1_bias": random(hidden)}
    in_two |= {"fc2_weight": weight(width, hidden), "fc2_bias": bias}
    sizes = {"num_rows": ROWS, "num_heads": heads, "head_dim": HEAD_DIM, "dtype": dtype}
    square = {"x": x, "weight": weight(width, width), "bias": bias, "residual": residual}
    index = integers([ROWS - 1 - row for row in range(ROWS)])
    return {
        "linear": Call(linear, {**square, **live}),
        "linear with gelu": Call(linear, {**square, "activation": "gelu", **live}),
        "patch_embed": Call(
            patch_embed,
            {"pixel_values": random(ROWS, PIXELS, dtype=torch.float32), "weight": weight(width, PIXELS), **live},
        ),
        "mlp": Call(mlp, {"x": x, **in_two, "residual": residual, **live}),
        "layer_norm": Call(layer_norm, {"x": x, "weight": bias, "bias": bias, "index": index, "eps": 1e-6, **live}),
        "rms_norm": Call(rms_norm, {"x": x, "weight": bias, "eps": 1e-5, **live}),
        "rotary_table": Call(
            rotary_table,
            {
                "cu_seqlens": integers([*ends, ends[-1]]),
                "frame_sizes": integers(FRAMES),
                "num_rows": ends[-1],
                "head_dim": HEAD_DIM,
            },
        ),
        "apply_rotary": Call(rotate_a_copy, {"qkv": torch.stack((q, k, v), dim=1), "table": table, **live}),
        "qkv_rotary": Call(
            qkv_rotary,
            {"x": x, "weight": weight(3 * width, width), "bias": random(3 * width), "table": table, "num_heads": heads}
            | live,
        ),
        "attention_work_list": Call(attention_work_list, {**offsets, **sizes}),
        "attention": Call(attention, {"q": q, "k": k, "v": v, **offsets}),
    }
