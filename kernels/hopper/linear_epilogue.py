"""The epilogue of the Hopper linear: from a row block's accumulator to the rows that are live, in memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ernie_vit.kernels.hopper.linear_rotary import rotate


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
def _add_bias(work, acc, column, LAYOUT: gl.constexpr):
    P: gl.constexpr = work.plan
    if P.BIAS:
        columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
        # TMA clips at N, a plain load does not
        acc = acc + gl.load(work.bias_ptr + columns, mask=columns < P.N, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _activate(acc, ACTIVATION: gl.constexpr):
    if ACTIVATION == "quick_gelu":
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
    elif ACTIVATION == "gelu":
        acc = 0.5 * acc * (1 + gl.erf(0.7071067811865476 * acc))
    return acc


@gluon.jit
def _finish(work, acc, live, row, column, slot, block, use, descriptor, LAYOUT: gl.constexpr, FIRST: gl.constexpr):
    """Bias, rotation, activation, residual and the only rounding; stores live rows only."""
    P: gl.constexpr = work.plan
    if P.HALF:
        if column < P.ROTATED:
            acc = rotate(work, acc, live, row, column, LAYOUT)
        else:
            acc = _add_bias(work, acc, column, LAYOUT)
    else:
        acc = _add_bias(work, acc, column, LAYOUT)
    acc = _activate(acc, P.ACTIVATION)
    if P.RESIDUAL:
        mbarrier.wait(work.shared.residual_ready.index(slot), use & 1)
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
        mbarrier.arrive(work.shared.residual_empty.index(slot))


@gluon.jit
def store_block(work, main, tail, live, row, column, use, GROUP: gl.constexpr):
    P: gl.constexpr = work.plan
    block = work.shared.out.index(GROUP)
    _finish(work, main, live, row, column, GROUP, block, use, work.out, P.OUT_LAYOUT, True)
    if P.OUT_TAIL:
        SLOT: gl.constexpr = P.GROUPS + GROUP
        block = work.shared.out_tail.index(GROUP)
        at = column + P.OUT_MAIN
        _finish(work, tail, live, row, at, SLOT, block, use, work.out_tail, P.OUT_TAIL_LAYOUT, False)


@gluon.jit
def store_halves(work, acc, live, row, column, use, GROUP: gl.constexpr):
    P: gl.constexpr = work.plan
    left, right = acc.reshape((P.ROWS, 2, P.OUT_MAIN)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, P.OUT_LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, P.OUT_LAYOUT, assert_trivial=True)
    store_block(work, left, right, live, row, column, use, GROUP)
