"""The MLP of a block with its residual, against the eager pieces and against torch.compile."""

from collections.abc import Callable

import pytest
import torch

from bench.compiled import compiled
from bench.ideal import linear_flops
from bench.measure import Case, Inputs, Provider, Reference, Work
from bench.sizes import FRAMES, HIDDEN, INTERMEDIATE, drawn, live
from ernie_vit.kernels.mlp import mlp, mlp_ref

compiled_mlp = compiled(mlp_ref, "x", "residual")


@pytest.mark.parametrize("rows", FRAMES)
def test_mlp(rows: int, run_case: Callable[[Case], None]) -> None:
    few = rows // 8
    every, eighth = live(rows), live(few)

    def inputs(seed: int) -> Inputs:
        like = drawn(seed)
        return {
            "x": torch.randn(rows, HIDDEN, **like),
            "fc1_weight": torch.randn(INTERMEDIATE, HIDDEN, **like) / HIDDEN**0.5,
            "fc1_bias": torch.randn(INTERMEDIATE, **like),
            "fc2_weight": torch.randn(HIDDEN, INTERMEDIATE, **like) / INTERMEDIATE**0.5,
            "fc2_bias": torch.randn(HIDDEN, **like),
            "residual": torch.randn(rows, HIDDEN, **like),
        }

    def work(live_rows: int) -> Work:
        # the hidden activation is written and read once
        elements = 2 * HIDDEN * INTERMEDIATE + live_rows * (3 * HIDDEN + 2 * INTERMEDIATE)
        shapes = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
        padded = sum(linear_flops(live_rows, n, k, capacity=rows) for n, k in shapes)
        return Work(4 * live_rows * HIDDEN * INTERMEDIATE, 2 * elements, padded)

    reference = Reference(
        lambda i: mlp_ref(**{key: value.double() for key, value in i.items()}), lambda i: mlp_ref(**i)
    )
    providers = {
        "ours": Provider(lambda i: mlp(**i, num_rows=every), reference),
        "ours, 1/8 live": Provider(lambda i: mlp(**i, num_rows=eighth), reference, few, work(few)),
        "eager": Provider(reference.plain, reference),
        "torch.compile": Provider(lambda i: compiled_mlp(**i), reference, quick=False),
    }
    run_case(Case("mlp", "mlp", rows, inputs, providers, work(rows)))
