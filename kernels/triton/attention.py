"""Variable-length attention in plain Triton: every GPU, and Triton's interpreter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ernie_vit.kernels.tiles.attention import PlainTile
from ernie_vit.kernels.triton.grid import persistent_programs

LOG2_E = 1.4426950408889634


@triton.jit
def _rows_of(
    ptr,  # [rows, heads, HEAD_DIM], last dim contiguous
    offs_r,  # [R] int64
    offs_d,  # [D] channels
    stride_r,
    mask_r,
    HEAD_DIM: tl.constexpr,
    EVEN: tl.constexpr,  # no channel of offs_d lies past HEAD_DIM
):
    """Rows of one head, [R, D]; what the masks leave out is zero and is not read."""
    mask = mask_r[:, None] if EVEN else mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(ptr + offs_r[:, None] * stride_r + offs_d[None, :], mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=[
        "stride_qr",
        "stride_qh",
        "stride_kr",
        "stride_kh",
        "stride_vr",
        "stride_vh",
        "scale_log2",
    ]
)
def attention_kernel(
    q_ptr,  # [rows, heads, HEAD_DIM], last dim contiguous
    k_ptr,  # as q
    v_ptr,  # as q
    out_ptr,  # as q, contiguous
    work_list_ptr,  # [1 + items, 5] int32: the count; then query rows from and to, the sequence's from and to, head
    stride_qr,  # strides of rows and heads, in units of VECTOR elements
    stride_qh,
    stride_kr,
    stride_kh,
    stride_vr,
    stride_vh,
    scale_log2,  # scale * log2(e)
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,  # the largest power of two in HEAD_DIM
    TAIL: tl.constexpr,  # the remaining channels up to a power of two, at least 16; 0 for none
    VECTOR: tl.constexpr,  # what the strides are multiples of: the compiler's licence for wide loads
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    EVEN: tl.constexpr = MAIN + TAIL == HEAD_DIM
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, MAIN)
    if TAIL:
        offs_t = MAIN + tl.arange(0, TAIL)
    # 64 bits: a row's offset passes 2**31 elements from 560,000 rows of 3 * 1280 on
    stride_qr = stride_qr.to(tl.int64) * VECTOR
    stride_kr = stride_kr.to(tl.int64) * VECTOR
    stride_vr = stride_vr.to(tl.int64) * VECTOR
    stride_qh = stride_qh.to(tl.int64) * VECTOR
    stride_kh = stride_kh.to(tl.int64) * VECTOR
    stride_vh = stride_vh.to(tl.int64) * VECTOR

    for item in range(tl.program_id(0), tl.load(work_list_ptr), tl.num_programs(0)):
        item_ptr = work_list_ptr + 5 * (1 + item)
        row = tl.load(item_ptr)
        first = tl.load(item_ptr + 2)
        end = tl.load(item_ptr + 3)
        head = tl.load(item_ptr + 4)
        q_head = q_ptr + head * stride_qh
        k_head = k_ptr + head * stride_kh
        v_head = v_ptr + head * stride_vh
        mask_m = row + offs_m < end  # a plain tile's items are not cut: they end BLOCK_M rows on or here
        rows_m = (row + offs_m).to(tl.int64)

        q = _rows_of(q_head, rows_m, offs_d, stride_qr, mask_m, HEAD_DIM, True)  # [BLOCK_M, MAIN]
        acc = tl.zeros((BLOCK_M, MAIN), tl.float32)
        if TAIL:
            q_tail = _rows_of(q_head, rows_m, offs_t, stride_qr, mask_m, HEAD_DIM, EVEN)  # [BLOCK_M, TAIL]
            acc_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
        # the first block of a sequence has a key, so the maximum is finite before it is subtracted from itself
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)

        for start in range(first, end, BLOCK_N):
            mask_n = start + offs_n < end
            rows_n = (start + offs_n).to(tl.int64)

            k = _rows_of(k_head, rows_n, offs_d, stride_kr, mask_n, HEAD_DIM, True)  # [BLOCK_N, MAIN]
            score = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if TAIL:
                k_tail = _rows_of(k_head, rows_n, offs_t, stride_kr, mask_n, HEAD_DIM, EVEN)
                score = tl.dot(q_tail, k_tail.T, score, input_precision=PRECISION)
            score = tl.where(mask_n[None, :], score, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)
            p = tl.exp2(score * scale_log2 - new_max[:, None])
            decay = tl.exp2(row_max - new_max)
            row_max = new_max
            row_sum = row_sum * decay + tl.sum(p, 1)

            # rows past the end are zero and not what memory holds: a weight of 0 times NaN is NaN
            v = _rows_of(v_head, rows_n, offs_d, stride_vr, mask_n, HEAD_DIM, True)
            p = p.to(v.dtype)
            acc = tl.dot(p, v, acc * decay[:, None], input_precision=PRECISION)
            if TAIL:
                v_tail = _rows_of(v_head, rows_n, offs_t, stride_vr, mask_n, HEAD_DIM, EVEN)
                acc_tail = tl.dot(p, v_tail, acc_tail * decay[:, None], input_precision=PRECISION)

        out_head = out_ptr + head * HEAD_DIM
        out_rows = out_head + rows_m[:, None] * (HEADS * HEAD_DIM)
        out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_rows + offs_d[None, :], out, mask=mask_m[:, None])
        if TAIL:
            out = (acc_tail / row_sum[:, None]).to(out_ptr.dtype.element_ty)
            mask_tail = mask_m[:, None] & (offs_t < HEAD_DIM)[None, :]
            tl.store(out_rows + offs_t[None, :], out, mask=mask_tail)


def constants(dtype: torch.dtype, num_heads: int, head_dim: int, vector: int, tile: PlainTile) -> dict[str, object]:
    """The kernel's compile-time arguments and options."""
    main = 1 << (head_dim.bit_length() - 1)
    tail = max(triton.next_power_of_2(head_dim - main), 16) if head_dim > main else 0
    return {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "MAIN": main,
        "TAIL": tail,
        "VECTOR": vector,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, work_list: Tensor, *, scale: float, tile: PlainTile
) -> None:
    """Fill the rows of ``out`` (contiguous) that lie in sequences, on the current device.

    ``work_list`` was made for items of ``tile.rows`` rows.
    """
    num_items = work_list.shape[0] - 1
    if num_items == 0:
        return
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    vector = 16 // q.element_size()
    if any(stride % vector for stride in strides):
        vector = 1
    programs = persistent_programs(num_items, q.device, per_multiprocessor=tile.programs)
    attention_kernel[(programs,)](
        q,
        k,
        v,
        out,
        work_list,
        *(stride // vector for stride in strides),
        scale * LOG2_E,
        **constants(q.dtype, q.shape[1], q.shape[2], vector, tile),
    )
