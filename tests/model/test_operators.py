"""Stages can be taken from the other backend one by one, to find a fault by halves."""

import pytest
import torch
from torch import Tensor

from ernie_vit.kernels.qkv_rotary import qkv_rotary, qkv_rotary_ref
from ernie_vit.model.operators import TORCH_RESAMPLER, TOWER_STAGES, TRITON_RESAMPLER, Backend, choose_operators

HEADS, HEAD_DIM, ROWS = 2, 16, 5
OF_STAGE = {
    "attention": ("attention", "attention_arguments"),
    "rotary": ("rotary_table",),
    "mlp": ("mlp",),
    "norm": ("layer_norm",),
    "linear": ("linear", "patch_embed"),
}


def arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 24, generator=generator)
    weight = torch.randn(3 * HEADS * HEAD_DIM, 24, generator=generator)
    angles = torch.randn(ROWS, HEAD_DIM // 2, generator=generator)
    return x, weight, weight[:, 0].contiguous(), torch.stack((angles.cos(), angles.sin()), dim=1)


def test_projection_and_rotation_are_one_call_where_both_are_on_one_backend() -> None:
    assert choose_operators("triton").qkv_rotary is qkv_rotary
    assert choose_operators("torch").qkv_rotary is qkv_rotary_ref


@pytest.mark.parametrize("stage", TOWER_STAGES)
@pytest.mark.parametrize(("backend", "other"), [("triton", "torch"), ("torch", "triton")])
def test_a_stage_is_taken_from_the_other_backend_alone(backend: Backend, other: Backend, stage: str) -> None:
    ops, mine, others = choose_operators(backend, {stage: other}), choose_operators(backend), choose_operators(other)
    for of, names in OF_STAGE.items():
        for name in names:
            assert getattr(mine, name) is not getattr(others, name)
            assert getattr(ops, name) is getattr(others if of == stage else mine, name)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_resampler_is_pytorchs_unless_asked_for(backend: Backend) -> None:
    assert choose_operators(backend).resampler is TORCH_RESAMPLER
    assert choose_operators(backend, {"resampler": "triton"}).resampler is TRITON_RESAMPLER


@pytest.mark.interpreter
@pytest.mark.parametrize("stage", ["linear", "rotary"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_projection_and_rotation_on_different_backends(backend: str, stage: str) -> None:
    other = "torch" if backend == "triton" else "triton"
    ops = choose_operators(backend, {stage: other})
    num_rows = torch.tensor([ROWS], dtype=torch.int32)
    out = ops.qkv_rotary(*arguments(), num_heads=HEADS, num_rows=num_rows)
    torch.testing.assert_close(out, qkv_rotary_ref(*arguments(), num_heads=HEADS))
