"""Rotary inside the Hopper linear: q and k leave the qkv projection rotated.

A component of a head turns together with the one half a head further on. So that both lie in the registers of one
thread, a tile's columns of q and k are loaded in paired order: 8 rows of the weight from the first half of a head, then
the 8 rows of the second half that are their partners. Shared memory swizzled by 128 bytes consists of such groups of
8 rows, so a group may come from anywhere: TMA loads boxes ``[2, 8, DEPTH]`` of the weight as ``[half heads, HALF, K]``.
The product q . k does not change when both have their channels in another order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


@gluon.jit
def load_pairs(work, column, step, bar, pairs, first, WIDTH: gl.constexpr):
    """Load ``WIDTH`` columns of q or k from ``column`` on, in paired order, into the boxes from ``first`` on."""
    P: gl.constexpr = work.plan
    GROUPS_OF_HEAD: gl.constexpr = P.HALF // 8
    for box in gl.static_range(WIDTH // 16):
        group = column // 16 + box
        half_head = group // GROUPS_OF_HEAD * 2
        at = [half_head, group % GROUPS_OF_HEAD * 8, step * P.DEPTH]
        tma.async_copy_global_to_shared(work.weight_pairs, at, bar, pairs.index(first + box))


@gluon.jit
def rotate(work, acc, live, row, column, LAYOUT: gl.constexpr):
    """Add the bias and rotate; columns of q or k in paired order from ``column`` on, fp32."""
    P: gl.constexpr = work.plan
    ROWS: gl.constexpr = acc.shape[0]
    GROUPS: gl.constexpr = acc.shape[1] // 16
    GROUPS_OF_HEAD: gl.constexpr = P.HALF // 8
    first, second = acc.reshape((ROWS, GROUPS, 2, 8)).permute((0, 1, 3, 2)).split()  # [ROWS, GROUPS, 8]
    PAIRED: gl.constexpr = first.type.layout

    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRED)  # [GROUPS, 8]
    group = column // 16 + gl.arange(0, GROUPS, gl.SliceLayout(1, COLUMNS))
    in_group = gl.arange(0, 8, gl.SliceLayout(0, COLUMNS))
    channel = (group % GROUPS_OF_HEAD * 8)[:, None] + in_group[None, :]
    if P.BIAS:
        bias_ptr = work.bias_ptr + ((group // GROUPS_OF_HEAD * 2 * P.HALF)[:, None] + channel)
        first = first + gl.load(bias_ptr).to(gl.float32)[None, :, :]
        second = second + gl.load(bias_ptr + P.HALF).to(gl.float32)[None, :, :]

    offs_r = row + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, PAIRED)))
    # rows past the last live one repeat it, which needs no mask; they are not stored
    table_row = gl.expand_dims(gl.minimum(offs_r, live - 1)[:, None] * (2 * P.HALF), 2)
    cos_ptr = work.table_ptr + (table_row + gl.expand_dims(channel, 0))
    cos = gl.load(cos_ptr)
    sin = gl.load(cos_ptr + P.HALF)
    # written as fma so that every tile contracts the same product
    turned = gl.fma(first, cos, -(second * sin))
    partner = gl.fma(second, cos, first * sin)

    paired = gl.join(turned, partner).permute((0, 1, 3, 2)).reshape(acc.shape)
    return gl.convert_layout(paired, LAYOUT, assert_trivial=True)
