"""Random calls of the linear for its tests."""

import torch
from accuracy import assert_within_budget
from torch import Tensor

from ernie_vit.kernels.linear import linear, linear_ref
from ernie_vit.kernels.tiles.linear import HopperTile, TritonTile

N, K = 320, 160
# What outputs hold before: dead rows of x and residual hold NaN, and a result of those must not pass for untouched.
POISON = -777.0


class Case:
    """Random arguments of one call; parts that the epilogue lacks are None."""

    def __init__(
        self, rows: int, dtype: torch.dtype, device: str, epilogue: str, *, n: int = N, k: int = K, seed: int = 0
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.x = random(rows, k).to(dtype)
        self.weight = (random(n, k) / k**0.5).to(dtype)
        self.bias = random(n).to(dtype) if "bias" in epilogue else None
        self.residual = random(rows, n).to(dtype) if "residual" in epilogue else None
        self.activation = next((part for part in epilogue.split() if part.endswith("gelu")), None)

    def arguments(self, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> tuple[tuple, dict]:
        def cast(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or dtype is None else tensor.to(dtype)

        residual = None if self.residual is None else cast(self.residual[rows])
        positional = (cast(self.x[rows]), cast(self.weight), cast(self.bias))
        return positional, {"activation": self.activation, "residual": residual}

    def run(self, **more: Tensor) -> Tensor:
        positional, named = self.arguments()
        return linear(*positional, **named, **more)

    def run_tile(self, tile: HopperTile | TritonTile, num_rows: Tensor | None = None) -> Tensor:
        """One tile by the kernel's launcher, on an output full of ``POISON``."""
        if isinstance(tile, HopperTile):
            from ernie_vit.kernels.hopper.linear import launch_linear
        else:
            from ernie_vit.kernels.triton.linear import launch_linear
        out = torch.full((len(self.x), len(self.weight)), POISON, dtype=self.x.dtype, device=self.x.device)
        arguments = (self.x, self.weight, self.bias, self.residual, num_rows, out)
        launch_linear(*arguments, activation=self.activation, tile=tile)
        return out

    def check(self, out: Tensor, rows: slice = slice(None)) -> None:
        plain, exact = self.arguments(rows=rows), self.arguments(torch.float64, rows)
        assert_within_budget(out[rows], linear_ref(*plain[0], **plain[1]), linear_ref(*exact[0], **exact[1]))
