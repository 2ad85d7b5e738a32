"""Attention that others offer: one small adapter each, all with the same inputs.

An adapter is made by a function that imports what it needs, and may raise whatever says that this machine lacks it.
What can be made once for all calls is made there: nothing may wait for the GPU or copy from the host in a call, which
is captured.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measure import attempt
from bench.sizes import DEVICE, DTYPE, HEAD_DIM, HEADS


@dataclass(frozen=True)
class Sequences:
    """The lengths of a call's sequences, and their offsets on the GPU."""

    lengths: tuple[int, ...]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths], device=DEVICE).cumsum(0).int()

    @cached_property
    def on_device(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


# q, k and v, [rows, heads, head_dim], to the same
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Adapter = Callable[[Sequences], Attention]


@dataclass(frozen=True)
class Peer:
    """Attributes:
    load: imports, and gives what makes a call for sequences.
    quick: whether it also belongs to the quick run.
    takes: which sequences it takes at all.
    """

    load: Callable[[], Adapter]
    quick: bool = True
    takes: Callable[[Sequences], bool] = lambda _: True


def torch_varlen() -> Adapter:
    """FlashAttention-2 as PyTorch has it: what ``torch.nn.attention.varlen`` runs."""

    def adapt(sequences: Sequences) -> Attention:
        offsets, longest = sequences.cu_seqlens, sequences.longest

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # offsets and longest of q and of k, dropout, causal, debug mask
            arguments = (offsets, offsets, longest, longest, 0.0, False, False)
            out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, *arguments)[0]
            return out

        return run

    return adapt


def cudnn() -> Adapter:
    def adapt(sequences: Sequences) -> Attention:
        count = len(sequences.lengths)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1)

        return run

    return adapt


def flash_attention_3() -> Adapter:
    """The extension of vLLM's wheel, without vLLM around it."""
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        torch.ops.load_library(fa3_library())

    def adapt(sequences: Sequences) -> Attention:
        none, offsets, longest = None, sequences.cu_seqlens, sequences.longest

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = torch.ops._vllm_fa3_C.fwd(
                *(q, k, v),
                *(none, none, none, none),  # k_new, v_new, q_v, out
                *(offsets, offsets, none, none, none),  # of q, of k, of k_new; used lengths of q and k
                *(longest, longest),
                *(none, none, none),  # page table, batch index, left padding
                *(none, none, none),  # rotary: cos, sin, lengths
                *(none, none, none),  # descale factors of q, k, v
                HEAD_DIM**-0.5,
                *(False, -1, -1, 0.0, True),  # causal, window left and right, softcap, interleaved rotary
                *(none, 0, none, 0, none),  # scheduler metadata, splits (0: own choice), packed GQA, spared SMs, sinks
                *(1, 0, none),  # context parallel: world size, rank, total lengths
            )[0]
            return out

        return run

    return adapt


def fa3_library() -> Path:
    """``_vllm_fa3_C.abi3.so``: where ``ERNIE_VIT_FA3`` says, else in the installed vLLM, which is not imported.

    Raises:
        FileNotFoundError: neither.
    """
    if "ERNIE_VIT_FA3" in os.environ:
        return Path(os.environ["ERNIE_VIT_FA3"])
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations if found else None) or ():
        library = Path(folder) / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
        if library.exists():
            return library
    raise FileNotFoundError("neither ERNIE_VIT_FA3 nor an installed vLLM has _vllm_fa3_C.abi3.so")


def flash_attention_4() -> Adapter:
    from flash_attn.cute import flash_attn_varlen_func

    def adapt(sequences: Sequences) -> Attention:
        offsets, longest = sequences.cu_seqlens, sequences.longest

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = flash_attn_varlen_func(
                *(q, k, v),
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                softmax_scale=HEAD_DIM**-0.5,
            )[0]
            return out

        return run

    return adapt


def vllm_triton() -> Adapter:
    from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd

    def adapt(sequences: Sequences) -> Attention:
        starts, lengths, longest = sequences.cu_seqlens[:-1], sequences.on_device, sequences.longest

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            context_attention_fwd(q, k, v, out, starts, lengths, longest, is_causal=False)
            return out

        return run

    return adapt


def plain_triton() -> Adapter:
    """Our kernel of the GPUs that have no Gluon kernel."""
    from ernie_vit.kernels.dispatch import architecture
    from ernie_vit.kernels.tiles.attention import plain_tile
    from ernie_vit.kernels.triton.attention import launch_attention
    from ernie_vit.kernels.triton.work_list import make_work_list

    tile = plain_tile(architecture(DEVICE), DTYPE)

    def adapt(sequences: Sequences) -> Attention:
        work_list = make_work_list(sequences.cu_seqlens, tile, num_rows=sequences.rows, num_heads=HEADS)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            launch_attention(q, k, v, out, work_list, scale=HEAD_DIM**-0.5, tile=tile)
            return out

        return run

    return adapt


PEERS = {
    "FlashAttention-2": Peer(torch_varlen),
    "cuDNN": Peer(cudnn, takes=lambda sequences: sequences.equal),
    "FlashAttention-3": Peer(flash_attention_3),
    "FlashAttention-4": Peer(flash_attention_4, quick=False),
    "vLLM Triton": Peer(vllm_triton, quick=False),
    "ours, plain Triton": Peer(plain_triton, quick=False),
}


def available(*, quick: bool) -> tuple[dict[str, Adapter], dict[str, str]]:
    """The peers that this machine has, and why it has not the others; a quick run asks for fewer."""
    why_not: dict[str, str] = {}
    asked = {name: peer.load for name, peer in PEERS.items() if peer.quick or not quick}
    loaded = {name: attempt(name, why_not, load) for name, load in asked.items()}
    return {name: adapter for name, adapter in loaded.items() if adapter is not None}, why_not
