"""The tower's linears with their epilogues, against cuBLAS and against torch.compile."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from bench.measure import Case, Inputs, Provider, Reference
from bench.sizes import FRAMES, HIDDEN, INTERMEDIATE
from ernie_vit.kernels.linear import linear, linear_ref
from ernie_vit.kernels.patch_embed import patch_embed, patch_embed_ref

PIXELS = 588
compiled = torch.compile(linear_ref, dynamic=True)


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
        torch.manual_seed(seed)
        like = {"device": "cuda", "dtype": torch.bfloat16}
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


def count(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("rows", FRAMES)
@pytest.mark.parametrize("name", SHAPES)
def test_linear(name: str, rows: int, run_case: Callable[[Case], None]) -> None:
    shape = SHAPES[name]
    every, eighth = count(rows), count(rows // 8)
    whole = Reference(lambda i: linear_ref(**double(i)), lambda i: linear_ref(**i))
    bare = Reference(
        lambda i: F.linear(i["x"].double(), i["weight"].double(), i["bias"].double()),
        lambda i: F.linear(i["x"], i["weight"], i["bias"]),
    )
    providers = {
        "ours": Provider(lambda i: linear(**i, num_rows=every), whole),
        "ours, 1/8 live": Provider(lambda i: linear(**i, num_rows=eighth), whole, live=rows // 8),
        "cuBLAS, bias only": Provider(bare.plain, bare),
        "torch.compile": Provider(lambda i: compiled(**i), whole),
    }
    if shape.activation or shape.residual:
        providers["cuBLAS + eager epilogue"] = Provider(whole.plain, whole)
    elements = rows * shape.k + shape.n * shape.k + rows * shape.n * (1 + shape.residual)
    run_case(Case("linear", name, rows, make(shape, rows), providers, 2 * rows * shape.n * shape.k, 2 * elements))


@pytest.mark.parametrize("rows", FRAMES)
def test_patch_embed(rows: int, run_case: Callable[[Case], None]) -> None:
    every, eighth = count(rows), count(rows // 8)

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        weight = torch.randn(HIDDEN, PIXELS, device="cuda", dtype=torch.bfloat16) / PIXELS**0.5
        return {"pixel_values": torch.randn(rows, PIXELS, device="cuda"), "weight": weight}

    # the pixel rows are rounded to the weight's dtype: that is part of the operation
    exact = Reference(
        lambda i: F.linear(i["pixel_values"].bfloat16().double(), i["weight"].double()),
        lambda i: patch_embed_ref(**i),
    )
    providers = {
        "ours": Provider(lambda i: patch_embed(**i, num_rows=every), exact),
        "ours, 1/8 live": Provider(lambda i: patch_embed(**i, num_rows=eighth), exact, live=rows // 8),
        "cast + cuBLAS": Provider(exact.plain, exact),
    }
    moved = 4 * rows * PIXELS + 2 * HIDDEN * PIXELS + 2 * rows * HIDDEN
    run_case(Case("linear", "patch_embed", rows, inputs, providers, 2 * rows * HIDDEN * PIXELS, moved))
