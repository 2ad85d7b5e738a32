"""How tests compare numbers: relative error to float64, within the error of plain PyTorch at the same dtype."""

import torch

# Two computations that round equally often differ in error by the luck of single roundings: under 1 % over the
# few thousand values that the smallest tests compare.
LUCK = 1.02


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """``||out - exact|| / ||exact||`` in float64; infinite if ``out`` is not finite everywhere."""
    difference = out.detach().double() - exact.detach().double()
    error = float(difference.norm() / exact.detach().double().norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def assert_within_budget(out: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, *, sums: int = 1) -> None:
    """``out`` is no farther from ``exact`` (float64) than ``plain``, the same computation in plain PyTorch.

    Args:
        out: the result under test.
        plain: plain PyTorch's result at the dtype of ``out``.
        exact: the result in float64.
        sums: how many products of matrices follow one another; counts in float32 alone.
    """
    assert out.shape == exact.shape
    assert out.dtype == plain.dtype
    error, budget = relative_error(out, exact), relative_error(plain, exact)
    # a float32 sum in another order differs by a few roundings even where plain PyTorch happens to be exact
    floor = sums * 4 * torch.finfo(out.dtype).eps if out.dtype == torch.float32 else 0.0
    assert error <= max(LUCK * budget, floor), f"relative error {error:.3e}, plain PyTorch's {budget:.3e}"
