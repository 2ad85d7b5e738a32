"""Attention inside sequences: values against float64, the same bits whatever surrounds a sequence, and refusals."""

import random

import pytest
import torch
from attention_cases import (
    NAN,
    REFERENCES,
    assert_accurate,
    assert_as_accurate,
    backends,
    fused,
    offsets,
    with_tile,
)

from ernie_vit.kernels import dispatch
from ernie_vit.kernels.attention import attention, attention_ref, attention_work_list

RAGGED = [1, 4, 8, 15, 16, 17, 63, 64, 65, 129, 300]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 128])
@DTYPES
def test_values(device, dtype, head_dim):
    rows = sum(RAGGED)
    assert_accurate(*fused(rows, device, dtype, head_dim=head_dim), offsets(RAGGED, device), max(RAGGED))


@pytest.mark.parametrize("head_dim", [24, 32, 48, 56, 88, 104, 112, 120])
def test_values_of_the_other_heads(device, head_dim):
    """Tails of 16, 32 and 64 channels, whole and masked."""
    assert_accurate(*fused(82, device, head_dim=head_dim), offsets([65, 17], device), 65)


@pytest.mark.parametrize(
    "lengths",
    [[0, 96, 96, 0, 40], [0, 0, 70], [65, 0, 0], [33, 0, 66], [1]],
    ids=["everywhere", "leading", "trailing", "middle", "one row"],
)
@HALVES
def test_empty_sequences(device, dtype, lengths):
    assert_accurate(*fused(sum(lengths), device, dtype), offsets(lengths, device), max(lengths))


@pytest.mark.parametrize("rows", [0, 70])
@pytest.mark.parametrize("sequences", [0, 1, 2])
def test_nothing_to_do(device, rows, sequences):
    q, k, v = fused(rows, device)
    out = attention(q, k, v, offsets([0] * sequences, device), 0)
    assert out.shape == q.shape


def test_scale(device):
    assert_accurate(*fused(100, device), offsets([60, 40], device), 60, scale=0.3)


@HALVES
def test_every_tile_and_untouched_rows(device, dtype):
    """Each tile's values; rows past the last sequence stay as they were, also beside a sequence's last row."""
    lengths = [256, 44]
    q, k, v = fused(512, device, dtype)
    for x in (q, k, v):
        x[300:] = NAN
    cu_seqlens = offsets(lengths, device)
    references = [f(q, k, v, cu_seqlens, 256)[:300] for f in REFERENCES]
    for tiles in backends(device, dtype):
        for tile in tiles:
            out = with_tile(tile, q, k, v, cu_seqlens, torch.full(q.shape, 7.0, dtype=dtype, device=device))
            assert_as_accurate(out[:300], *references)
            assert out[300:].eq(7.0).all(), tile


def test_both_ways_to_pad(device):
    """Ours repeats the last offset; others give the rows past the live ones a sequence of their own. The same bits."""
    q, k, v = fused(512, device)
    for x in (q, k, v):
        x[300:] = NAN
    repeated, own = (offsets([256, 44, *rest], device) for rest in ([0, 0], [212]))
    for tiles in backends(device, q.dtype):
        for tile in tiles:
            out, padded = (with_tile(tile, q, k, v, cu_seqlens) for cu_seqlens in (repeated, own))
            assert torch.equal(out[:300], padded[:300]), tile
            assert out[:300].isfinite().all(), tile


@HALVES
def test_nan_neighbours(device, dtype):
    """Sequences of NaN between the others, and NaN in every row past the live ones, reach no other sequence."""
    lengths = [65, 63, 1, 70, 129, 60]
    q, k, v = fused(sum(lengths) + 80, device, dtype, heads=1)
    cu_seqlens = offsets(lengths, device)
    for tiles in backends(device, dtype):
        for tile in tiles:
            clean = with_tile(tile, q, k, v, cu_seqlens)
            for x in (q, k, v):
                for i in range(1, len(lengths), 2):
                    x[cu_seqlens[i] : cu_seqlens[i + 1]] = NAN
                x[cu_seqlens[-1] :] = NAN
            poisoned = with_tile(tile, q, k, v, cu_seqlens)
            for i in range(0, len(lengths), 2):
                rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
                assert torch.equal(poisoned[rows], clean[rows]), (tile, lengths[i])
            for x in (q, k, v):
                x[torch.isnan(x)] = 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("lengths", [[1], [15], [15, 70, 130]], ids=str)
def test_large_logits(device, dtype, lengths):
    """Scores of +2^17 and -2^17, in some rows -2^17 alone: the mean of v over the largest.

    Powers of two, so that no rounding of a score hides what is tested: no sentinel, no infinity minus infinity.
    """
    rows = sum(lengths)
    channel = torch.arange(rows) % 80
    q = torch.zeros(rows, 1, 80)
    q[torch.arange(rows), 0, channel] = 128.0
    k = 1024.0 * torch.randint(0, 2, (rows, 1, 80)).mul(2).sub(1)
    k[..., :8] = -1024.0
    q, k, v = (x.to(dtype).to(device) for x in (q, k, torch.randn(rows, 1, 80)))
    assert_accurate(q, k, v, offsets(lengths, device), max(lengths), scale=1.0)


@pytest.mark.parametrize("part", [slice(0, 64), slice(64, 80)], ids=["first 64", "last 16"])
def test_both_parts_of_the_head_count(device, part):
    """Channels outside of ``part`` are zero in q and k: the scores come from the part alone. v keeps them all."""
    q, k, v = fused(150, device)
    kept = torch.zeros(80, device=device, dtype=q.dtype)
    kept[part] = 3.0
    assert_accurate(q * kept, k, v, offsets([150], device), 150)
    assert_accurate(q, k * kept, v, offsets([150], device), 150)
    assert_accurate(q, k, v * kept, offsets([150], device), 150)


@pytest.mark.parametrize(
    "layout", ["contiguous", "heads first", "one key for all rows", "one head for all", "odd offset"]
)
def test_layouts(device, layout):
    heads, rows = 3, 150
    q, k, v = fused(rows, device, heads=heads)
    cu_seqlens = offsets([100, 50], device)
    if layout == "contiguous":
        # the same numbers in another layout that TMA can read: the same bits
        same = [x.contiguous() for x in (q, k, v)]
        assert torch.equal(attention(*same, cu_seqlens, 100), attention(q, k, v, cu_seqlens, 100))
        return
    if layout == "heads first":
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    elif layout == "one key for all rows":
        k = k[:1].expand(rows, heads, 80)
    elif layout == "one head for all":
        k, v = (x[:, :1].expand(rows, heads, 80) for x in (k, v))
    else:
        memory = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:]
        q = memory.view(q.shape).copy_(q)
    sizes = {"num_rows": rows, "max_seqlen": 100, "num_heads": heads, "head_dim": 80, "dtype": q.dtype}
    out = assert_accurate(q, k, v, cu_seqlens, 100)
    work_list = attention_work_list(cu_seqlens, **sizes)
    assert torch.equal(attention(q, k, v, cu_seqlens, 100, work_list=work_list), out)


@HALVES
def test_a_sequence_has_one_result(device, dtype):
    """The same bits alone, packed in any order beside sequences of NaN, at any capacity, by any tile, twice."""
    q, k, v = fused(sum(RAGGED), device, dtype, heads=1)
    pieces = [
        tuple(x[first : first + n].clone() for x in (q, k, v))
        for first, n in zip(offsets(RAGGED, "cpu").tolist(), RAGGED, strict=False)
    ]
    for tiles in backends(device, dtype):
        alone = [with_tile(tiles[0], *piece, offsets([len(piece[0])], device)) for piece in pieces]
        for tile in tiles:
            order = random.sample(range(len(pieces)), len(pieces))
            nan = torch.full((500, 1, 80), NAN, dtype=dtype, device=device)
            lengths = [n for i in order for n in (RAGGED[i], random.randint(0, 70))]
            capacity = sum(lengths) + random.randint(0, 500)
            packed = []
            for part in range(3):
                rows = [x for i, n in zip(order, lengths[1::2], strict=True) for x in (pieces[i][part], nan[:n])]
                packed.append(torch.cat([*rows, nan[: capacity - sum(lengths)]]))
            cu_seqlens = offsets(lengths, device, padded=random.randint(0, 9))
            first_run = with_tile(tile, *packed, cu_seqlens)
            assert torch.equal(with_tile(tile, *packed, cu_seqlens).nan_to_num(), first_run.nan_to_num())
            for i, out in zip(order, first_run[: sum(lengths)].split(lengths)[::2], strict=True):
                assert torch.equal(out, alone[i]), (tile, RAGGED[i])


def test_work_list_for_many_calls(device):
    q, k, v = fused(200, device)
    cu_seqlens = offsets([120, 0, 70], device)
    sizes = {"max_seqlen": 120, "num_heads": 2, "head_dim": 80, "dtype": q.dtype}
    work_list = attention_work_list(cu_seqlens, num_rows=200, **sizes)
    expected = attention(q, k, v, cu_seqlens, 120)[:190]
    for _ in range(2):
        assert torch.equal(attention(q, k, v, cu_seqlens, 120, work_list=work_list)[:190], expected)
    with pytest.raises(ValueError, match="work_list: expected shape"):
        attention(q, k, v, cu_seqlens, 120, work_list=attention_work_list(cu_seqlens, num_rows=400, **sizes))
    with pytest.raises(TypeError, match="work_list"):
        attention(q, k, v, cu_seqlens, 120, work_list=work_list.long())


def test_op(device):
    q, k, v = fused(130, device)
    arguments = (q, k, v, offsets([65, 65], device), 65, 0.1, None)
    torch.library.opcheck(torch.ops.ernie_vit.attention.default, arguments)
    sizes = {"num_rows": 130, "max_seqlen": 65, "num_heads": 2, "head_dim": 80, "dtype": q.dtype}
    work_list = attention_work_list(arguments[3], **sizes)
    torch.library.opcheck(torch.ops.ernie_vit.attention.default, (*arguments[:-1], work_list))


def test_compiles_in_one_graph(device):
    def both(q, k, v, cu_seqlens):
        sizes = {"num_rows": q.shape[0], "num_heads": q.shape[1], "head_dim": q.shape[2], "dtype": q.dtype}
        work_list = attention_work_list(cu_seqlens, max_seqlen=120, **sizes)
        return attention(q * 2, k, v, cu_seqlens, 120, work_list=work_list)

    compiled = torch.compile(both, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for lengths in ([120, 80], [40, 100, 20]):
        inputs = (*fused(sum(lengths), device), offsets(lengths, device))
        assert torch.equal(compiled(*inputs), both(*inputs))


def test_reference_has_gradients():
    q, k, v = (torch.randn(7, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu_seqlens = offsets([3, 0, 2], "cpu")
    assert torch.autograd.gradcheck(lambda *x: attention_ref(*x, cu_seqlens, 3), (q, k, v))
    assert attention_ref(q, k, v, cu_seqlens, 3)[5:].eq(0).all()


def test_gradients_are_refused(device):
    q, k, v = fused(8, device)
    with pytest.raises(RuntimeError, match='backend="torch"'):
        attention(q.clone().requires_grad_(), k, v, offsets([8], device), 8)
    with torch.no_grad():
        attention(q.clone().requires_grad_(), k, v, offsets([8], device), 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_seqlen": torch.tensor(8)}, TypeError, "max_seqlen: expected an int, got Tensor"),
        ({"k": torch.zeros(8, 2, 80)}, TypeError, "k: expected torch.bfloat16, got torch.float32"),
        ({"v": torch.zeros(9, 2, 80, dtype=torch.bfloat16)}, ValueError, r"v: expected shape \[8, 2, 80\], got"),
        ({"q": torch.zeros(8, 160, dtype=torch.bfloat16)}, ValueError, "q: expected shape"),
        ({"q": torch.zeros(80, 2, 8, dtype=torch.bfloat16).transpose(0, 2)}, ValueError, "q: expected a contiguous"),
        ({"cu_seqlens": torch.tensor([0, 8])}, TypeError, "cu_seqlens: expected torch.int32"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, "cu_seqlens: expected at least 1 value"),
        ({"scale": 0.0}, ValueError, "scale: expected a positive number"),
    ],
    ids=["max_seqlen as a tensor", "dtype", "rows", "flat heads", "stride", "long offsets", "no offsets", "scale"],
)
def test_refusals(change, error, message):
    q, k, v = fused(8, "cpu")
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens": offsets([8], "cpu"), "max_seqlen": 8, **change}
    with pytest.raises(error, match=message):
        attention(**arguments)


@pytest.mark.interpreter
@pytest.mark.parametrize("bad", [[256, 64], [0, 256, 64], [0, 321], [0, 300]], ids=str)
def test_offsets_on_the_host_are_checked(bad):
    q, k, v = fused(320, "cpu")
    for function in (attention, attention_ref):
        with pytest.raises(ValueError, match=r"cu_seqlens|max_seqlen"):
            function(q, k, v, torch.tensor(bad, dtype=torch.int32), 256)


@pytest.mark.skipif(dispatch.interpreting(), reason="the interpreter runs on the CPU")
def test_cpu_is_refused_without_the_interpreter():
    q, k, v = fused(8, "cpu")
    with pytest.raises(RuntimeError, match=r"attention: .*CPU"):
        attention(q, k, v, offsets([8], "cpu"), 8)


def test_tests_can_fail(device):
    """The comparison sees one wrong row among many."""
    q, k, v = fused(sum(RAGGED), device)
    cu_seqlens = offsets(RAGGED, device)
    out = attention(q, k, v, cu_seqlens, 300)
    references = [f(q, k, v, cu_seqlens, 300) for f in REFERENCES]
    assert_as_accurate(out, *references)
    out[299] = 0
    with pytest.raises(AssertionError, match="relative error"):
        assert_as_accurate(out, *references)
