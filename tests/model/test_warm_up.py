"""The warm-up runs what a serving process will run: pixel rows of both dtypes, with room for every number of rows."""

import dataclasses

import reference
import torch

from ernie_vit.model.operators import TORCH_RESAMPLER, choose_operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.warm_up import row_regimes, row_sizes, warm_up, warm_up_resampler


def test_pixel_rows_of_float32_and_of_the_towers_dtype_meet_every_regime() -> None:
    ops = choose_operators("torch")
    seen = set()

    def record(pixel_values: torch.Tensor, weight: torch.Tensor, *, num_rows: torch.Tensor) -> torch.Tensor:
        assert num_rows.tolist() == [0]
        seen.add((len(pixel_values), pixel_values.dtype))
        return ops.patch_embed(pixel_values, weight, num_rows=num_rows)

    warm_up(VisionTower(reference.SMALL).bfloat16(), dataclasses.replace(ops, patch_embed=record))
    sizes = row_sizes(torch.device("cpu"))
    assert sizes[:-1] == row_regimes(torch.device("cpu"))
    assert sizes[-1] > sizes[-2]
    assert seen == {(rows, dtype) for rows in sizes for dtype in (torch.float32, torch.bfloat16)}


def test_the_resampler_meets_every_regime_with_its_windows_and_its_tokens() -> None:
    seen = []

    def record(
        x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor, num_rows: torch.Tensor, **__: str
    ) -> torch.Tensor:
        assert num_rows.tolist() == [0]
        seen.append(len(x))
        return x.new_zeros(len(x), len(weight))

    warm_up_resampler(Resampler(reference.SMALL), dataclasses.replace(TORCH_RESAMPLER, linear=record))
    sizes = row_sizes(torch.device("cpu"))
    assert seen == [rows for rows in sizes for _ in range(5)]
