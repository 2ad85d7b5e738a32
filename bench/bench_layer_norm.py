"""Layer norm of the tower's rows, against PyTorch's kernel and against torch.compile."""

from collections.abc import Callable

import pytest
import torch

from bench.measure import Case, Inputs, Provider, Reference
from bench.sizes import FRAMES, HIDDEN
from ernie_vit.kernels.layer_norm import layer_norm, layer_norm_ref

compiled = torch.compile(layer_norm_ref, dynamic=True)


@pytest.mark.parametrize("rows", FRAMES)
def test_layer_norm(rows: int, run_case: Callable[[Case], None]) -> None:
    every, eighth = (torch.tensor([live], dtype=torch.int32, device="cuda") for live in (rows, rows // 8))

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        return {
            "x": torch.randn(rows, HIDDEN, **like) + 1,
            "weight": torch.randn(HIDDEN, **like),
            "bias": torch.randn(HIDDEN, **like),
        }

    reference = Reference(
        lambda i: layer_norm_ref(**{key: value.double() for key, value in i.items()}, eps=1e-6),
        lambda i: layer_norm_ref(**i, eps=1e-6),
    )
    providers = {
        "ours": Provider(lambda i: layer_norm(**i, eps=1e-6, num_rows=every), reference),
        "ours, 1/8 live": Provider(lambda i: layer_norm(**i, eps=1e-6, num_rows=eighth), reference, live=rows // 8),
        "F.layer_norm": Provider(reference.plain, reference),
        "torch.compile": Provider(lambda i: compiled(**i, eps=1e-6), reference),
    }
    run_case(Case("layer_norm", "1280", rows, inputs, providers, 8 * rows * HIDDEN, 4 * rows * HIDDEN))
