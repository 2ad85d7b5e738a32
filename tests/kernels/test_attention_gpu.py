"""What attention does on a GPU alone: many and long sequences, graphs, several devices."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    NAN,
    REFERENCES,
    assert_accurate,
    assert_as_accurate,
    backends,
    eager_attention,
    fused,
    fused_backend,
    offsets,
    with_tile,
)

from ernie_vit.kernels.attention import attention, attention_work_list

pytestmark = pytest.mark.gpu
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@HALVES
@pytest.mark.parametrize(
    "lengths",
    [[1296], [1728], [4096], [16_384], [256] * 16, [1296] * 8, [576, 1296, 4096, 256, 1728]],
    ids=["1,296", "1,728", "4,096", "16,384", "16 x 256", "8 x 1,296", "mixed"],
)
def test_model_sizes(dtype, lengths):
    """Every shipped tile at sizes of the model; the tiles of a backend agree bit by bit."""
    q, k, v = fused(sum(lengths), "cuda", dtype)
    cu_seqlens = offsets(lengths, "cuda")
    assert_accurate(q, k, v, cu_seqlens, max(lengths))
    for tiles in backends("cuda", dtype):
        first, *others = (with_tile(tile, q, k, v, cu_seqlens) for tile in tiles)
        assert not first.isnan().any()
        assert all(torch.equal(other, first) for other in others)


@HALVES
def test_many_short_sequences(dtype):
    count, rows, heads = 4096, 4, 16
    q, k, v = fused(count * rows, "cuda", dtype, heads=heads)
    cu_seqlens = offsets([rows] * count, "cuda")
    out = attention(q, k, v, cu_seqlens, rows)
    eager = eager_attention(q, k, v, cu_seqlens, rows)
    batches = [x.reshape(count, rows, heads, 80).transpose(1, 2) for x in (q, k, v)]
    with fused_backend(q.device, dtype):
        flash = F.scaled_dot_product_attention(*batches)
    exact = F.scaled_dot_product_attention(*(x.double() for x in batches))
    assert_as_accurate(out, eager, *(x.transpose(1, 2).flatten(0, 1) for x in (flash, exact)))


def test_offsets_past_32_bits():
    """Rows whose elements lie past 2**31: a short sequence at the end of 560,000 rows of a fused projection."""
    rows, heads = 560_000, 16
    if torch.cuda.get_device_properties(0).total_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    q, k, v = torch.zeros(rows, 3, heads, 80, dtype=torch.bfloat16, device="cuda").unbind(1)
    for x in (q, k, v):
        x[-300:] = torch.randn(300, heads, 80)
    lengths = [256] * ((rows - 300) // 256)
    cu_seqlens = offsets([*lengths, rows - 300 - sum(lengths), 300], "cuda")
    expected = attention(q[-300:], k[-300:], v[-300:], offsets([300], "cuda"), 300)
    for layout in (q, q.clone(memory_format=torch.contiguous_format)):
        assert torch.equal(attention(layout, k, v, cu_seqlens, 300)[-300:], expected)


@pytest.mark.parametrize("max_seqlen", [256, 1500, 4096])
@pytest.mark.parametrize("sequences", [12, 100])
def test_replays_follow_the_offsets(max_seqlen, sequences):
    """One graph, captured for a capacity with the list inside; other offsets and rows at each replay."""
    rows = 4096
    q, k, v = fused(rows, "cuda")
    cu_seqlens = offsets([100, 50], "cuda", padded=sequences - 2)
    sizes = {"num_rows": rows, "max_seqlen": max_seqlen, "num_heads": 2, "head_dim": 80, "dtype": q.dtype}

    def both() -> torch.Tensor:
        work_list = attention_work_list(cu_seqlens, **sizes)
        return attention(q, k, v, cu_seqlens, max_seqlen, work_list=work_list)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both()
    compared = []
    for lengths in ([256, 64], [64, 256], [0, 200, 0], [], [1] * 12, [255] * 11, [max_seqlen], [max_seqlen // 2, 7]):
        padded = offsets(lengths, "cuda", padded=sequences - len(lengths))
        live = sum(lengths)
        fresh = fused(rows, "cuda")
        for static, new in zip((q, k, v), fresh, strict=True):
            static.copy_(new)
            static[live:] = NAN
        cu_seqlens.copy_(padded)
        out.fill_(7.0)
        graph.replay()
        assert out[live:].eq(7.0).all()
        expected = attention(q, k, v, padded, max_seqlen)
        assert torch.equal(out[:live], expected[:live])
        compared += [(out[:live].clone(), *(f(q, k, v, padded, max_seqlen)[:live] for f in REFERENCES))]
    assert_as_accurate(*(torch.cat(outputs) for outputs in zip(*compared, strict=True)))


def test_runs_without_waiting_for_the_device():
    q, k, v = fused(300, "cuda")
    cu_seqlens = offsets([200, 100], "cuda")
    attention(q, k, v, cu_seqlens, 200)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, k, v, cu_seqlens, 200)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_on_the_wrong_device():
    q, k, v = fused(8, "cuda")
    with pytest.raises(ValueError, match="cu_seqlens: expected a tensor on cuda:0, got one on cpu"):
        attention(q, k, v, offsets([8], "cpu"), 8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    q, k, v = fused(300, "cuda:1")
    cu_seqlens = offsets([200, 100], "cuda:1")
    with torch.cuda.device(0):
        assert_accurate(q, k, v, cu_seqlens, 200)
        assert torch.cuda.current_device() == 0
