"""Root mean square norm against float64, with the error of plain PyTorch as the budget."""

import pytest
import torch
from accuracy import assert_within_budget
from torch import Tensor

from ernie_vit.kernels.rms_norm import rms_norm, rms_norm_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TEXT = 2560


def inputs(rows: int, width: int, dtype: torch.dtype, device: str, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = scale * (torch.randn(rows, width, generator=generator) + 1)  # a mean that must not be taken off
    weight = 1 + 0.2 * torch.randn(width, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype)


def check(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> None:
    exact = rms_norm_ref(x.double(), weight.double(), eps=eps)
    assert_within_budget(rms_norm(x, weight, eps=eps), rms_norm_ref(x, weight, eps=eps), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [TEXT, 128, 97, 1], ids=["text", "small", "odd", "one-column"])
def test_equals_float64_within_the_error_of_torch(device: str, dtype: torch.dtype, width: int) -> None:
    check(*inputs(37, width, dtype, device))


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_eps_is_the_callers(device: str, eps: float) -> None:
    check(*inputs(8, TEXT, torch.float32, device, scale=3e-3), eps=eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counts_in_float32(dtype: torch.dtype) -> None:
    """The squares of 300 and more pass float16's largest number; the mean of many in bfloat16 loses digits."""
    x = (300 + torch.arange(128.0)).to(dtype).view(1, 128)
    exact = x.double() / (x.double().square().mean() + 1e-5).sqrt()
    assert torch.equal(rms_norm_ref(x, torch.ones(128, dtype=dtype), eps=1e-5), exact.to(dtype))


@pytest.mark.parametrize("stride", [2 * TEXT, TEXT + 16, TEXT + 1], ids=["double", "aligned", "odd"])
def test_strided_rows(device: str, stride: int) -> None:
    x, weight = inputs(9, stride, torch.bfloat16, device)
    check(x[:, :TEXT], weight[:TEXT])


def test_misaligned_and_empty_input(device: str) -> None:
    x, weight = inputs(1, 9 * TEXT + 1, torch.bfloat16, device)
    check(x[0, 1:].view(9, TEXT), weight[1 : TEXT + 1])
    assert rms_norm(x[:0, :TEXT], weight[:TEXT], eps=1e-5).shape == (0, TEXT)


@pytest.mark.parametrize("live", [0, 1, 8, 13])
def test_rows_past_the_live_ones_are_neither_read_nor_written(device: str, live: int) -> None:
    x, weight = inputs(13, TEXT, torch.bfloat16, device)
    alone = rms_norm(x[:live].clone(), weight, eps=1e-5)
    x[live:] = float("nan")
    num_rows = torch.tensor([live], dtype=torch.int32, device=device)
    assert torch.equal(rms_norm(x, weight, eps=1e-5, num_rows=num_rows)[:live], alone)

    launch = pytest.importorskip("ernie_vit.kernels.triton.layer_norm").launch
    out = torch.full_like(x, -7.0)
    launch(x, weight, None, out, num_rows, 1e-5)
    assert torch.equal(out[:live], alone)
    assert (out[live:] == -7.0).all()


def test_registered_op(device: str) -> None:
    x, weight = inputs(7, 160, torch.bfloat16, device)
    # no rows past the live ones: opcheck compares outputs as a whole
    for count in (None, torch.tensor([7], dtype=torch.int32, device=device)):
        torch.library.opcheck(torch.ops.ernie_vit.rms_norm.default, (x, weight, 1e-5, count))


def test_reference_is_differentiable() -> None:
    x, weight = (tensor.double().requires_grad_() for tensor in inputs(2, 8, torch.float32, "cpu"))
    assert torch.autograd.gradcheck(lambda *args: rms_norm_ref(*args, eps=1e-5), (x, weight))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4)}, ValueError, r"x: expected shape \[\*, \*\], got \[4\]"),
        ({"x": torch.zeros(4, 0)}, ValueError, "x: expected 1 to 16384 columns, got 0"),
        ({"weight": torch.ones(7)}, ValueError, r"weight: expected shape \[8\], got \[7\]"),
        ({"weight": torch.ones(8).half()}, TypeError, "weight: expected torch.float32, got torch.float16"),
        ({"num_rows": torch.tensor([3])}, TypeError, "num_rows: expected torch.int32, got torch.int64"),
    ],
)
def test_refuses_bad_arguments(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {"x": torch.zeros(4, 8), "weight": torch.ones(8)} | change
    with pytest.raises(error, match=message):
        rms_norm(**arguments, eps=1e-5)
