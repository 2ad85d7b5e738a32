"""Each piece is compiled once for all row counts."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from bench.bench_rotary import project_and_rotate_eagerly, rotate_eagerly
from bench.compiled import compiled
from bench.sizes import HEAD_DIM, HEADS, HIDDEN
from ernie_vit.kernels.layer_norm import layer_norm_ref
from ernie_vit.kernels.linear import linear_ref
from ernie_vit.kernels.mlp import mlp_ref


def random(*shape: int) -> Tensor:
    return torch.randn(*shape) / 8


def linear(rows: int) -> dict[str, Any]:
    return {
        "x": random(rows, 32),
        "weight": random(48, 32),
        "bias": random(48),
        "residual": random(rows, 48),
        "activation": "quick_gelu",
    }


def mlp(rows: int) -> dict[str, Any]:
    fc1 = {"fc1_weight": random(64, 32), "fc1_bias": random(64)}
    return {"x": random(rows, 32), **fc1, "fc2_weight": random(32, 64), "fc2_bias": random(32), "residual": None}


def layer_norm(rows: int) -> dict[str, Any]:
    return {"x": random(rows, 32), "weight": random(32), "bias": random(32), "eps": 1e-6}


def rotation(rows: int) -> dict[str, Any]:
    return {"qkv": random(rows, 3, HEADS, HEAD_DIM), "table": random(rows, 2, HEAD_DIM // 2)}


def projection(rows: int) -> dict[str, Any]:
    weights = {"weight": random(3 * HIDDEN, 8), "bias": random(3 * HIDDEN)}
    return {"x": random(rows, 8), **weights, "table": random(rows, 2, HEAD_DIM // 2)}


PIECES: list[tuple[Callable[..., Tensor], tuple[str, ...], Callable[[int], dict[str, Any]]]] = [
    (linear_ref, ("x", "residual"), linear),
    (mlp_ref, ("x", "residual"), mlp),
    (layer_norm_ref, ("x",), layer_norm),
    (rotate_eagerly, ("qkv", "table"), rotation),
    (project_and_rotate_eagerly, ("x", "table"), projection),
]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("function", "with_rows", "make"), PIECES, ids=[make.__name__ for _, _, make in PIECES])
@torch.no_grad()
def test_one_compilation_serves_all_rows(
    function: Callable[..., Tensor], with_rows: tuple[str, ...], make: Callable[[int], dict[str, Any]]
) -> None:
    counter = CompileCounter()
    program = compiled(function, *with_rows, backend=counter)
    for rows in (16, 36, 81):
        arguments = make(rows)
        torch.testing.assert_close(program(**arguments), function(**arguments))
    assert counter.frame_count == 1
