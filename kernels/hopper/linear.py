"""The linear of Hopper GPUs in Gluon: out = residual + act(x @ weight.T + bias), bf16 or fp16.

Persistent and warp-specialised, one program a multiprocessor: one warp streams tiles of x and weight into a ring in
shared memory by TMA, one warp fetches the residual ahead into the output blocks or, where there is none and the copies
are many, issues a part of them; one to three groups of four warps multiply (wgmma), finish and store. K is summed in
order in fp32, so every tile gives the same bits; one rounding, at the end.

Cooperative: the groups hold the row blocks of one tall tile (five blocks over three groups as 2 + 2 + 1).
Ping-pong: each group has a tile of its own, so that one group's epilogue runs under another's wgmma.

With a table of angles it is the qkv projection of which q and k leave rotated (``linear_rotary.py``).

Programmatic dependent launch: the first weights are fetched before ``gdc_wait``, all else after it, and every program
waits, so that a kernel which has waited for this one has waited for all before it. The Gluon names are those of
Triton 3.6 to 3.8.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ernie_vit.kernels.hopper.linear_epilogue import store_block, store_halves
from ernie_vit.kernels.hopper.linear_rotary import load_pairs
from ernie_vit.kernels.hopper.linear_work import Work, allocate, describe, describe_pairs, plan_for
from ernie_vit.kernels.tiles.linear import HopperTile
from ernie_vit.kernels.triton.grid import multiprocessors
from ernie_vit.kernels.triton.launch import Launcher


@gluon.jit
def _load_columns(work, at, step, bar, stage):
    P: gl.constexpr = work.plan
    tma.async_copy_global_to_shared(work.weight, [at, step * P.DEPTH], bar, work.shared.weight_ring.index(stage))
    if P.TAIL:
        tail = work.shared.weight_tail_ring.index(stage)
        tma.async_copy_global_to_shared(work.weight_tail, [at + P.MAIN, step * P.DEPTH], bar, tail)


@gluon.jit
def _load_weight(work, column, step, stage):
    """Announce a stage and load its weights; of those in paired order, what is left of them by ``_load_rest``."""
    P: gl.constexpr = work.plan
    bar = work.shared.ready.index(stage)
    mbarrier.expect(bar, (P.BLOCKS * P.ROWS + P.COLUMNS) * P.DEPTH * 2)  # of the x blocks too
    at = column * P.COLUMNS
    if P.HALF:
        if at < P.ROTATED:
            load_pairs(work, at, step, bar, work.shared.pairs_ring, stage * (P.MAIN // 16), P.FIRST_PAIRS)
        else:
            _load_columns(work, at, step, bar, stage)
    else:
        _load_columns(work, at, step, bar, stage)


@gluon.jit
def _load_x(work, row, step, stage):
    P: gl.constexpr = work.plan
    for block in gl.static_range(P.BLOCKS):
        at = (row * P.BLOCKS + block) * P.ROWS
        shared = work.shared.x_ring.index(stage * P.BLOCKS + block)
        tma.async_copy_global_to_shared(work.x, [at, step * P.DEPTH], work.shared.ready.index(stage), shared)


@gluon.jit
def _load_rest(work, row, column, step, stage):
    """x, and the weights in paired order that ``_load_weight`` leaves."""
    P: gl.constexpr = work.plan
    _load_x(work, row, step, stage)
    bar = work.shared.ready.index(stage)
    at = column * P.COLUMNS
    if at < P.ROTATED:
        first = stage * (P.MAIN // 16) + P.FIRST_PAIRS // 16
        load_pairs(work, at + P.FIRST_PAIRS, step, bar, work.shared.pairs_ring, first, P.MAIN - P.FIRST_PAIRS)
        if P.TAIL:
            load_pairs(work, at + P.MAIN, step, bar, work.shared.pairs_tail_ring, stage * (P.TAIL // 16), P.TAIL)


@gluon.jit
def _load_partition(work):
    P: gl.constexpr = work.plan
    program = work.program()
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
            if not P.HALF:
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
            mbarrier.wait(work.shared.empty.index(stage), ((step_count // P.STAGES) & 1) ^ 1)
            _load_weight(work, column, step, stage)
            if not P.HALF:
                _load_x(work, row, step, stage)
            step_count += 1
    if P.GROUP_ROWS == 0:  # noqa: SIM102  the outer condition is known to the compiler
        if (filled > 0) & (program >= total):  # the hint was wrong: let the copies land before the program ends
            for stage in gl.static_range(P.STAGES):
                if P.HALF:
                    _load_rest(work, row, column, stage, stage)
                mbarrier.wait(work.shared.ready.index(stage), 0)


@gluon.jit
def _rest_partition(work):
    """The second loading warp of a projection that rotates: one takes longer to issue all boxes than the products."""
    P: gl.constexpr = work.plan
    gdc_wait()
    tile_rows = work.tile_rows(work.live_rows())
    step_count = gl.to_tensor(0)
    for tile in range(work.program(), tile_rows * P.TILE_COLUMNS, P.PROGRAMS):
        row, column = work.place(tile, tile_rows)
        for step in range(P.STEPS):
            stage = step_count % P.STAGES
            mbarrier.wait(work.shared.empty.index(stage), ((step_count // P.STAGES) & 1) ^ 1)
            _load_rest(work, row, column, step, stage)
            step_count += 1


@gluon.jit
def _load_residual(work, descriptor, row, column, slot, blocks, width: gl.constexpr, use):
    P: gl.constexpr = work.plan
    group = slot % P.GROUPS
    mbarrier.wait(work.shared.residual_empty.index(slot), (use & 1) ^ 1)
    mbarrier.expect(work.shared.residual_ready.index(slot), P.ROWS * width * 2)
    ready = work.shared.residual_ready.index(slot)
    tma.async_copy_global_to_shared(descriptor, [row, column], ready, blocks.index(group))


@gluon.jit
def _load_residual_block(work, row, column, group, use):
    P: gl.constexpr = work.plan
    at = column * P.COLUMNS
    _load_residual(work, work.residual, row, at, group, work.shared.out, P.OUT_MAIN, use)
    if P.OUT_TAIL:
        tail = at + P.OUT_MAIN
        slot = P.GROUPS + group
        _load_residual(work, work.residual_tail, row, tail, slot, work.shared.out_tail, P.OUT_TAIL, use)


@gluon.jit
def _residual_partition(work):
    P: gl.constexpr = work.plan
    gdc_wait()
    tile_rows = work.tile_rows(work.live_rows())
    count = gl.to_tensor(0)  # tiles before this one
    for tile in range(work.program(), tile_rows * P.TILE_COLUMNS, P.PROGRAMS):
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
def _second_load_partition(work):
    P: gl.constexpr = work.plan
    if P.RESIDUAL:
        _residual_partition(work)
    elif P.HALF:
        _rest_partition(work)


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
    for tile in range(work.program() + FIRST * P.PROGRAMS, tile_rows * P.TILE_COLUMNS, STRIDE * P.PROGRAMS):
        tile_row, tile_column = work.place(tile, tile_rows)
        acc = gl.zeros([P.ROWS, P.MAIN], gl.float32, P.MAIN_LAYOUT)
        second = gl.zeros([P.ROWS, SECOND_COLUMNS], gl.float32, SECOND_LAYOUT)
        step_count = count * P.STEPS
        if P.PING_PONG:
            # A phase is one bit: start only after the group before has waited for its last stage.
            mbarrier.wait(work.shared.turn.index(GROUP), ((count // P.GROUPS) & 1) ^ (1 if GROUP == 0 else 0))
        for step in range(P.STEPS):
            stage = step_count % P.STAGES
            mbarrier.wait(work.shared.ready.index(stage), (step_count // P.STAGES) & 1)
            x = work.shared.x_ring.index(stage * P.BLOCKS + BLOCK)
            weight = work.shared.weight_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(x, weight, acc, use_acc=step > 0, is_async=True)
            if TWO:
                x_second = work.shared.x_ring.index(stage * P.BLOCKS + BLOCK + 1)
                second = warpgroup_mma(x_second, weight, second, use_acc=step > 0, is_async=True)
            elif P.TAIL:
                weight_tail = work.shared.weight_tail_ring.index(stage).permute((1, 0))
                second = warpgroup_mma(x, weight_tail, second, use_acc=step > 0, is_async=True)
            # each wgmma is a commit group of its own: all of this step may stay in flight
            if TWO or P.TAIL:
                acc, second = warpgroup_mma_wait(2, deps=[acc, second])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(work.shared.empty.index((step_count + P.STAGES - 1) % P.STAGES), pred=step > 0)
            step_count += 1
        if P.PING_PONG:
            mbarrier.arrive(work.shared.turn.index((GROUP + 1) % P.GROUPS))
        if TWO or P.TAIL:
            acc, second = warpgroup_mma_wait(0, deps=[acc, second])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(work.shared.empty.index((step_count + P.STAGES - 1) % P.STAGES))

        row = (tile_row * P.BLOCKS + BLOCK) * P.ROWS
        column = tile_column * P.COLUMNS
        if P.DOUBLE:
            store_halves(work, acc, live, row, column, use, GROUP)
            use += 1
            if TWO:
                store_halves(work, second, live, row + P.ROWS, column, use, GROUP)
                use += 1
        else:
            store_block(work, acc, second, live, row, column, use, GROUP)
            use += 1
        count += STRIDE
    tma.store_wait(0)


# The count is one number of a longer buffer, the bias may be a slice: their alignment says nothing and must not
# lead to another compilation.
@gluon.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["bias_ptr", "num_rows_ptr"])
def linear_kernel(
    x,  # descriptor [capacity, K], blocks [ROWS, DEPTH]
    weight,  # [N, K], blocks [MAIN, DEPTH]
    weight_tail,  # the same tensor, blocks [TAIL, DEPTH], or None
    weight_pairs,  # the same tensor as [half heads, HALF, K], blocks [2, 8, DEPTH], or None
    out,  # [capacity, N], blocks [ROWS, OUT_MAIN]
    out_tail,  # blocks [ROWS, OUT_TAIL], or None
    residual,  # [capacity, N], blocks as of out, or None
    residual_tail,
    out_ptr,  # out again, contiguous, for the block that the last live row ends in
    bias_ptr,  # [N] or None
    num_rows_ptr,  # [1] int32 or None
    table_ptr,  # [capacity, 2, HALF] fp32, cosines and sines of q's and k's angles, or None
    capacity,
    PLAN: gl.constexpr,
):
    P: gl.constexpr = PLAN
    gdc_launch_dependents()
    shared = allocate(x, weight, weight_tail, weight_pairs, out, out_tail, P)
    work = Work(
        x,
        weight,
        weight_tail if P.TAIL else weight,
        weight_pairs if P.HALF else weight,
        out,
        out_tail if P.OUT_TAIL else out,
        residual if P.RESIDUAL else out,
        residual_tail if P.RESIDUAL and P.OUT_TAIL else out,
        out_ptr,
        bias_ptr if P.BIAS else out_ptr,
        num_rows_ptr if P.NUM_ROWS else out_ptr,
        table_ptr if P.HALF else out_ptr,
        capacity,
        shared,
        P,
    )
    # Argument tuples stand here, not in a name: a name loses constexprs.
    if P.GROUPS == 1:
        gl.warp_specialize(
            [(_multiply_partition, (0, work)), (_load_partition, (work,)), (_second_load_partition, (work,))],
            [1, 1],
            P.REGISTERS,
        )
    elif P.GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_partition, (0, work)),
                (_multiply_partition, (1, work)),
                (_load_partition, (work,)),
                (_second_load_partition, (work,)),
            ],
            [4, 1, 1],
            P.REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_partition, (0, work)),
                (_multiply_partition, (1, work)),
                (_multiply_partition, (2, work)),
                (_load_partition, (work,)),
                (_second_load_partition, (work,)),
            ],
            [4, 4, 1, 1],
            P.REGISTERS,
        )


_launch = Launcher(linear_kernel)


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_rows: Tensor | None,
    out: Tensor,
    *,
    activation: str | None,
    tile: HopperTile,
    table: Tensor | None = None,
) -> None:
    """Launch on the tensors' device, on its current stream.

    Args:
        x: ``[rows, K]``, bf16 or fp16 as all; rows and base of every matrix are multiples of 16 bytes.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        residual: ``[rows, N]`` or None.
        num_rows: int32 ``[1]`` on the device, or None for all rows.
        out: ``[rows, N]``, contiguous, rows > 0.
        activation: "quick_gelu", "gelu" or None, applied before the residual.
        tile: the tile and its work sharing; decides the time and not the bits.
        table: fp32 ``[rows, 2, head_dim // 2]``, contiguous, of a qkv projection: q and k are rotated and leave in
            paired order (``kernels/hopper/linear_rotary.py``). The tile must suit (``rotary_fits``).
    """
    rows, k = x.shape
    n = weight.shape[0]
    main, tail = tile.column_parts
    programs = multiprocessors(x.device)
    parts = (bias is not None, activation, residual is not None, num_rows is not None)
    half = table.shape[2] if table is not None else 0
    plan = plan_for(tile, n, k, programs, x.dtype, *parts, half)
    height, out_main, out_tail = tile.block_rows, plan.OUT_MAIN.value, plan.OUT_TAIL.value
    tiles = -(-rows // tile.rows) * plan.TILE_COLUMNS.value
    _launch(
        min(tiles, programs),
        x.device,
        (
            describe(x, height, tile.block_k),
            describe(weight, main, tile.block_k),
            describe(weight, tail, tile.block_k) if tail else None,
            describe_pairs(weight, half, tile.block_k) if half else None,
            describe(out, height, out_main),
            describe(out, height, out_tail) if out_tail else None,
            describe(residual, height, out_main) if residual is not None else None,
            describe(residual, height, out_tail) if residual is not None and out_tail else None,
            out,
            bias,
            num_rows,
            table,
            rows,
        ),
        (plan,),
        num_warps=4,
        launch_pdl=tile.pdl,
    )
