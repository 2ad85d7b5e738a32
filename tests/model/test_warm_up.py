"""The warm-up runs what a serving process will run: pixel rows of both dtypes, with room for every number of rows."""

import dataclasses

import reference
import torch

from ernie_vit.model.operators import choose_operators
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.warm_up import row_regimes, warm_up


def test_pixel_rows_of_float32_and_of_the_towers_dtype_meet_every_regime() -> None:
    ops = choose_operators("torch")
    seen = set()

    def record(pixel_values: torch.Tensor, weight: torch.Tensor, *, num_rows: torch.Tensor) -> torch.Tensor:
        assert num_rows.tolist() == [0]
        seen.add((len(pixel_values), pixel_values.dtype))
        return ops.patch_embed(pixel_values, weight, num_rows=num_rows)

    warm_up(VisionTower(reference.SMALL).bfloat16(), dataclasses.replace(ops, patch_embed=record))
    bounds = row_regimes(torch.device("cpu"))
    sizes = [*bounds, bounds[-1] + 1]
    assert seen == {(rows, dtype) for rows in sizes for dtype in (torch.float32, torch.bfloat16)}
