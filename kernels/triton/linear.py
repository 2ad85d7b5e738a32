"""The linear in plain Triton, for every GPU and the interpreter: out = residual + act(x @ weight.T + bias).

Persistent: a launch has at most a few programs a multiprocessor, and they walk only tiles that hold live rows. K is
summed in order in fp32 whatever the tile; one rounding, at the end.
"""

import triton
import triton.language as tl
from torch import Tensor

from ernie_vit.kernels.tiles.linear import TritonTile
from ernie_vit.kernels.triton.grid import persistent_programs
from ernie_vit.kernels.triton.launch import Launcher, row_alignment

# Rows of tiles that share a column of tiles while it is in the second-level cache; 4, 8 and 16 were within 2 %.
GROUP_ROWS = 8


# Alignment is stated by the ALIGN numbers, which depend on strides as well: a row slice or the last number of
# cu_seqlens is at any address and must not lead to another compilation.
@triton.jit(
    do_not_specialize=["rows", "stride_x", "stride_weight", "stride_residual"],
    do_not_specialize_on_alignment=["x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "num_rows_ptr"],
)
def linear_kernel(
    x_ptr,  # [rows, K], last dimension contiguous
    weight_ptr,  # [N, K], last dimension contiguous
    bias_ptr,  # [N] or None
    residual_ptr,  # [rows, N], last dimension contiguous, or None
    num_rows_ptr,  # [1] int32 or None
    out_ptr,  # [rows, N], contiguous
    rows,
    stride_x,
    stride_weight,
    stride_residual,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALIGN_X: tl.constexpr,  # bytes that divide the address of every row
    ALIGN_WEIGHT: tl.constexpr,
    ALIGN_RESIDUAL: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    live = rows
    if num_rows_ptr is not None:
        live = tl.minimum(tl.load(num_rows_ptr), rows)
    tile_rows = tl.cdiv(live, BLOCK_M)
    TILE_COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    offs_k = tl.arange(0, BLOCK_K)

    for tile in range(tl.program_id(0), tile_rows * TILE_COLUMNS, tl.num_programs(0)):
        first = tile // (GROUP_ROWS * TILE_COLUMNS) * GROUP_ROWS
        group_rows = tl.minimum(tile_rows - first, GROUP_ROWS)
        in_group = tile % (GROUP_ROWS * TILE_COLUMNS)
        pid_m = first + in_group % group_rows
        pid_n = in_group // group_rows

        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows and columns past the end repeat the last one, which needs no masks; they are not stored
        x_rows = x_ptr + tl.minimum(offs_m, live - 1).to(tl.int64)[:, None] * stride_x  # [BLOCK_M, 1]
        weight_rows = weight_ptr + tl.minimum(offs_n, N - 1).to(tl.int64)[None, :] * stride_weight

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            offs = start + offs_k
            x_ptrs = tl.multiple_of(x_rows + offs[None, :], (1, ALIGN_X))
            weight_ptrs = tl.multiple_of(weight_rows + offs[:, None], (ALIGN_WEIGHT, 1))
            if K % BLOCK_K == 0:
                x = tl.load(x_ptrs)
                weight = tl.load(weight_ptrs)
            else:
                mask_k = offs < K
                x = tl.load(x_ptrs, mask=mask_k[None, :], other=0.0)
                weight = tl.load(weight_ptrs, mask=mask_k[:, None], other=0.0)
            acc = tl.dot(x, weight, acc, input_precision="ieee")

        mask_n = offs_n < N
        mask = (offs_m < live)[:, None] & mask_n[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == "quick_gelu":
            acc *= tl.sigmoid(1.702 * acc)
        elif ACTIVATION == "gelu":
            acc *= 0.5 * (1 + tl.erf(0.7071067811865476 * acc))
        if residual_ptr is not None:
            offsets = offs_m.to(tl.int64)[:, None] * stride_residual + offs_n[None, :]
            residual_ptrs = tl.multiple_of(residual_ptr + offsets, (1, ALIGN_RESIDUAL))
            acc += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    tile: TritonTile,
) -> None:
    """Launch on the tensors' device, on its current stream.

    Args:
        x: ``[rows, K]``, bf16, fp16 or fp32 as all.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        residual: ``[rows, N]`` or None.
        num_rows: int32 ``[1]`` on the device, or None for all rows.
        out: ``[rows, N]``, contiguous, rows > 0.
        activation: "quick_gelu", "gelu" or None, applied before the residual.
        tile: the tile; decides the time and not the bits.
    """
    rows, k = x.shape
    n = weight.shape[0]
    tiles = -(-rows // tile.rows) * -(-n // tile.columns)
    programs = persistent_programs(tiles, x.device, per_multiprocessor=tile.programs_per_sm)
    _launch(
        programs,
        x.device,
        (
            x,
            weight,
            bias,
            residual,
            num_rows,
            out,
            rows,
            x.stride(0),
            weight.stride(0),
            residual.stride(0) if residual is not None else 0,
        ),
        (
            n,
            k,
            activation,
            row_alignment(x),
            row_alignment(weight),
            row_alignment(residual) if residual is not None else 16,
            GROUP_ROWS,
            tile.rows,
            tile.columns,
            tile.block_k,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
