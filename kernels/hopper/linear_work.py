"""What the partitions of the Hopper linear share: compile-time numbers, shared memory, descriptors, tile order."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from ernie_vit.kernels.tiles.linear import HopperTile

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

# Registers of the warps that load.
LOADING = 24
LOADING_PAIRS = 32


class Plan(str):
    """The compile-time numbers of one kernel, each a ``gl.constexpr``; equal plans are one compiled kernel.

    A string that spells them: Triton hashes and compares it at each launch, and writes it to JSON for its hooks.

    Args:
        tile: the shape of a tile and how its work is shared out.
        n, k: columns of the output, columns of x.
        programs: multiprocessors of the device, which is a program's step from tile to tile; as a number known at
            run time it costs the register that makes the 320-row tile spill.
        dtype: of every tensor.
        bias, residual, num_rows: which parts the call has.
        activation: "quick_gelu", "gelu" or None.
        rotary_half: half of head_dim, if the first two thirds of the columns, q and k, are rotated; else 0.
    """

    # What the host reads of them.
    OUT_MAIN: gl.constexpr
    OUT_TAIL: gl.constexpr
    TILE_COLUMNS: gl.constexpr

    def __new__(
        cls,
        tile: HopperTile,
        n: int,
        k: int,
        programs: int,
        dtype: torch.dtype,
        bias: bool,
        activation: str | None,
        residual: bool,
        num_rows: bool,
        rotary_half: int = 0,
    ) -> "Plan":
        main, tail = tile.column_parts
        # A group with two row blocks has registers and shared memory for half an output block at a time.
        halves = tile.row_blocks > tile.groups > 1
        steps = -(-k // tile.block_k)
        # ptxas holds wgmma to the registers at entry, 64K / threads: 256 columns fit up to two groups.
        widest = 256 if tile.groups < 3 else 128

        # Every thread starts with 64K / threads registers (warps are padded to groups of four); the loading warps keep
        # a few and the first group takes what the others leave. Pairs have twice a box's coordinates to remember.
        loading = LOADING_PAIRS if rotary_half else LOADING
        multiplying = {1: [], 2: [264 - loading], 3: [184, 112] if halves else [160, 160]}[tile.groups]

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
            "ACTIVATION": activation,
            "RESIDUAL": residual,
            "NUM_ROWS": num_rows,
            "REGISTERS": [*multiplying, loading, loading],
            "HALF": rotary_half,
            "ROTATED": n // 3 * 2 if rotary_half else 0,  # columns
            # Of the main columns of a stage in paired order, those that the first loading warp brings: about half of
            # all boxes, for the second one brings x and the tail too.
            "FIRST_PAIRS": main * 5 // 8 // 16 * 16,
            "DTYPE": DTYPES[dtype],
            "MAIN_LAYOUT": accumulator(main),
            "TAIL_LAYOUT": accumulator(tail or 16),
            "OUT_LAYOUT": accumulator(main // 2 if halves else main),
            "OUT_TAIL_LAYOUT": accumulator(main // 2 if halves else tail or 16),
        }
        plan = super().__new__(cls, ", ".join(f"{name}={value}" for name, value in numbers.items()))
        plan.__dict__.update({name: gl.constexpr(value) for name, value in numbers.items()})
        return plan


plan_for = cache(Plan)


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


class Descriptor(TensorDescriptor):  # type: ignore[misc]  # Triton has no types
    """A TMA descriptor of a tensor that the linear has checked: the checks of its base cost more than all the rest."""

    def __post_init__(self) -> None:
        pass


def describe(matrix: Tensor, rows: int, columns: int) -> Descriptor:
    """A TMA descriptor of ``matrix`` in blocks ``[rows, columns]``."""
    layout = _layout(rows, columns, matrix.dtype)
    return Descriptor(matrix, matrix.shape, matrix.stride(), [rows, columns], layout)


def describe_pairs(weight: Tensor, half: int, columns: int) -> Descriptor:
    """A TMA descriptor of a qkv weight ``[3 * heads * 2 * half, K]`` as ``[6 * heads, half, K]``.

    Its blocks hold 8 rows of a head's first half and their 8 partners of the second.
    """
    n, k = weight.shape
    stride = weight.stride(0)
    block = [2, 8, columns]
    return Descriptor(
        weight, [n // half, half, k], [half * stride, stride, 1], block, _pairs_layout(columns, weight.dtype)
    )


@cache
def _pairs_layout(columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([2, 8, columns], DTYPES[dtype])


@aggregate
class Shared:
    """A program's shared memory; ``_tail``: the columns past the largest power of two of a tile."""

    x_ring: gl.shared_memory_descriptor  # [STAGES * BLOCKS, ROWS, DEPTH]
    weight_ring: gl.shared_memory_descriptor  # [STAGES, MAIN, DEPTH]
    weight_tail_ring: gl.shared_memory_descriptor  # [STAGES, TAIL, DEPTH]
    pairs_ring: (
        gl.shared_memory_descriptor
    )  # the same two again, as boxes of 16 rows: [STAGES * MAIN / 16, 2, 8, DEPTH]
    pairs_tail_ring: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # [GROUPS, ROWS, OUT_MAIN], where the residual is loaded first
    out_tail: gl.shared_memory_descriptor  # [GROUPS, ROWS, OUT_TAIL]
    ready: gl.shared_memory_descriptor  # a ring stage is loaded
    empty: gl.shared_memory_descriptor  # a ring stage has been read
    residual_ready: gl.shared_memory_descriptor  # the same of an output block: main parts, then tails
    residual_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # which ping-pong group reads the ring next

    @gluon.constexpr_function
    def __init__(
        self, x_ring, weight_ring, weight_tail_ring, pairs_ring, pairs_tail_ring, out, out_tail, ready, empty,
        residual_ready, residual_empty, turn,
    ):  # fmt: skip
        self.x_ring, self.weight_ring, self.weight_tail_ring = x_ring, weight_ring, weight_tail_ring
        self.pairs_ring, self.pairs_tail_ring = pairs_ring, pairs_tail_ring
        self.out, self.out_tail = out, out_tail
        self.ready, self.empty, self.turn = ready, empty, turn
        self.residual_ready, self.residual_empty = residual_ready, residual_empty


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(bars.index(index), count=count)
    return bars


@gluon.jit
def allocate(x, weight, weight_tail, weight_pairs, out, out_tail, PLAN: gl.constexpr):
    """Shared memory in the layouts of the descriptors, with its barriers; parts that a plan lacks alias another."""
    P: gl.constexpr = PLAN
    x_ring = gl.allocate_shared_memory(P.DTYPE, [P.STAGES * P.BLOCKS, P.ROWS, P.DEPTH], x.layout)
    weight_ring = gl.allocate_shared_memory(P.DTYPE, [P.STAGES, P.MAIN, P.DEPTH], weight.layout)
    out_blocks = gl.allocate_shared_memory(P.DTYPE, [P.GROUPS, P.ROWS, P.OUT_MAIN], out.layout)
    weight_tail_ring = weight_ring
    if P.TAIL:
        weight_tail_ring = gl.allocate_shared_memory(P.DTYPE, [P.STAGES, P.TAIL, P.DEPTH], weight_tail.layout)
    pairs_ring, pairs_tail_ring = weight_ring, weight_tail_ring
    if P.HALF:
        boxes: gl.constexpr = P.STAGES * P.MAIN // 16
        pairs_ring = weight_ring._reinterpret(P.DTYPE, [boxes, 2, 8, P.DEPTH], weight_pairs.layout)
        if P.TAIL:
            tail_boxes: gl.constexpr = P.STAGES * P.TAIL // 16
            pairs_tail_ring = weight_tail_ring._reinterpret(P.DTYPE, [tail_boxes, 2, 8, P.DEPTH], weight_pairs.layout)
    out_tail_blocks = out_blocks
    if P.OUT_TAIL:
        out_tail_blocks = gl.allocate_shared_memory(P.DTYPE, [P.GROUPS, P.ROWS, P.OUT_TAIL], out_tail.layout)
    ready = _barriers(P.STAGES, 1)
    empty = _barriers(P.STAGES, 1 if P.PING_PONG else P.GROUPS)
    # Only barriers that are used: the compiler gives the memory of others away, and PTX forbids to use a barrier's
    # memory again before mbarrier.inval.
    residual_ready, residual_empty, turn = ready, ready, ready
    if P.RESIDUAL:
        residual_ready = _barriers(2 * P.GROUPS, 1)
        residual_empty = _barriers(2 * P.GROUPS, 1)
    if P.PING_PONG:
        turn = _barriers(P.GROUPS, 1)
    fence_async_shared()
    return Shared(
        x_ring,
        weight_ring,
        weight_tail_ring,
        pairs_ring,
        pairs_tail_ring,
        out_blocks,
        out_tail_blocks,
        ready,
        empty,
        residual_ready,
        residual_empty,
        turn,
    )


@aggregate
class Work:
    """What a program works on: descriptors of the tensors, its shared memory, and the order of the tiles."""

    x: tma.tensor_descriptor
    weight: tma.tensor_descriptor
    weight_tail: tma.tensor_descriptor
    weight_pairs: tma.tensor_descriptor
    out: tma.tensor_descriptor
    out_tail: tma.tensor_descriptor
    residual: tma.tensor_descriptor
    residual_tail: tma.tensor_descriptor
    out_ptr: gl.tensor
    bias_ptr: gl.tensor
    num_rows_ptr: gl.tensor
    table_ptr: gl.tensor
    capacity: gl.tensor
    shared: Shared
    plan: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x, weight, weight_tail, weight_pairs, out, out_tail, residual, residual_tail, out_ptr, bias_ptr,
        num_rows_ptr, table_ptr, capacity, shared, plan,
    ):  # fmt: skip
        self.x, self.weight, self.weight_tail, self.weight_pairs = x, weight, weight_tail, weight_pairs
        self.out, self.out_tail = out, out_tail
        self.residual, self.residual_tail = residual, residual_tail
        self.out_ptr, self.bias_ptr, self.num_rows_ptr, self.table_ptr = out_ptr, bias_ptr, num_rows_ptr, table_ptr
        self.capacity = capacity
        self.shared = shared
        self.plan = gl.constexpr(plan)

    @gluon.jit
    def program(self):
        P: gl.constexpr = self.plan
        program = gl.program_id(0)
        if P.HALF:
            # read anew by each partition: kept for all of them, it is one register too many for the 320-row tile
            program = gl.inline_asm_elementwise(
                "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
        return program

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
