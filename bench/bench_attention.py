"""Attention of 16 heads of 80, against PyTorch's varlen attention, cuDNN and FlashAttention-3.

FlashAttention-3 comes out of vLLM's wheel: ``ERNIE_VIT_FA3`` names its ``_vllm_fa3_C.abi3.so``.
"""

import os
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measure import Case, Inputs, Provider, Reference
from bench.sizes import FRAMES, HEAD_DIM, HEADS, HIDDEN
from ernie_vit.kernels.attention import attention, attention_ref, attention_work_list

LENGTHS = {str(rows): [height * width for height, width in frames] for rows, frames in FRAMES.items()} | {
    "16 x 256": [256] * 16,
    "mixed": [576, 1296, 4096, 256, 1728],
}
CHECKED_HEADS = 2  # float64 scores of all heads would not fit


def make(lengths: list[int], rows: int, max_seqlen: int) -> Callable[[int], Inputs]:
    """Inputs with room for ``rows`` rows; q, k and v are slices of one projection's output, as in the tower."""
    offsets = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int().cuda(), "max_seqlen": max_seqlen}
    # made once a forward pass, for all blocks, so not timed
    work_list = attention_work_list(**offsets, num_rows=rows, num_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16)

    def inputs(seed: int) -> Inputs:
        torch.manual_seed(seed)
        q, k, v = torch.randn(rows, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).unbind(1)
        return {"q": q, "k": k, "v": v, "work_list": work_list, **offsets}

    return inputs


def plain(inputs: Inputs, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    few = {name: inputs[name][:, :CHECKED_HEADS].to(dtype) for name in ("q", "k", "v")}
    return attention_ref(**few, cu_seqlens=inputs["cu_seqlens"], max_seqlen=inputs["max_seqlen"])


REFERENCE = Reference(lambda i: plain(i, torch.float64), plain, part=lambda out: out[:, :CHECKED_HEADS])


def torch_varlen(i: Inputs) -> Tensor:
    offsets, longest = i["cu_seqlens"], i["max_seqlen"]
    out: Tensor = torch.ops.aten._flash_attention_forward(
        i["q"], i["k"], i["v"], offsets, offsets, longest, longest, 0.0, False, False
    )[0]
    return out


def cudnn(sequences: int) -> Callable[[Inputs], Tensor]:
    def run(i: Inputs) -> Tensor:
        batch = [i[name].unflatten(0, (sequences, -1)).transpose(1, 2) for name in ("q", "k", "v")]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1)

    return run


@cache
def fa3_is_there() -> bool:
    if "ERNIE_VIT_FA3" not in os.environ:
        return False
    torch.ops.load_library(os.environ["ERNIE_VIT_FA3"])
    return True


def fa3(i: Inputs) -> Tensor:
    none, offsets, longest = None, i["cu_seqlens"], i["max_seqlen"]
    out: Tensor = torch.ops._vllm_fa3_C.fwd(
        *(i["q"], i["k"], i["v"]),
        *(none, none, none, none),  # k_new, v_new, q_v, out
        *(offsets, offsets, none, none, none),  # of q, of k, of k_new; used lengths of q and k
        *(longest, longest),
        *(none, none, none),  # page table, batch index, left padding
        *(none, none, none),  # rotary: cos, sin, lengths
        *(none, none, none),  # descale factors of q, k, v
        HEAD_DIM**-0.5,
        *(False, -1, -1, 0.0, True),  # causal, window left and right, softcap, interleaved rotary
        *(none, 0, none, 0, none),  # scheduler metadata, splits (0: its own choice), packed GQA, spared SMs, sinks
        *(1, 0, none),  # context parallel: world size, rank, total lengths
    )[0]
    return out


@pytest.mark.parametrize("name", LENGTHS)
def test_attention(name: str, run_case: Callable[[Case], None]) -> None:
    lengths = LENGTHS[name]
    rows = sum(lengths)
    providers = {
        "ours": Provider(lambda i: attention(**i), REFERENCE),
        "torch varlen": Provider(torch_varlen, REFERENCE),
    }
    if len(set(lengths)) == 1:
        providers["cuDNN"] = Provider(cudnn(len(lengths)), REFERENCE)
    if fa3_is_there():
        providers["FlashAttention-3"] = Provider(fa3, REFERENCE)
    flops = 4 * HIDDEN * sum(length**2 for length in lengths)
    inputs = make(lengths, rows, max(lengths))
    run_case(Case("attention", name, rows, inputs, providers, flops, 2 * 4 * rows * HIDDEN))


@pytest.mark.parametrize("name", LENGTHS)
def test_an_eighth_of_the_capacity(name: str, run_case: Callable[[Case], None]) -> None:
    lengths = LENGTHS[name]
    rows, sequences = sum(lengths), len(lengths)
    # one of eight images, or one image that is an eighth of a single one
    live = rows // 8
    inputs = make([live] + [0] * (sequences - 1), rows, max(*lengths, live))
    providers = {"ours, 1/8 live": Provider(lambda i: attention(**i), REFERENCE, live=live)}
    # Case counts all rows, Provider takes its share of them
    flops, moved_bytes = 4 * HIDDEN * live * rows, 2 * 4 * rows * HIDDEN
    run_case(Case("attention", name, rows, inputs, providers, flops, moved_bytes))
