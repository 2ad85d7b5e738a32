"""The MLP against float64, with the error of plain PyTorch as the budget."""

import pytest
import torch
from accuracy import assert_within_budget, relative_error
from torch import Tensor

from ernie_vit.kernels.mlp import mlp, mlp_ref

WIDTH, HIDDEN = 160, 640


def inputs(
    rows: int, dtype: torch.dtype, device: str, *, width: int = WIDTH, hidden: int = HIDDEN
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of ``mlp`` and a residual."""
    generator = torch.Generator(device).manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    fc1, fc2 = random(hidden, width) / width**0.5, random(width, hidden) / hidden**0.5
    tensors = (random(rows, width), fc1, random(hidden), fc2, random(width))
    return tuple(tensor.to(dtype) for tensor in tensors), random(rows, width).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_equals_float64_within_the_error_of_torch(device: str, dtype: torch.dtype, with_residual: bool) -> None:
    tensors, residual = inputs(65, dtype, device)
    plain_residual = residual if with_residual else None
    exact_residual = residual.double() if with_residual else None
    assert_within_budget(
        mlp(*tensors, residual=plain_residual),
        mlp_ref(*tensors, residual=plain_residual),
        mlp_ref(*(tensor.double() for tensor in tensors), residual=exact_residual),
    )


def test_is_the_formula_and_not_its_neighbours(device: str) -> None:
    (x, fc1_weight, fc1_bias, fc2_weight, fc2_bias), residual = inputs(33, torch.float32, device)
    out = mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual=residual).double()
    hidden = x.double() @ fc1_weight.double().T + fc1_bias.double()

    def finish(activated: Tensor) -> Tensor:
        return residual.double() + activated @ fc2_weight.double().T + fc2_bias.double()

    assert relative_error(out, finish(hidden * torch.sigmoid(1.702 * hidden))) < 1e-6
    assert relative_error(out, finish(torch.nn.functional.gelu(hidden))) > 1e-3
    assert relative_error(out, finish(torch.nn.functional.silu(hidden))) > 1e-2


def test_dead_rows_reach_no_live_one(device: str) -> None:
    tensors, residual = inputs(70, torch.bfloat16, device)
    full = mlp(*tensors, residual=residual)
    tensors[0][41:] = float("nan")
    residual[41:] = float("nan")
    num_rows = torch.tensor([41], dtype=torch.int32, device=device)
    assert torch.equal(mlp(*tensors, residual=residual, num_rows=num_rows)[:41], full[:41])


def test_no_rows_and_no_biases(device: str) -> None:
    tensors, residual = inputs(0, torch.bfloat16, device)
    assert mlp(*tensors, residual=residual).shape == (0, WIDTH)
    (x, fc1_weight, _, fc2_weight, _), _ = inputs(3, torch.float32, device)
    out = mlp(x, fc1_weight, None, fc2_weight, None)
    assert relative_error(out, mlp_ref(x.double(), fc1_weight.double(), None, fc2_weight.double(), None)) < 1e-6


@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    rows, tail = 420_000, 300
    tensors, residual = inputs(rows, torch.bfloat16, "cuda", width=1280, hidden=5120)
    out = mlp(*tensors, residual=residual)
    assert not out.isnan().any()
    last = (tensors[0][-tail:], *tensors[1:])
    assert torch.equal(out[-tail:], mlp(*last, residual=residual[-tail:]))
    assert_within_budget(
        out[-tail:],
        mlp_ref(*last, residual=residual[-tail:]),
        mlp_ref(*(tensor.double() for tensor in last), residual=residual[-tail:].double()),
    )
