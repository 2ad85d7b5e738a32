"""The tower's linears with their epilogues, against cuBLAS and against torch.compile."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from bench.compiled import compiled
from bench.ideal import linear_flops
from bench.measure import Case, Inputs, Provider, Reference, Work
from bench.sizes import DTYPE, FRAMES, HIDDEN, INTERMEDIATE, PIXELS, drawn, live
from ernie_vit.kernels.linear import linear, linear_ref
from ernie_vit.kernels.patch_embed import patch_embed, patch_embed_ref

compiled_linear = compiled(linear_ref, "x", "residual")
compiled_patch_embed = compiled(patch_embed_ref, "pixel_values")


@dataclass(frozen=True)
class Shape:
    n: int
    k: int
    activation: str | None = None
    residual: bool = False


SHAPES = {
    "qkv": Shape(3 * HIDDEN, HIDDEN),
    "proj": Shape(HIDDEN, HIDDEN, residual=True),
    "fc1": Shape(INTERMEDIATE, HIDDEN, activation="quick_gelu"),
    "fc2": Shape(HIDDEN, INTERMEDIATE, residual=True),
}


def make(shape: Shape, rows: int) -> Callable[[int], Inputs]:
    def inputs(seed: int) -> Inputs:
        like = drawn(seed)
        return {
            "x": torch.randn(rows, shape.k, **like),
            "weight": torch.randn(shape.n, shape.k, **like) / shape.k**0.5,
            "bias": torch.randn(shape.n, **like),
            "residual": torch.randn(rows, shape.n, **like) if shape.residual else None,
            "activation": shape.activation,
        }

    return inputs


def double(inputs: Inputs) -> Inputs:
    return {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def work(shape: Shape, rows: int, capacity: int) -> Work:
    elements = rows * shape.k + shape.n * shape.k + rows * shape.n * (1 + shape.residual)
    padded = linear_flops(rows, shape.n, shape.k, capacity=capacity)
    return Work(2 * rows * shape.n * shape.k, 2 * elements, padded)


@pytest.mark.parametrize("rows", FRAMES)
@pytest.mark.parametrize("name", SHAPES)
def test_linear(name: str, rows: int, run_case: Callable[[Case], None]) -> None:
    shape, few = SHAPES[name], rows // 8
    every, eighth = live(rows), live(few)
    whole = Reference(lambda i: linear_ref(**double(i)), lambda i: linear_ref(**i))
    bare = Reference(
        lambda i: F.linear(i["x"].double(), i["weight"].double(), i["bias"].double()),
        lambda i: F.linear(i["x"], i["weight"], i["bias"]),
    )
    providers = {
        "ours": Provider(lambda i: linear(**i, num_rows=every), whole),
        "ours, 1/8 live": Provider(lambda i: linear(**i, num_rows=eighth), whole, few, work(shape, few, rows)),
        "cuBLAS, bias only": Provider(bare.plain, bare),
    }
    if shape.activation or shape.residual:
        providers["cuBLAS + eager epilogue"] = Provider(whole.plain, whole)
        providers["torch.compile"] = Provider(lambda i: compiled_linear(**i), whole, quick=False)
    run_case(Case("linear", name, rows, make(shape, rows), providers, work(shape, rows, rows)))


@pytest.mark.parametrize("rows", FRAMES)
def test_patch_embed(rows: int, run_case: Callable[[Case], None]) -> None:
    few = rows // 8
    every, eighth = live(rows), live(few)

    def inputs(seed: int) -> Inputs:
        weight = torch.randn(HIDDEN, PIXELS, **drawn(seed)) / PIXELS**0.5
        return {"pixel_values": torch.randn(rows, PIXELS, **drawn(seed, torch.float32)), "weight": weight}

    def work(live_rows: int) -> Work:
        moved = 4 * live_rows * PIXELS + 2 * HIDDEN * PIXELS + 2 * live_rows * HIDDEN
        return Work(2 * live_rows * HIDDEN * PIXELS, moved, linear_flops(live_rows, HIDDEN, PIXELS, capacity=rows))

    # the pixel rows are rounded to the weight's dtype: that is part of the operation
    exact = Reference(
        lambda i: F.linear(i["pixel_values"].to(DTYPE).double(), i["weight"].double()),
        lambda i: patch_embed_ref(**i),
    )
    providers = {
        "ours": Provider(lambda i: patch_embed(**i, num_rows=every), exact),
        "ours, 1/8 live": Provider(lambda i: patch_embed(**i, num_rows=eighth), exact, few, work(few)),
        "cast + cuBLAS": Provider(exact.plain, exact),
        "torch.compile": Provider(lambda i: compiled_patch_embed(**i), exact, quick=False),
    }
    run_case(Case("linear", "patch_embed", rows, inputs, providers, work(rows)))
