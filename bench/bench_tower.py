"""The whole tower at full size with random weights, in a graph of exactly the input's size.

The eager pieces are what a graph of plain PyTorch can hold: cuBLAS, F.layer_norm, elementwise kernels, and
FlashAttention-3 where ``ERNIE_VIT_FA3`` names it, else PyTorch's varlen attention.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from bench.bench_attention import fa3, fa3_is_there, torch_varlen
from bench.measure import Case, Inputs, Provider, Reference
from bench.sizes import FRAMES, HIDDEN, INTERMEDIATE
from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.operators import Operators, choose_operators

DEPTH, PIXELS = 32, 588


@cache
def encoder(dtype: torch.dtype) -> ErnieVisionEncoder:
    return ErnieVisionEncoder.from_config(device="cuda", dtype=dtype, backend="torch")


def tower(inputs: Inputs, ops: Operators, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out: Tensor = encoder(dtype).vision_tower(inputs["pixel_values"], inputs["metadata"], ops)
    return out


def eager_pieces() -> Operators:
    """Plain PyTorch, with an attention that reads no offsets on the host and so can be captured."""
    library = fa3 if fa3_is_there() else torch_varlen

    def attention(q: Tensor, k: Tensor, v: Tensor, **offsets: object) -> Tensor:
        return library({"q": q, "k": k, "v": v, **offsets})

    return replace(
        choose_operators("torch"),
        attention=attention,
        attention_arguments=lambda metadata, **_: {
            "cu_seqlens": metadata.cu_seqlens,
            "max_seqlen": metadata.max_seqlen,
        },
    )


@pytest.mark.parametrize("rows", FRAMES)
def test_tower(rows: int, run_case: Callable[[Case], None]) -> None:
    frames = FRAMES[rows]
    metadata = prepare_encoder_metadata([(1, height, width) for height, width in frames], device="cuda")

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        return {"pixel_values": torch.randn(rows, PIXELS, device="cuda"), "metadata": metadata}

    torch_ops, pieces = choose_operators("torch"), eager_pieces()
    # float32 is a thousand times more exact than bf16; float64 would take minutes at the largest size
    reference = Reference(lambda i: tower(i, torch_ops, torch.float32), lambda i: tower(i, torch_ops))
    providers = {
        "ours": Provider(lambda i: tower(i, choose_operators("triton")), reference),
        "eager pieces": Provider(lambda i: tower(i, pieces), reference),
    }
    weights = HIDDEN * PIXELS + DEPTH * (4 * HIDDEN**2 + 2 * HIDDEN * INTERMEDIATE)
    scores = sum((height * width) ** 2 for height, width in frames)
    flops = 2 * rows * weights + DEPTH * 4 * HIDDEN * scores
    run_case(
        Case("tower", f"{len(frames)} image{'s' * (len(frames) > 1)}", rows, inputs, providers, flops, 2 * weights)
    )
