"""Layer norm of the tower's rows, against PyTorch's kernel and against torch.compile."""

from collections.abc import Callable

import pytest
import torch

from bench.compiled import compiled
from bench.measure import Case, Inputs, Provider, Reference, Work
from bench.sizes import FRAMES, HIDDEN, drawn, live
from ernie_vit.kernels.layer_norm import layer_norm, layer_norm_ref

EPS = 1e-6
compiled_layer_norm = compiled(layer_norm_ref, "x")


@pytest.mark.parametrize("rows", FRAMES)
def test_layer_norm(rows: int, run_case: Callable[[Case], None]) -> None:
    few = rows // 8
    every, eighth = live(rows), live(few)

    def inputs(seed: int) -> Inputs:
        like = drawn(seed)
        return {
            "x": torch.randn(rows, HIDDEN, **like) + 1,
            "weight": torch.randn(HIDDEN, **like),
            "bias": torch.randn(HIDDEN, **like),
        }

    def work(live_rows: int) -> Work:
        return Work(8 * live_rows * HIDDEN, 4 * live_rows * HIDDEN)

    reference = Reference(
        lambda i: layer_norm_ref(**{key: value.double() for key, value in i.items()}, eps=EPS),
        lambda i: layer_norm_ref(**i, eps=EPS),
    )
    providers = {
        "ours": Provider(lambda i: layer_norm(**i, eps=EPS, num_rows=every), reference),
        "ours, 1/8 live": Provider(lambda i: layer_norm(**i, eps=EPS, num_rows=eighth), reference, few, work(few)),
        "F.layer_norm": Provider(reference.plain, reference),
        "torch.compile": Provider(lambda i: compiled_layer_norm(**i, eps=EPS), reference, quick=False),
    }
    run_case(Case("layer_norm", "1280", rows, inputs, providers, work(rows)))
