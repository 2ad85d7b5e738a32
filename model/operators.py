"""Which function computes each stage of the encoder: the Triton kernels or their plain PyTorch references.

Both have the same signatures, so tower and resampler are written once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ernie_vit.kernels.attention import attention, attention_ref, attention_work_list
from ernie_vit.kernels.layer_norm import layer_norm, layer_norm_ref
from ernie_vit.kernels.linear import linear, linear_ref
from ernie_vit.kernels.mlp import mlp, mlp_ref
from ernie_vit.kernels.patch_embed import patch_embed, patch_embed_ref
from ernie_vit.kernels.qkv_rotary import qkv_rotary, qkv_rotary_ref
from ernie_vit.kernels.rms_norm import rms_norm, rms_norm_ref
from ernie_vit.kernels.rotary import apply_rotary, apply_rotary_ref, rotary_table, rotary_table_ref
from ernie_vit.model.metadata import EncoderMetadata

Backend = Literal["triton", "torch"]
TOWER_STAGES = ("attention", "rotary", "mlp", "norm", "linear")
STAGES = (*TOWER_STAGES, "resampler")


@dataclass(frozen=True)
class ResamplerOperators:
    """The functions of the resampler."""

    linear: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]


@dataclass(frozen=True)
class Operators:
    """The functions of one forward pass. ``attention_arguments`` makes what all blocks' attention shares."""

    linear: Callable[..., Tensor]
    patch_embed: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    rotary_table: Callable[..., Tensor]
    qkv_rotary: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    attention_arguments: Callable[..., dict[str, Any]]
    resampler: ResamplerOperators


TRITON_RESAMPLER = ResamplerOperators(linear, layer_norm, rms_norm)
TORCH_RESAMPLER = ResamplerOperators(linear_ref, layer_norm_ref, rms_norm_ref)


def choose_operators(backend: Backend, stages: Mapping[str, Backend] | None = None) -> Operators:
    """The operators of ``backend``, with single stages taken from the other one to find a fault by halves.

    The resampler is plain PyTorch on every backend, unless ``stages`` says otherwise.

    Args:
        backend: "triton" or "torch", for the tower.
        stages: stage (one of ``STAGES``) to backend, for the stages that differ.

    Raises:
        ValueError: an unknown stage or backend.
    """
    stages = dict(stages or {})
    unknown = set(stages) - set(STAGES)
    if unknown:
        raise ValueError(f"stages: expected names out of {', '.join(STAGES)}, got {', '.join(sorted(unknown))}")
    wrong = ({backend} | set(stages.values())) - {"triton", "torch"}
    if wrong:
        raise ValueError(f"backend: expected 'triton' or 'torch', got {', '.join(map(repr, sorted(wrong)))}")
    triton = {stage: stages.get(stage, backend) == "triton" for stage in TOWER_STAGES}
    return Operators(
        linear=linear if triton["linear"] else linear_ref,
        patch_embed=patch_embed if triton["linear"] else patch_embed_ref,
        mlp=mlp if triton["mlp"] else mlp_ref,
        layer_norm=layer_norm if triton["norm"] else layer_norm_ref,
        rotary_table=rotary_table if triton["rotary"] else rotary_table_ref,
        qkv_rotary=_choose_qkv_rotary(linear=triton["linear"], rotary=triton["rotary"]),
        attention=attention if triton["attention"] else attention_ref,
        attention_arguments=_triton_attention_arguments if triton["attention"] else _torch_attention_arguments,
        resampler=TRITON_RESAMPLER if stages.get("resampler") == "triton" else TORCH_RESAMPLER,
    )


def _choose_qkv_rotary(*, linear: bool, rotary: bool) -> Callable[..., Tensor]:
    """The qkv projection with its rotation, each on Triton or not."""
    if linear and rotary:
        return qkv_rotary
    if linear:
        return _linear_then_reference
    return _reference_then_rotary if rotary else qkv_rotary_ref


def _linear_then_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    *,
    num_heads: int,
    num_rows: Tensor | None = None,
) -> Tensor:
    qkv = linear(x, weight, bias, num_rows=num_rows).unflatten(1, (3, num_heads, -1))
    return apply_rotary_ref(qkv, table, num_rows=num_rows)


def _reference_then_rotary(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    *,
    num_heads: int,
    num_rows: Tensor | None = None,
) -> Tensor:
    qkv = linear_ref(x, weight, bias).unflatten(1, (3, num_heads, -1))
    return apply_rotary(qkv, table, num_rows=num_rows)


def _triton_attention_arguments(
    metadata: EncoderMetadata, *, num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    work_list = attention_work_list(
        metadata.cu_seqlens,
        num_rows=num_rows,
        max_seqlen=metadata.max_seqlen,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    return {"cu_seqlens": metadata.cu_seqlens, "max_seqlen": metadata.max_seqlen, "work_list": work_list}


def _torch_attention_arguments(
    metadata: EncoderMetadata, *, num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """PyTorch's attention takes one sequence at a time, cut on the host: offsets there spare it 32 waits a pass."""
    del num_rows, num_heads, head_dim, dtype
    return {"cu_seqlens": metadata.cu_seqlens_host, "max_seqlen": metadata.max_seqlen}
