"""The linear of Hopper GPUs in Gluon: out = residual + act(x @ weight.T + bias), bf16 or fp16.

Persistent and warp-specialised, one program a multiprocessor: one warp streams tiles of x and weight into a ring in
shared memory by TMA, one warp fetches the residual ahead into the output blocks, one to three groups of four warps
multiply (wgmma), finish and store. K is summed in order in fp32, so every tile gives the same bits; one rounding, at
the end.

Cooperative: the groups hold the row blocks of one tall tile (five blocks over three groups as 2 + 2 + 1).
Ping-pong: each group has a tile of its own, so that one group's epilogue runs under another's wgmma.

Programmatic dependent launch: weights are fetched before ``gdc_wait``, everything else after it, and every program
waits, so that a kernel which has waited for this one has waited for all before it. The Gluon names are Triton 3.6's.
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
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ernie_vit.kernels.tiles.linear import HopperTile

GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

Descriptor = tma.tensor_descriptor
Shared = gl.shared_memory_descriptor


class Plan:
    """The compile-time numbers of one kernel, each a ``gl.constexpr``; equal plans are one compiled kernel.

    Args:
        tile: the shape of a tile and how its work is shared out.
        n, k: columns of the output, columns of x.
        programs: the launch's upper bound of programs, one a multiprocessor.
        dtype: of every tensor.
        bias, quick_gelu, residual, num_rows: which parts the call has.
    """

    def __init__(
        self,
        tile: HopperTile,
        n: int,
        k: int,
        programs: int,
        dtype: torch.dtype,
        bias: bool,
        quick_gelu: bool,
        residual: bool,
        num_rows: bool,
    ) -> None:
        main, tail = tile.column_parts
        # A group with two row blocks has registers and shared memory for half an output block at a time.
        halves = tile.row_blocks > tile.groups > 1
        steps = -(-k // tile.block_k)
        # ptxas holds wgmma to the registers at entry, 64K / threads: 256 columns fit up to two groups.
        widest = 256 if tile.groups < 3 else 128

        def accumulator(columns: int) -> gl.NVMMADistributedLayout:
            return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(columns, widest), 16])

        numbers = {
            "GROUPS": tile.groups,
            "PING_PONG": tile.ping_pong,
            "BLOCKS": 1 if tile.ping_pong else tile.row_blocks,  # row blocks of a tile
            "DOUBLE": tile.row_blocks - tile.groups if halves else 0,  # groups that hold two of them
            "ROWS": tile.block_rows,
            "MAIN": main,
            "TAIL": tail,
            "COLUMNS": main + tail,
            "OUT_MAIN": main // 2 if halves else main,
            "OUT_TAIL": main // 2 if halves else tail,
            "DEPTH": tile.block_k,
            "STAGES": min(tile.stages, steps),
            "STEPS": steps,
            "N": n,
            "TILE_COLUMNS": -(-n // (main + tail)),
            "GROUP_ROWS": tile.group_rows,
            "PROGRAMS": programs,
            "BIAS": bias,
            "QUICK_GELU": quick_gelu,
            "RESIDUAL": residual,
            "NUM_ROWS": num_rows,
            "DTYPE": GL_DTYPES[dtype],
            "MAIN_LAYOUT": accumulator(main),
            "TAIL_LAYOUT": accumulator(tail or 16),
            "OUT_LAYOUT": accumulator(main // 2 if halves else main),
            "OUT_TAIL_LAYOUT": accumulator(main // 2 if halves else tail or 16),
        }
        self.__dict__.update({name: gl.constexpr(value) for name, value in numbers.items()})
        # Triton's caches ask for these three at every launch.
        self._repr = f"Plan({', '.join(f'{name}={value}' for name, value in numbers.items())})"
        self._hash = hash(self._repr)

    def __repr__(self) -> str:
        return self._repr

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self is other or self._repr == other._repr)


plan_for = cache(Plan)


@aggregate
class _Work:
    """What the partitions of a program share; ``_tail``: the columns past the largest power of two of a tile."""

    x: Descriptor
    weight: Descriptor
    weight_tail: Descriptor
    out: Descriptor
    out_tail: Descriptor
    residual: Descriptor
    residual_tail: Descriptor
    out_ptr: gl.tensor
    bias_ptr: gl.tensor
    num_rows_ptr: gl.tensor
    capacity: gl.tensor
    x_ring: Shared
    weight_ring: Shared
    weight_tail_ring: Shared
    out_blocks: Shared  # where the residual is loaded first
    out_tail_blocks: Shared
    ready: Shared  # a ring stage is loaded / may be loaded again
    empty: Shared
    residual_ready: Shared  # the same of an output block
    residual_empty: Shared
    turn: Shared  # which ping-pong group reads the ring next
    plan: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x, weight, weight_tail, out, out_tail, residual, residual_tail, out_ptr, bias_ptr, num_rows_ptr,
        capacity, x_ring, weight_ring, weight_tail_ring, out_blocks, out_tail_blocks, ready, empty,
        residual_ready, residual_empty, turn, plan,
    ):  # fmt: skip
        self.x, self.weight, self.weight_tail = x, weight, weight_tail
        self.out, self.out_tail = out, out_tail
        self.residual, self.residual_tail = residual, residual_tail
        self.out_ptr, self.bias_ptr, self.num_rows_ptr, self.capacity = out_ptr, bias_ptr, num_rows_ptr, capacity
        self.x_ring, self.weight_ring, self.weight_tail_ring = x_ring, weight_ring, weight_tail_ring
        self.out_blocks, self.out_tail_blocks = out_blocks, out_tail_blocks
        self.ready, self.empty, self.turn = ready, empty, turn
        self.residual_ready, self.residual_empty = residual_ready, residual_empty
        self.plan = gl.constexpr(plan)

    @gluon.jit
    def live_rows(self):
        P: gl.constexpr = self.plan
        live = self.capacity
        if P.NUM_ROWS:
            # volatile: not what the first-level cache kept of a read before gdc_wait
            live = gl.minimum(live, gl.load(self.num_rows_ptr, volatile=True))
        return live

    @gluon.jit
    def tile_rows(self, live):
        P: gl.constexpr = self.plan
        return (live + P.BLOCKS * P.ROWS - 1) // (P.BLOCKS * P.ROWS)

    @gluon.jit
    def place(self, tile, tile_rows):  # -> row of tiles, column of tiles
        P: gl.constexpr = self.plan
        if P.GROUP_ROWS == 0:  # row by row: the place depends on nothing that is read from memory
            row = tile // P.TILE_COLUMNS
            column = tile % P.TILE_COLUMNS
        else:
            group = P.GROUP_ROWS * P.TILE_COLUMNS
            first = tile // group * P.GROUP_ROWS
            rows = gl.minimum(tile_rows - first, P.GROUP_ROWS)
            row = first + tile % group % rows
            column = tile % group // rows
        return row, column


@gluon.jit
def _load_weight(work, column, step, stage):
    P: gl.constexpr = work.plan
    bar = work.ready.index(stage)
    mbarrier.expect(bar, (P.BLOCKS * P.ROWS + P.COLUMNS) * P.DEPTH * 2)  # of the x blocks too
    at = column * P.COLUMNS
    tma.async_copy_global_to_shared(work.weight, [at, step * P.DEPTH], bar, work.weight_ring.index(stage))
    if P.TAIL:
        tail = work.weight_tail_ring.index(stage)
        tma.async_copy_global_to_shared(work.weight_tail, [at + P.MAIN, step * P.DEPTH], bar, tail)


@gluon.jit
def _load_x(work, row, step, stage):
    P: gl.constexpr = work.plan
    for block in gl.static_range(P.BLOCKS):
        at = (row * P.BLOCKS + block) * P.ROWS
        shared = work.x_ring.index(stage * P.BLOCKS + block)
        tma.async_copy_global_to_shared(work.x, [at, step * P.DEPTH], work.ready.index(stage), shared)


@gluon.jit
def _load_partition(work):
    P: gl.constexpr = work.plan
    program = gl.program_id(0)
    filled = gl.to_tensor(0)  # ring stages filled before the wait's end
    if P.GROUP_ROWS == 0:
        # Before the wait the count of live rows may be old: a hint, whether fetching ahead is worth while.
        hint = work.tile_rows(work.live_rows()) * P.TILE_COLUMNS
        row, column = work.place(program, 0)
        if program < hint:
            for stage in gl.static_range(P.STAGES):
                _load_weight(work, column, stage, stage)
        gdc_wait()
        if program < hint:
            for stage in gl.static_range(P.STAGES):
                _load_x(work, row, stage, stage)
            filled = gl.to_tensor(P.STAGES)
    else:
        gdc_wait()
    tile_rows = work.tile_rows(work.live_rows())
    total = tile_rows * P.TILE_COLUMNS
    step_count = filled  # stage: step_count % STAGES; phase of its barrier: step_count // STAGES & 1
    for tile in range(program, total, P.PROGRAMS):
        row, column = work.place(tile, tile_rows)
        # written out here: a start kept in a loop-carried scalar comes out frozen at its first value
        for step in range(gl.where(tile == program, filled, 0), P.STEPS):
            stage = step_count % P.STAGES
            mbarrier.wait(work.empty.index(stage), ((step_count // P.STAGES) & 1) ^ 1)
            _load_weight(work, column, step, stage)
            _load_x(work, row, step, stage)
            step_count += 1
    if P.GROUP_ROWS == 0:  # noqa: SIM102  the outer condition is known to the compiler
        if (filled > 0) & (program >= total):  # the hint was wrong: let the copies land before the program ends
            for stage in gl.static_range(P.STAGES):
                mbarrier.wait(work.ready.index(stage), 0)


@gluon.jit
def _load_residual(work, descriptor, row, column, slot, blocks, width: gl.constexpr, use):
    P: gl.constexpr = work.plan
    group = slot % P.GROUPS
    mbarrier.wait(work.residual_empty.index(slot), (use & 1) ^ 1)
    mbarrier.expect(work.residual_ready.index(slot), P.ROWS * width * 2)
    ready = work.residual_ready.index(slot)
    tma.async_copy_global_to_shared(descriptor, [row, column], ready, blocks.index(group))


@gluon.jit
def _load_residual_block(work, row, column, group, use):
    P: gl.constexpr = work.plan
    at = column * P.COLUMNS
    _load_residual(work, work.residual, row, at, group, work.out_blocks, P.OUT_MAIN, use)
    if P.OUT_TAIL:
        tail = at + P.OUT_MAIN
        slot = P.GROUPS + group
        _load_residual(work, work.residual_tail, row, tail, slot, work.out_tail_blocks, P.OUT_TAIL, use)


@gluon.jit
def _residual_partition(work):
    P: gl.constexpr = work.plan
    if P.RESIDUAL:
        gdc_wait()
        tile_rows = work.tile_rows(work.live_rows())
        count = gl.to_tensor(0)  # tiles before this one
        for tile in range(gl.program_id(0), tile_rows * P.TILE_COLUMNS, P.PROGRAMS):
            row, column = work.place(tile, tile_rows)
            if P.PING_PONG:
                _load_residual_block(work, row * P.ROWS, column, count % P.GROUPS, count // P.GROUPS)
            else:
                for group in gl.static_range(P.DOUBLE):
                    first = (row * P.BLOCKS + 2 * group) * P.ROWS
                    _load_residual_block(work, first, column, group, count * 2)
                for group in gl.static_range(P.DOUBLE, P.GROUPS):
                    only = (row * P.BLOCKS + group + P.DOUBLE) * P.ROWS
                    _load_residual_block(work, only, column, group, count)
                for group in gl.static_range(P.DOUBLE):
                    second = (row * P.BLOCKS + 2 * group + 1) * P.ROWS
                    _load_residual_block(work, second, column, group, count * 2 + 1)
            count += 1


@gluon.jit
def _store_live(work, block, live, row, column):
    """The block that the last live row ends in: TMA would write the dead rows too."""
    P: gl.constexpr = work.plan
    WIDTH: gl.constexpr = block.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    for part in gl.static_range(P.ROWS // 16):  # a few rows at a time: the registers are full
        rows = row + 16 * part + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        offsets = rows.to(gl.int64)[:, None] * P.N + columns[None, :]
        mask = (rows < live)[:, None] & (columns < P.N)[None, :]
        gl.store(work.out_ptr + offsets, block.slice(16 * part, 16).load(LAYOUT), mask=mask)


@gluon.jit
def _finish(work, acc, live, row, column, slot, block, use, descriptor, LAYOUT: gl.constexpr, FIRST: gl.constexpr):
    """Bias, activation, residual and the only rounding; stores live rows only."""
    P: gl.constexpr = work.plan
    columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    if P.BIAS:
        # TMA clips at N, a plain load does not
        acc = acc + gl.load(work.bias_ptr + columns, mask=columns < P.N, other=0.0).to(gl.float32)[None, :]
    if P.QUICK_GELU:
        # x * sigmoid(1.702 x) with exp2 and an approximate reciprocal: -1.702 log2(e) = -2.4554670
        acc = gl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fC01D2661; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t;}",
            "=f,f",
            [acc],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    if P.RESIDUAL:
        mbarrier.wait(work.residual_ready.index(slot), use & 1)
        acc = acc + block.load(LAYOUT).to(gl.float32)
    elif FIRST:
        tma.store_wait(0)  # the block before has left the buffers
    block.store(acc.to(P.DTYPE))
    fence_async_shared()
    if row + P.ROWS <= live:
        tma.async_copy_shared_to_global(descriptor, [row, column], block)
        if P.RESIDUAL:
            tma.store_wait(0)
    elif row < live:
        _store_live(work, block, live, row, column)
    if P.RESIDUAL:
        mbarrier.arrive(work.residual_empty.index(slot))


@gluon.jit
def _store_block(work, main, tail, live, row, column, use, GROUP: gl.constexpr):
    P: gl.constexpr = work.plan
    block = work.out_blocks.index(GROUP)
    _finish(work, main, live, row, column, GROUP, block, use, work.out, P.OUT_LAYOUT, True)
    if P.OUT_TAIL:
        SLOT: gl.constexpr = P.GROUPS + GROUP
        block = work.out_tail_blocks.index(GROUP)
        at = column + P.OUT_MAIN
        _finish(work, tail, live, row, at, SLOT, block, use, work.out_tail, P.OUT_TAIL_LAYOUT, False)


@gluon.jit
def _store_halves(work, acc, live, row, column, use, GROUP: gl.constexpr):
    P: gl.constexpr = work.plan
    left, right = acc.reshape((P.ROWS, 2, P.OUT_MAIN)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, P.OUT_LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, P.OUT_LAYOUT, assert_trivial=True)
    _store_block(work, left, right, live, row, column, use, GROUP)


@gluon.jit
def _multiply_partition(GROUP: gl.constexpr, work):
    P: gl.constexpr = work.plan
    TWO: gl.constexpr = GROUP < P.DOUBLE  # this group holds two row blocks
    BLOCK: gl.constexpr = 0 if P.PING_PONG else (2 * GROUP if TWO else GROUP + P.DOUBLE)
    FIRST: gl.constexpr = GROUP if P.PING_PONG else 0
    STRIDE: gl.constexpr = P.GROUPS if P.PING_PONG else 1
    SECOND_COLUMNS: gl.constexpr = P.MAIN if TWO else (P.TAIL if P.TAIL else 16)
    SECOND_LAYOUT: gl.constexpr = P.MAIN_LAYOUT if TWO else P.TAIL_LAYOUT

    gdc_wait()
    live = work.live_rows()
    tile_rows = work.tile_rows(live)
    count = gl.to_tensor(FIRST)  # tiles of this program before this one
    use = gl.to_tensor(0)  # row blocks that this group has stored
    for tile in range(gl.program_id(0) + FIRST * P.PROGRAMS, tile_rows * P.TILE_COLUMNS, STRIDE * P.PROGRAMS):
        tile_row, tile_column = work.place(tile, tile_rows)
        acc = gl.zeros([P.ROWS, P.MAIN], gl.float32, P.MAIN_LAYOUT)
        second = gl.zeros([P.ROWS, SECOND_COLUMNS], gl.float32, SECOND_LAYOUT)
        step_count = count * P.STEPS
        if P.PING_PONG:
            # A phase is one bit: start only after the group before has waited for its last stage.
            mbarrier.wait(work.turn.index(GROUP), ((count // P.GROUPS) & 1) ^ (1 if GROUP == 0 else 0))
        for step in range(P.STEPS):
            stage = step_count % P.STAGES
            mbarrier.wait(work.ready.index(stage), (step_count // P.STAGES) & 1)
            x = work.x_ring.index(stage * P.BLOCKS + BLOCK)
            weight = work.weight_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(x, weight, acc, use_acc=step > 0, is_async=True)
            if TWO:
                x_second = work.x_ring.index(stage * P.BLOCKS + BLOCK + 1)
                second = warpgroup_mma(x_second, weight, second, use_acc=step > 0, is_async=True)
            elif P.TAIL:
                weight_tail = work.weight_tail_ring.index(stage).permute((1, 0))
                second = warpgroup_mma(x, weight_tail, second, use_acc=step > 0, is_async=True)
            # each wgmma is a commit group of its own: all of this step may stay in flight
            if TWO or P.TAIL:
                acc, second = warpgroup_mma_wait(2, deps=[acc, second])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(work.empty.index((step_count + P.STAGES - 1) % P.STAGES), pred=step > 0)
            step_count += 1
        if P.PING_PONG:
            mbarrier.arrive(work.turn.index((GROUP + 1) % P.GROUPS))
        if TWO or P.TAIL:
            acc, second = warpgroup_mma_wait(0, deps=[acc, second])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(work.empty.index((step_count + P.STAGES - 1) % P.STAGES))

        row = (tile_row * P.BLOCKS + BLOCK) * P.ROWS
        column = tile_column * P.COLUMNS
        if P.DOUBLE:
            _store_halves(work, acc, live, row, column, use, GROUP)
            use += 1
            if TWO:
                _store_halves(work, second, live, row + P.ROWS, column, use, GROUP)
                use += 1
        else:
            _store_block(work, acc, second, live, row, column, use, GROUP)
            use += 1
        count += STRIDE
    tma.store_wait(0)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(bars.index(index), count=count)
    return bars


# The count is one number of a longer buffer, the bias may be a slice: their alignment says nothing and must not
# lead to another compilation.
@gluon.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["bias_ptr", "num_rows_ptr"])
def linear_kernel(
    x,  # descriptor [capacity, K], blocks [ROWS, DEPTH]
    weight,  # [N, K], blocks [MAIN, DEPTH]
    weight_tail,  # the same tensor, blocks [TAIL, DEPTH], or None
    out,  # [capacity, N], blocks [ROWS, OUT_MAIN]
    out_tail,  # blocks [ROWS, OUT_TAIL], or None
    residual,  # [capacity, N], blocks as of out, or None
    residual_tail,
    out_ptr,  # out again, contiguous, for the block that the last live row ends in
    bias_ptr,  # [N] or None
    num_rows_ptr,  # [1] int32 or None
    capacity,
    PLAN: gl.constexpr,
):
    P: gl.constexpr = PLAN
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(P.DTYPE, [P.STAGES * P.BLOCKS, P.ROWS, P.DEPTH], x.layout)
    weight_ring = gl.allocate_shared_memory(P.DTYPE, [P.STAGES, P.MAIN, P.DEPTH], weight.layout)
    out_blocks = gl.allocate_shared_memory(P.DTYPE, [P.GROUPS, P.ROWS, P.OUT_MAIN], out.layout)
    weight_tail_ring = weight_ring
    if P.TAIL:
        weight_tail_ring = gl.allocate_shared_memory(P.DTYPE, [P.STAGES, P.TAIL, P.DEPTH], weight_tail.layout)
    out_tail_blocks = out_blocks
    if P.OUT_TAIL:
        out_tail_blocks = gl.allocate_shared_memory(P.DTYPE, [P.GROUPS, P.ROWS, P.OUT_TAIL], out_tail.layout)
    ready = _barriers(P.STAGES, 1)
    empty = _barriers(P.STAGES, 1 if P.PING_PONG else P.GROUPS)
    residual_ready = _barriers(2 * P.GROUPS, 1)
    residual_empty = _barriers(2 * P.GROUPS, 1)
    turn = _barriers(P.GROUPS, 1)
    fence_async_shared()
    work = _Work(
        x,
        weight,
        weight_tail if P.TAIL else weight,
        out,
        out_tail if P.OUT_TAIL else out,
        residual if P.RESIDUAL else out,
        residual_tail if P.RESIDUAL and P.OUT_TAIL else out,
        out_ptr,
        bias_ptr if P.BIAS else out_ptr,
        num_rows_ptr if P.NUM_ROWS else out_ptr,
        capacity,
        x_ring,
        weight_ring,
        weight_tail_ring,
        out_blocks,
        out_tail_blocks,
        ready,
        empty,
        residual_ready,
        residual_empty,
        turn,
        P,
    )
    # Every thread starts with 64K / threads registers (warps are padded to groups of four); the loading warps keep
    # 24 and the first group takes what is left. Argument tuples stand here, not in a name: a name loses constexprs.
    if P.GROUPS == 1:
        gl.warp_specialize(
            [(_multiply_partition, (0, work)), (_load_partition, (work,)), (_residual_partition, (work,))],
            [1, 1],
            [24, 24],
        )
    elif P.GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_partition, (0, work)),
                (_multiply_partition, (1, work)),
                (_load_partition, (work,)),
                (_residual_partition, (work,)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_partition, (0, work)),
                (_multiply_partition, (1, work)),
                (_multiply_partition, (2, work)),
                (_load_partition, (work,)),
                (_residual_partition, (work,)),
            ],
            [4, 4, 1, 1],
            [184, 112, 24, 24] if P.DOUBLE else [160, 160, 24, 24],
        )


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], GL_DTYPES[dtype])


def _describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = _layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [rows, columns], layout)


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    *,
    quick_gelu: bool,
    tile: HopperTile,
    programs: int,
) -> None:
    """Launch on the current device and stream.

    Args:
        x: ``[rows, K]``, bf16 or fp16 as all; rows and base of every matrix are multiples of 16 bytes.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        residual: ``[rows, N]`` or None.
        num_rows: int32 ``[1]`` on the device, or None for all rows.
        out: ``[rows, N]``, contiguous, rows > 0.
        quick_gelu: whether the activation is applied, before the residual.
        tile: the tile and its work sharing; decides the time and not the bits.
        programs: the multiprocessors of the device.
    """
    rows, k = x.shape
    n = weight.shape[0]
    main, tail = tile.column_parts
    plan = plan_for(
        tile, n, k, programs, x.dtype, bias is not None, quick_gelu, residual is not None, num_rows is not None
    )
    height, out_main, out_tail = tile.block_rows, plan.OUT_MAIN.value, plan.OUT_TAIL.value
    tiles = -(-rows // tile.rows) * plan.TILE_COLUMNS.value
    linear_kernel[(min(programs, tiles),)](
        _describe(x, height, tile.block_k),
        _describe(weight, main, tile.block_k),
        _describe(weight, tail, tile.block_k) if tail else None,
        _describe(out, height, out_main),
        _describe(out, height, out_tail) if out_tail else None,
        _describe(residual, height, out_main) if residual is not None else None,
        _describe(residual, height, out_tail) if residual is not None and out_tail else None,
        out,
        bias,
        num_rows,
        rows,
        plan,
        num_warps=4,
        launch_pdl=tile.pdl,
    )
