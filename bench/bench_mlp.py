"""The MLP of a block with its residual, against the eager pieces and against torch.compile."""

from collections.abc import Callable

import pytest
import torch

from bench.measure import Case, Inputs, Provider, Reference
from bench.sizes import FRAMES, HIDDEN, INTERMEDIATE
from ernie_vit.kernels.mlp import mlp, mlp_ref

compiled = torch.compile(mlp_ref, dynamic=True)


@pytest.mark.parametrize("rows", FRAMES)
def test_mlp(rows: int, run_case: Callable[[Case], None]) -> None:
    every, eighth = (torch.tensor([live], dtype=torch.int32, device="cuda") for live in (rows, rows // 8))

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        return {
            "x": torch.randn(rows, HIDDEN, **like),
            "fc1_weight": torch.randn(INTERMEDIATE, HIDDEN, **like) / HIDDEN**0.5,
            "fc1_bias": torch.randn(INTERMEDIATE, **like),
            "fc2_weight": torch.randn(HIDDEN, INTERMEDIATE, **like) / INTERMEDIATE**0.5,
            "fc2_bias": torch.randn(HIDDEN, **like),
            "residual": torch.randn(rows, HIDDEN, **like),
        }

    reference = Reference(
        lambda i: mlp_ref(**{key: value.double() for key, value in i.items()}), lambda i: mlp_ref(**i)
    )
    providers = {
        "ours": Provider(lambda i: mlp(**i, num_rows=every), reference),
        "ours, 1/8 live": Provider(lambda i: mlp(**i, num_rows=eighth), reference, live=rows // 8),
        "eager": Provider(reference.plain, reference),
        "torch.compile": Provider(lambda i: compiled(**i), reference),
    }
    # the hidden activation is written and read once
    elements = 2 * HIDDEN * INTERMEDIATE + rows * (3 * HIDDEN + 2 * INTERMEDIATE)
    run_case(Case("mlp", "mlp", rows, inputs, providers, 4 * rows * HIDDEN * INTERMEDIATE, 2 * elements))
