"""What a warpgroup of attention does between two products: its weights, its V block, its part of the result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pack(p, DTYPE: gl.constexpr):
    """[M, N] float32 -> [M, N / 2] int32 of two weights each.

    A loop carries a tensor of 16-bit elements in a register an element.
    """
    TO: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    CONVERT: gl.constexpr = "cvt.rn." + TO + ".f32 $0, $2, $1;"
    low, high = gl.split(gl.reshape(p, (p.shape[0], p.shape[1] // 2, 2)))
    return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """[M, N / 2] int32 -> [M, N], as the left operand of a product with accumulator ``LAYOUT``."""
    low = packed.to(gl.int16).to(DTYPE, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    p = gl.reshape(gl.join(low, high), (packed.shape[0], packed.shape[1] * 2))
    return gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def thread_sums(p):
    """Sums over the columns that one thread holds, [M, 8]; the four threads of a row are added once, at the end."""
    return gl.sum(gl.reshape(p, (p.shape[0], p.shape[1] // 8, 8)), 1)


@gluon.jit
def zero_rows(v, count):
    """Zero the first ``count`` rows of a V block in shared memory: a weight of 0 times NaN is NaN."""
    COLUMNS: gl.constexpr = v.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    offs_r = gl.arange(0, v.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    v.store(gl.where((offs_r >= count)[:, None], v.load(LAYOUT), 0.0))


@gluon.jit
def store_rows(out_ptr, accumulator, factor, count, STRIDE: gl.constexpr):
    """Store the first ``count`` rows of ``accumulator * factor``, converted to rows of 16 bytes a thread."""
    COLUMNS: gl.constexpr = accumulator.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    factor = gl.convert_layout(factor, gl.SliceLayout(1, accumulator.type.layout))
    out = (accumulator * factor[:, None]).to(out_ptr.dtype.element_ty)
    offs_r = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    offs_c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    out = gl.convert_layout(out, LAYOUT)
    gl.store(out_ptr + (offs_r[:, None] * STRIDE + offs_c[None, :]), out, mask=(offs_r < count)[:, None])
