"""What an engine calls of vLLM's CPU extension, in PyTorch: vLLM's wheels are CUDA builds and come without it.

A plugin of vLLM's, loaded in each of its processes beside ours. It also lets our tower compute on a CPU, in PyTorch.
"""

from functools import partialmethod
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def register() -> None:
    """The entry point in the group ``vllm.general_plugins``."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.rotary_embedding.ernie45_vl_rope import Ernie4_5_VLRotaryEmbedding
    from vllm_host import pretend_cpu_build

    from ernie_vit.vllm_model import OurTower

    pretend_cpu_build()
    library = register.library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[attr-defined]
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda _: None, "CompositeExplicitAutograd")
    for name in ("greedy_argmax(Tensor logits)", "fused_gumbel_argmax(Tensor logits, Tensor seeds)"):
        library.define(f"{name} -> Tensor")  # no test samples at random, profiling alone does
        library.impl(name.partition("(")[0], lambda logits, *_: logits.argmax(-1), "CPU")
    library.define(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int size)"
        " -> ()"
    )
    library.impl("compute_slot_mapping_kernel_impl", slot_mapping, "CPU")
    _custom_ops.cpu_attn_get_scheduler_metadata = lambda **_: torch.empty(0)
    _custom_ops.cpu_attn_reshape_and_cache = reshape_and_cache
    _custom_ops.cpu_attention_with_kv_cache = attention
    # its forward_cpu hands forward_native an argument that this class's does not take
    Ernie4_5_VLRotaryEmbedding.forward_cpu = lambda self, positions, query, key=None, *_: self.forward_native(
        positions, query, key
    )
    OurTower.attach = partialmethod(OurTower.attach, backend="torch")  # type: ignore[method-assign,assignment]


def slot_mapping(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, size: int) -> None:
    """Each token's place in the KV cache: its request's block for its position, and the row in it."""
    for request, (begin, end) in enumerate(pairwise(starts.tolist())):
        rows = positions[begin:end].long()
        slots[begin:end] = table[request, rows // size].long() * size + rows % size


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any, **__: Any
) -> None:
    """``[tokens, heads, head_dim]`` into caches ``[blocks, heads, size, head_dim]``."""
    size = key_cache.shape[2]
    slots = slots[slots >= 0].long()
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[slots // size, :, slots % size] = rows[: len(slots)]


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_table: Tensor,
    **_: Any,
) -> None:
    """Causal attention of each request's new tokens to all its tokens."""
    size = key_cache.shape[2]
    for request, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        length = int(seq_lens[request])
        blocks = block_table[request, : -(-length // size)].long()
        key, value = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (key_cache, value_cache))
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        rows = F.scaled_dot_product_attention(query[begin:end].transpose(0, 1), key, value, attn_mask=mask, scale=scale)
        output[begin:end] = rows.transpose(0, 1).reshape(output[begin:end].shape)
