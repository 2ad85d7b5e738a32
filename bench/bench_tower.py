"""The whole tower at full size with random weights, in a graph of exactly the input's size.

The eager pieces are what a graph of plain PyTorch can hold: cuBLAS, F.layer_norm, elementwise kernels, and
FlashAttention-3 where it is there, else PyTorch's varlen attention. vLLM's tower is its own class and no more, without
the sizes of its graphs and without its resampler: cuBLAS, its rotary kernel, its FlashAttention-3.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.attention_peers import Adapter, Sequences
from bench.encoders.vllm import fixed_sizes, open_tower
from bench.findings import Findings
from bench.ideal import attention_flops, linear_flops
from bench.measure import Case, Inputs, Provider, Reference, Work, attempt
from bench.sizes import DEPTH, DEVICE, DTYPE, FRAMES, HIDDEN, INTERMEDIATE, PIXELS, drawn
from ernie_vit import ErnieVisionConfig, prepare_encoder_metadata
from ernie_vit.model.operators import Operators, choose_operators
from ernie_vit.model.tower import VisionTower

SHAPES = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))  # of a block
ATTENTION = ("FlashAttention-3", "FlashAttention-2")  # the first that is there
VLLM = "vLLM's tower"


@cache
def vision_tower(dtype: torch.dtype) -> VisionTower:
    """The same weights at every dtype: those of bf16."""
    if dtype != DTYPE:
        return copy.deepcopy(vision_tower(DTYPE)).to(dtype)
    with torch.device(DEVICE):
        made = VisionTower(ErnieVisionConfig()).to(dtype).requires_grad_(False)
    for module in made.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)
    return made


def tower(inputs: Inputs, ops: Operators, dtype: torch.dtype = DTYPE) -> Tensor:
    out: Tensor = vision_tower(dtype)(inputs["pixel_values"], inputs["metadata"], ops)
    return out


def eager_pieces(adapt: Adapter, sequences: Sequences) -> Operators:
    """Plain PyTorch, with an attention that reads no offsets on the host and so can be captured."""
    return replace(choose_operators("torch"), attention=adapt(sequences), attention_arguments=lambda *_, **__: {})


def work(sequences: Sequences) -> Work:
    rows, lengths = sequences.rows, sequences.lengths
    weights = HIDDEN * PIXELS + DEPTH * sum(n * k for n, k in SHAPES)
    flops = 2 * rows * weights + DEPTH * 4 * HIDDEN * sum(length**2 for length in lengths)
    block = sum(linear_flops(rows, n, k) for n, k in SHAPES) + attention_flops(lengths)
    return Work(flops, 2 * weights, linear_flops(rows, HIDDEN, PIXELS) + DEPTH * block)


@pytest.fixture(scope="module")
def vllm_tower(findings: Findings) -> Iterator[Any]:
    """vLLM's tower with the weights of ours; None in a quick run, and noted as missing where it cannot be had."""
    why_not: dict[str, str] = {}
    with ExitStack() as stack:
        opened = open_tower(vision_tower(DTYPE))
        wanted = not (findings.quick or findings.only_compile)
        tower = attempt(VLLM, why_not, stack.enter_context, opened) if wanted else None
        for name, reason in why_not.items():
            findings.miss(name, reason)
        yield tower


@pytest.mark.parametrize("rows", FRAMES)
def test_tower(
    rows: int, attention_peers: Mapping[str, Adapter], vllm_tower: Any, run_case: Callable[[Case], None]
) -> None:
    frames = FRAMES[rows]
    sequences = Sequences(tuple(height * width for height, width in frames))
    sizes = [(1, height, width) for height, width in frames]
    metadata = prepare_encoder_metadata(sizes, device=DEVICE)

    def inputs(seed: int) -> Inputs:
        return {"pixel_values": torch.randn(rows, PIXELS, **drawn(seed)), "metadata": metadata}

    torch_ops, triton_ops = choose_operators("torch"), choose_operators("triton")
    # float32 is a thousand times more exact than bf16; float64 would take minutes at the largest size
    reference = Reference(lambda i: tower(i, torch_ops, torch.float32), lambda i: tower(i, torch_ops))
    providers = {"ours": Provider(lambda i: tower(i, triton_ops), reference)}
    library = next((name for name in ATTENTION if name in attention_peers), None)
    if library:
        pieces = eager_pieces(attention_peers[library], sequences)
        providers[f"eager pieces, {library}"] = Provider(lambda i: tower(i, pieces), reference)
    if vllm_tower is not None:
        vllm = fixed_sizes(vllm_tower, sizes)
        providers[VLLM] = Provider(lambda i: vllm(i["pixel_values"]), reference)
    name = f"{len(frames)} image{'s' * (len(frames) > 1)}"
    run_case(Case("tower", name, rows, inputs, providers, work(sequences)))
