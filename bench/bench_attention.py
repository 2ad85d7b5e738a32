"""Attention of 16 heads of 80, against what others offer (``attention_peers.py``)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.attention_peers import PEERS, Adapter, Attention, Sequences, plain_triton
from bench.ideal import attention_flops
from bench.measure import Case, Inputs, Provider, Reference, Work
from bench.sizes import DTYPE, FRAMES, HEAD_DIM, HEADS, HIDDEN, drawn
from ernie_vit.kernels.attention import attention, attention_ref, attention_work_list

LENGTHS = {str(rows): tuple(height * width for height, width in frames) for rows, frames in FRAMES.items()} | {
    "16 x 256": (256,) * 16,
    "mixed": (576, 1296, 4096, 256, 1728),
}
CHECKED_HEADS = 2  # float64 scores of all heads would not fit
PADDED_HEAD_DIM = 128  # the power of two that holds a head


def make(rows: int) -> Callable[[int], Inputs]:
    """q, k and v as slices of one projection's output, as in the tower."""

    def inputs(seed: int) -> Inputs:
        q, k, v = torch.randn(rows, 3, HEADS, HEAD_DIM, **drawn(seed)).unbind(1)
        return {"q": q, "k": k, "v": v}

    return inputs


def reference(sequences: Sequences) -> Reference:
    def plain(inputs: Inputs, dtype: torch.dtype = DTYPE) -> Tensor:
        few = {name: x[:, :CHECKED_HEADS].to(dtype) for name, x in inputs.items()}
        return attention_ref(**few, cu_seqlens=sequences.cu_seqlens, max_seqlen=sequences.longest)

    return Reference(lambda i: plain(i, torch.float64), plain, part=lambda out: out[:, :CHECKED_HEADS])


def ours(sequences: Sequences, *, capacity: int, max_seqlen: int) -> Callable[[Inputs], Tensor]:
    offsets: dict[str, Any] = {"cu_seqlens": sequences.cu_seqlens, "max_seqlen": max_seqlen}
    sizes: dict[str, Any] = {"num_rows": capacity, "num_heads": HEADS, "head_dim": HEAD_DIM, "dtype": DTYPE}
    work_list = attention_work_list(**offsets, **sizes)  # once a forward pass, for all blocks, so not timed
    return lambda i: attention(**i, **offsets, work_list=work_list)


def on_inputs(attend: Attention) -> Callable[[Inputs], Tensor]:
    return lambda i: attend(i["q"], i["k"], i["v"])


def useful_work(sequences: Sequences) -> Work:
    return Work(4 * HIDDEN * sum(length**2 for length in sequences.lengths), 2 * 4 * sequences.rows * HIDDEN)


def work(sequences: Sequences, *, capacity: int, max_seqlen: int) -> Work:
    padded = attention_flops(sequences.lengths, capacity=capacity, max_seqlen=max_seqlen)
    return replace(useful_work(sequences), padded_flops=padded)


@pytest.mark.parametrize("rows", LENGTHS)
def test_attention(rows: str, attention_peers: Mapping[str, Adapter], run_case: Callable[[Case], None]) -> None:
    every = Sequences(LENGTHS[rows])
    capacity = {"capacity": every.rows, "max_seqlen": every.longest}
    # one of eight images, or one image that is an eighth of a single one
    few = every.rows // 8
    eighth = Sequences((few, *[0] * (len(every.lengths) - 1)))
    wide = {"capacity": every.rows, "max_seqlen": max(every.longest, few)}

    exact = reference(every)
    providers = {
        "ours": Provider(ours(every, **capacity), exact),
        "ours, 1/8 live": Provider(ours(eighth, **wide), reference(eighth), few, work(eighth, **wide)),
    }
    for name, adapt in attention_peers.items():
        if PEERS[name].takes(every):
            providers[name] = Provider(on_inputs(adapt(every)), exact)
    run_case(Case("attention", rows, every.rows, make(every.rows), providers, work(every, **capacity)))


@pytest.mark.parametrize("rows", ["16 x 256"])
def test_channels(rows: str, run_case: Callable[[Case], None]) -> None:
    """Plain Triton on heads of 80 channels, as 64 and 16, and on the same numbers as heads of 128 with 48 zeros."""
    every = Sequences(LENGTHS[rows])
    attend, checked = plain_triton()(every), reference(every)

    def inputs(seed: int) -> Inputs:
        drawn_heads = torch.randn(every.rows, 3, HEADS, HEAD_DIM, **drawn(seed))
        q, k, v = F.pad(drawn_heads, (0, PADDED_HEAD_DIM - HEAD_DIM)).unbind(1)
        return {"q": q, "k": k, "v": v}

    def narrow(wide: Inputs) -> Inputs:
        return {name: x[..., :HEAD_DIM] for name, x in wide.items()}

    exact = Reference(
        lambda i: checked.exact(narrow(i)),
        lambda i: checked.plain(narrow(i)),
        part=lambda out: out[:, :CHECKED_HEADS, :HEAD_DIM],
    )
    providers = {
        "ours, plain Triton, 64 + 16": Provider(lambda i: attend(**narrow(i)), exact),
        "ours, plain Triton, 128": Provider(lambda i: attend(**i), exact),
    }
    run_case(Case("attention", "channels of a head", every.rows, inputs, providers, useful_work(every)))
