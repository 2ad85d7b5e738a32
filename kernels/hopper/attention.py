"""Variable-length attention for Hopper in Gluon: bfloat16 and float16, head_dim 80 as 64 + 16 columns.

One program works on 64 * WARPGROUPS query rows of one (sequence, head): a producer warp moves Q and a ring of K
and V blocks with TMA; consumer warpgroups of 64 rows each run O += P V, S = Q K^T and the online softmax one
after the other, while the other warpgroups keep the tensor cores busy. Three of 160 registers that wait in turn
are faster than two of 240 (H200: 2,515 against 2,833 us at 16,384 rows), where both fill the multiprocessors. One
or two have both products in flight at once; three wait in between.

Key blocks: the first one read is the sequence's last KEYS keys, with those masked that a later block brings
again; the others follow from the first key on. So a sequence of KEYS rows or more reads no foreign key; in a
shorter one the foreign rows are masked in S and zeroed in V, and TMA fills rows before the tensor's first with
zeros. Q rows past a sequence's end may be foreign: each makes one row of the result, which is not stored.

An item may end before a warpgroup's rows. That warpgroup then passes by: it waits and arrives where it would have
worked, so that no barrier's count depends on the item.

Launched when the kernel before has ended: an early launch (programmatic dependent launch) behind the projection was
measured in the tower at no gain at any size, and a loss of 1 % at 256 rows.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier  # gl.thread_barrier in triton 3.6, gl.barrier from 3.7 on

from ernie_vit.kernels.hopper.attention_shared import Shared, load_item
from ernie_vit.kernels.hopper.registers import pack, store_rows, thread_sums, unpack, zero_rows
from ernie_vit.kernels.tiles.attention import HopperTile
from ernie_vit.kernels.triton.grid import persistent_programs
from ernie_vit.kernels.triton.launch import Launcher

LOG2_E = 1.4426950408889634
HEAD_DIM = gl.constexpr(80)
MAIN = gl.constexpr(64)
TAIL = gl.constexpr(16)
# Keys of a step. One number for every tile: it decides a row's bits.
KEYS = gl.constexpr(128)
# Rings of 3 and 4 were up to 4 % slower than 2.
STAGES = gl.constexpr(2)
# The default partition gets what the workers leave of the registers at entry, the same for each warpgroup: of 4 x 128
# beside two of 160 and the producer's 24 it gets 168, of 3 x 168 beside one of 240 it gets 240. These are the most.
THREE_REGISTERS = gl.constexpr(160)
TWO_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def producer(q_main, q_tail, k_main, k_tail, v_main, v_tail, work_list_ptr, shared):
    """Fill Q, and the ring: an item's slot j holds K block j and V block j - 1, what one step of a consumer needs."""
    WARPGROUPS: gl.constexpr = shared.q_main.shape[0]
    slot, taken = 0, 0
    count = gl.load(work_list_ptr)
    # Each item is loaded ahead, the first one beside the count: nothing waits for it. Past the count it is not used.
    row, _, first, end, head = load_item(work_list_ptr, gl.program_id(0))
    for item in range(gl.program_id(0), count, gl.num_programs(0)):
        blocks = gl.cdiv(end - first, KEYS)
        column = head * HEAD_DIM
        mbarrier.wait(shared.q_empty, (taken & 1) ^ 1)
        mbarrier.expect(shared.q_full, WARPGROUPS * 64 * HEAD_DIM * 2)
        for w in gl.static_range(WARPGROUPS):
            row_w = row + 64 * w
            tma.async_copy_global_to_shared(q_main, [row_w, column], shared.q_full, shared.q_main.index(w))
            tma.async_copy_global_to_shared(q_tail, [row_w, column + MAIN], shared.q_full, shared.q_tail.index(w))
        for j in range(blocks + 1):
            stage = slot % STAGES
            full = shared.full.index(stage)
            mbarrier.wait(shared.empty.index(stage), ((slot // STAGES) & 1) ^ 1)
            if j < blocks:
                key = gl.where(j == 0, end - KEYS, first + (j - 1) * KEYS)
                mbarrier.expect(full, KEYS * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(k_main, [key, column], full, shared.k_main.index(stage))
                tma.async_copy_global_to_shared(k_tail, [key, column + MAIN], full, shared.k_tail.index(stage))
            else:
                mbarrier.arrive(full, count=1)
            if j > 0:
                key = gl.where(j == 1, end - KEYS, first + (j - 2) * KEYS)
                mbarrier.expect(full, KEYS * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(v_main, [key, column], full, shared.v_main.index(stage))
                tma.async_copy_global_to_shared(v_tail, [key, column + MAIN], full, shared.v_tail.index(stage))
            else:
                mbarrier.arrive(full, count=1)
            slot += 1
        taken += 1  # noqa: SIM113  Triton has no enumerate
        row, _, first, end, head = load_item(work_list_ptr, gl.minimum(item + gl.num_programs(0), count - 1))


@gluon.jit
def pass_by(item, slot, taken, work_list_ptr, shared, W: gl.constexpr):
    """``attend`` for a warpgroup without rows in the item: it lets go of every slot, and of its turns."""
    WARPGROUPS: gl.constexpr = shared.q_main.shape[0]
    _, _, first, end, _ = load_item(work_list_ptr, item)
    blocks = gl.cdiv(end - first, KEYS)
    turn = slot - 2 * taken + 1
    mbarrier.wait(shared.q_full, taken & 1)
    mbarrier.arrive(shared.q_empty, count=1)
    for j in range(blocks + 1):
        stage = slot % STAGES
        mbarrier.wait(shared.full.index(stage), (slot // STAGES) & 1)
        if (j > 0) & (j < blocks):
            mbarrier.wait(shared.turn.index(W), ((turn + j) & 1) ^ (1 if W == 0 else 0))
            mbarrier.arrive(shared.turn.index((W + 1) % WARPGROUPS), count=1)
        mbarrier.arrive(shared.empty.index(stage), count=1)
        slot += 1
    return slot, taken + 1


@gluon.jit
def attend(
    item,
    slot,  # ring slots used before this item
    taken,  # items before this one
    out_ptr,
    work_list_ptr,
    scale_log2,
    shared,
    W: gl.constexpr,  # which warpgroup
    HEADS: gl.constexpr,
):
    """Rows 64 W to 64 W + 63 of an item. Returns ``slot`` and ``taken`` for the next one."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT_MAIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    OUT_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    DTYPE: gl.constexpr = shared.q_main.dtype
    WARPGROUPS: gl.constexpr = shared.q_main.shape[0]
    row, row_end, first, end, head = load_item(work_list_ptr, item)
    length = end - first
    first_slot = slot
    # Parity of this warpgroup's turns before this item: an item has blocks + 1 slots and blocks - 1 turns.
    turns = slot - 2 * taken + 1
    blocks = gl.cdiv(length, KEYS)
    zeros = gl.zeros((64, KEYS), gl.float32, SCORES)

    mbarrier.wait(shared.q_full, taken & 1)
    stage = slot % STAGES
    mbarrier.wait(shared.full.index(stage), (slot // STAGES) & 1)
    s = warpgroup_mma(
        shared.q_main.index(W), shared.k_main.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma(shared.q_tail.index(W), shared.k_tail.index(stage).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(shared.empty.index(stage), count=1)
    own = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES)) >= blocks * KEYS - length
    s = gl.where(own[None, :], s, -float("inf"))
    row_max = gl.max(s, 1) * scale_log2
    p = gl.exp2(s * scale_log2 - row_max[:, None])
    row_sum = thread_sums(p)
    packed = pack(p, DTYPE)
    out_main = gl.zeros((64, MAIN), gl.float32, OUT_MAIN)
    out_tail = gl.zeros((64, TAIL), gl.float32, OUT_TAIL)

    for _ in range(1, blocks):
        slot += 1
        stage = slot % STAGES
        mbarrier.wait(shared.full.index(stage), (slot // STAGES) & 1)
        if WARPGROUPS > 1:
            mbarrier.wait(shared.turn.index(W), ((slot - first_slot + turns) & 1) ^ (1 if W == 0 else 0))
        out_main = warpgroup_mma(unpack(packed, OUT_MAIN, DTYPE), shared.v_main.index(stage), out_main, is_async=True)
        out_tail = warpgroup_mma(unpack(packed, OUT_TAIL, DTYPE), shared.v_tail.index(stage), out_tail, is_async=True)
        if WARPGROUPS == 3:  # has 128 registers at entry, to which wgmma is held: too few for both products at once
            out_main, out_tail, packed = warpgroup_mma_wait(0, deps=(out_main, out_tail, packed))
        s = warpgroup_mma(
            shared.q_main.index(W), shared.k_main.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        s = warpgroup_mma(shared.q_tail.index(W), shared.k_tail.index(stage).permute((1, 0)), s, is_async=True)
        if WARPGROUPS > 1:
            mbarrier.arrive(shared.turn.index((W + 1) % WARPGROUPS), count=1)
        s, out_main, out_tail, packed = warpgroup_mma_wait(0, deps=(s, out_main, out_tail, packed))
        mbarrier.arrive(shared.empty.index(stage), count=1)
        new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
        decay = gl.exp2(row_max - new_max)
        row_max = new_max
        p = gl.exp2(s * scale_log2 - new_max[:, None])
        row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))[:, None] + thread_sums(p)
        out_main = out_main * gl.convert_layout(decay, gl.SliceLayout(1, OUT_MAIN))[:, None]
        out_tail = out_tail * gl.convert_layout(decay, gl.SliceLayout(1, OUT_TAIL))[:, None]
        packed = pack(p, DTYPE)

    mbarrier.arrive(shared.q_empty, count=1)
    slot += 1
    stage = slot % STAGES
    row, row_end, first, end, head = load_item(work_list_ptr, item)
    mbarrier.wait(shared.full.index(stage), (slot // STAGES) & 1)
    if end - first < KEYS:
        # each warpgroup zeroes what it will read, and all write the same values: no barrier between them
        zero_rows(shared.v_main.index(stage), KEYS - (end - first))
        zero_rows(shared.v_tail.index(stage), KEYS - (end - first))
        fence_async_shared()
        debug_barrier()
    out_main = warpgroup_mma(unpack(packed, OUT_MAIN, DTYPE), shared.v_main.index(stage), out_main, is_async=True)
    out_tail = warpgroup_mma(unpack(packed, OUT_TAIL, DTYPE), shared.v_tail.index(stage), out_tail, is_async=True)
    out_main, out_tail, packed = warpgroup_mma_wait(0, deps=(out_main, out_tail, packed))
    mbarrier.arrive(shared.empty.index(stage), count=1)

    factor = 1.0 / gl.sum(row_sum, 1)
    row += 64 * W
    STRIDE: gl.constexpr = HEADS * HEAD_DIM
    out_rows = out_ptr + row.to(gl.int64) * STRIDE + head * HEAD_DIM
    store_rows(out_rows, out_main, factor, row_end - row, STRIDE)
    store_rows(out_rows + MAIN, out_tail, factor, row_end - row, STRIDE)
    return slot + 1, taken + 1


@gluon.jit
def take(
    item,
    slot,
    taken,
    out_ptr,
    work_list_ptr,
    scale_log2,
    shared,
    W: gl.constexpr,
    HEADS: gl.constexpr,
):
    """``attend``, or ``pass_by`` where the item ends before this warpgroup's rows. Every item has rows of the first."""
    if W == 0:
        slot, taken = attend(item, slot, taken, out_ptr, work_list_ptr, scale_log2, shared, W, HEADS)
    else:
        row, row_end, _, _, _ = load_item(work_list_ptr, item)
        if row + 64 * W < row_end:
            slot, taken = attend(item, slot, taken, out_ptr, work_list_ptr, scale_log2, shared, W, HEADS)
        else:
            slot, taken = pass_by(item, slot, taken, work_list_ptr, shared, W)
    return slot, taken


@gluon.jit
def consumer(
    W: gl.constexpr,
    out_ptr,
    work_list_ptr,
    scale_log2,
    shared,
    HEADS: gl.constexpr,
    PERSISTENT: gl.constexpr,
):
    """Warpgroup ``W`` of the program."""
    count = gl.load(work_list_ptr)
    if PERSISTENT:
        slot, taken = 0, 0
        for item in range(gl.program_id(0), count, gl.num_programs(0)):
            slot, taken = take(item, slot, taken, out_ptr, work_list_ptr, scale_log2, shared, W, HEADS)
    elif gl.program_id(0) < count:
        item, zero = gl.program_id(0), gl.to_tensor(0)
        take(item, zero, zero, out_ptr, work_list_ptr, scale_log2, shared, W, HEADS)


@gluon.jit(do_not_specialize=["scale_log2"])
def attention_kernel(
    q_main,  # descriptors of [rows, HEADS * HEAD_DIM]: blocks [64, MAIN]
    q_tail,  # [64, TAIL]
    k_main,  # [KEYS, MAIN]
    k_tail,  # [KEYS, TAIL]
    v_main,
    v_tail,
    out_ptr,  # [rows, HEADS, HEAD_DIM], contiguous
    work_list_ptr,  # [1 + items, 5] int32: the count; then query rows from and to, the sequence's from and to, head
    scale_log2,  # scale * log2(e)
    HEADS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    PERSISTENT: gl.constexpr,
):
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(DTYPE, [WARPGROUPS, 64, MAIN], q_main.layout),
        gl.allocate_shared_memory(DTYPE, [WARPGROUPS, 64, TAIL], q_tail.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, MAIN], k_main.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, TAIL], k_tail.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, MAIN], v_main.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, TAIL], v_tail.layout),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER),
    )
    # A barrier that no partition uses must not be initialised: the compiler gives its memory to others, and PTX forbids
    # to write there before mbarrier.inval.
    if WARPGROUPS > 1:
        for w in gl.static_range(WARPGROUPS):
            mbarrier.init(shared.turn.index(w), count=1)
    mbarrier.init(shared.q_full, count=1)
    mbarrier.init(shared.q_empty, count=WARPGROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(stage), count=2)
        mbarrier.init(shared.empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    # The argument tuples stay inline: a tuple bound to a name loses its constexprs.
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (consumer, (0, out_ptr, work_list_ptr, scale_log2, shared, HEADS, PERSISTENT)),
                (consumer, (1, out_ptr, work_list_ptr, scale_log2, shared, HEADS, PERSISTENT)),
                (consumer, (2, out_ptr, work_list_ptr, scale_log2, shared, HEADS, PERSISTENT)),
                (producer, (q_main, q_tail, k_main, k_tail, v_main, v_tail, work_list_ptr, shared)),
            ],
            [4, 4, 1],
            [THREE_REGISTERS, THREE_REGISTERS, PRODUCER_REGISTERS],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (0, out_ptr, work_list_ptr, scale_log2, shared, HEADS, PERSISTENT)),
                (consumer, (1, out_ptr, work_list_ptr, scale_log2, shared, HEADS, PERSISTENT)),
                (producer, (q_main, q_tail, k_main, k_tail, v_main, v_tail, work_list_ptr, shared)),
            ],
            [4, 1],
            [TWO_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(WARPGROUPS == 1)
        gl.warp_specialize(
            [
                (consumer, (0, out_ptr, work_list_ptr, scale_log2, shared, HEADS, PERSISTENT)),
                (producer, (q_main, q_tail, k_main, k_tail, v_main, v_tail, work_list_ptr, shared)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )


_launch = Launcher(attention_kernel)


@cache
def block_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a TMA block of a 16-bit dtype lies in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def readable(x: Tensor) -> bool:
    """Whether TMA can read ``x`` ``[rows, heads, 80]`` as a matrix: heads side by side, rows aligned to 16 bytes."""
    heads = x.shape[1]
    return (
        (heads == 1 or x.stride(1) == HEAD_DIM.value)
        and x.stride(0) >= heads * HEAD_DIM.value
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, work_list: Tensor, *, scale: float, tile: HopperTile
) -> None:
    """Fill the rows of ``out`` (contiguous) that lie in sequences, on the current device. q, k, v are ``readable``.

    ``work_list`` was made for items of ``tile.rows`` rows. The grid follows from its shape alone; programs past its
    count end at once, for about 6 ns each of an H200's time.
    """
    rows, heads, head_dim = q.shape
    num_items = work_list.shape[0] - 1
    if num_items == 0:
        return
    programs = num_items
    if tile.persistent:
        programs = persistent_programs(num_items, q.device, per_multiprocessor=tile.programs)

    def block(x: Tensor, block_rows: int, columns: int) -> TensorDescriptor:
        layout = block_layout(block_rows, columns, x.dtype)
        return TensorDescriptor(x, [rows, heads * head_dim], [x.stride(0), 1], [block_rows, columns], layout)

    _launch(
        programs,
        q.device,
        (
            block(q, 64, MAIN.value),
            block(q, 64, TAIL.value),
            block(k, KEYS.value, MAIN.value),
            block(k, KEYS.value, TAIL.value),
            block(v, KEYS.value, MAIN.value),
            block(v, KEYS.value, TAIL.value),
            out,
            work_list,
            scale * LOG2_E,
        ),
        (heads, tile.warpgroups, tile.persistent),
        num_warps=4,
        maxnreg=tile.maxnreg,
    )
