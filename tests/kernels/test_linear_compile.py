"""Each shipped tile of the linears, compiled for each architecture that its table serves."""

import json
import re

import pytest
import torch
from offline_compile import SHARED_MEMORY_LIMIT, Report, report

from ernie_vit.kernels.tiles.linear import (
    HOPPER_DEFAULT,
    HOPPER_TILES,
    TRITON_DEFAULT,
    TRITON_FLOAT32,
    HopperTile,
    TritonTile,
    triton_regimes,
)

pytestmark = pytest.mark.compile

SMALLEST_SHARED_MEMORY = 64 * 1024


def compile_triton(
    tile: TritonTile,
    arch: str,
    *,
    k: int = 1280,
    dtype: str = "bf16",
    align: int = 16,
    activation: str = "quick_gelu",
) -> Report:
    """With the whole epilogue; ``align``: bytes that divide the address of a row of x or weight."""
    from ernie_vit.kernels.triton.linear import GROUP_ROWS, linear_kernel

    signature = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "out_ptr"), f"*{dtype}")
    signature |= {"num_rows_ptr": "*i32"}
    signature |= dict.fromkeys(("rows", "stride_x", "stride_weight", "stride_residual"), "i32")
    constexprs = {
        "N": 1280,
        "K": k,
        "ACTIVATION": activation,
        "ALIGN_X": align,
        "ALIGN_WEIGHT": align,
        "ALIGN_RESIDUAL": 16,
        "GROUP_ROWS": GROUP_ROWS,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.block_k,
    }
    return report(linear_kernel, signature, constexprs, arch=arch, num_warps=tile.num_warps, num_stages=tile.num_stages)


def compile_hopper(
    tile: HopperTile,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    activation: str = "quick_gelu",
    rotary_half: int = 0,
) -> Report:
    """With the epilogue that the tower has for a weight ``[n, k]``, or all of it."""
    from triton.experimental.gluon import language as gl

    from ernie_vit.kernels.hopper.linear import linear_kernel
    from ernie_vit.kernels.hopper.linear_work import Plan

    residual = n == 1280 or k == 5120
    parts = {"bias": True, "activation": activation if n == 5120 else None, "residual": residual, "num_rows": True}
    plan = Plan(tile, n, k, 132, dtype, **parts, rotary_half=rotary_half)
    element = "bf16" if dtype is torch.bfloat16 else "fp16"

    def descriptor(*block: int) -> str | None:
        if 0 in block:
            return None
        layout = gl.NVMMASharedLayout.get_default_for(list(block), plan.DTYPE.value)
        return f"tensordesc<{element}{list(block)},{layout!r}>"

    main, tail = tile.column_parts
    out, out_tail = (descriptor(tile.block_rows, part.value) for part in (plan.OUT_MAIN, plan.OUT_TAIL))
    types = {
        "x": descriptor(tile.block_rows, tile.block_k),
        "weight": descriptor(main, tile.block_k),
        "weight_tail": descriptor(tail, tile.block_k),
        "weight_pairs": descriptor(2, 8, tile.block_k) if rotary_half else None,
        "out": out,
        "out_tail": out_tail,
        "residual": out if residual else None,
        "residual_tail": out_tail if residual else None,
        "out_ptr": f"*{element}",
        "bias_ptr": f"*{element}",
        "num_rows_ptr": "*i32",
        "table_ptr": "*fp32" if rotary_half else None,
        "capacity": "i32",
    }
    signature = {name: type_ for name, type_ in types.items() if type_ is not None}
    absent = {name: None for name, type_ in types.items() if type_ is None}
    return report(linear_kernel, signature, {**absent, "PLAN": plan}, arch="sm_90", num_warps=4, launch_pdl=tile.pdl)


def barriers(found: Report) -> int:
    """How many mbarriers are initialised."""
    return len(re.findall(r"SYNCS\.EXCH\.64", found.assembly))


def check(found: Report) -> None:
    assert found.spill_bytes == 0
    assert not found.serialized_wgmma
    assert found.shared <= SHARED_MEMORY_LIMIT[found.arch]


def name(tile: HopperTile | TritonTile) -> str:
    if isinstance(tile, TritonTile):
        return f"{tile.rows}x{tile.columns}x{tile.block_k}-w{tile.num_warps}-s{tile.num_stages}"
    kind = "pp" if tile.ping_pong else "co"
    early = "-pdl" if tile.pdl else ""
    return f"{kind}{tile.rows}x{tile.columns}x{tile.block_k}-g{tile.groups}-s{tile.stages}{early}"


TRITON_CASES = [
    pytest.param(arch, tile, id=f"{arch}-{name(tile)}")
    for arch in SHARED_MEMORY_LIMIT
    for tile in dict.fromkeys(triton_regimes(arch, float32=False).tiles)
]
HOPPER_CASES = [
    pytest.param(n, k, tile, id=f"{n}x{k}-{name(tile)}")
    for (n, k), regimes in [*HOPPER_TILES.items(), ((5120, 5120), HOPPER_DEFAULT)]
    for tile in dict.fromkeys(regimes.tiles)
]
# the patch embedding's weight, 588 columns and zeros, is written by the kernel before
HOPPER_CASES += [
    pytest.param(1280, 592, tile.late(), id=f"1280x592-{name(tile.late())}") for tile in HOPPER_DEFAULT.tiles
]


@pytest.mark.parametrize(("arch", "tile"), TRITON_CASES)
def test_triton_tile(arch: str, tile: TritonTile) -> None:
    found = compile_triton(tile, arch)
    check(found)
    assert found.mma > 0
    assert (found.wgmma > 0) == (arch == "sm_90")
    assert found.widest_load == 128
    if arch.startswith("sm_"):
        assert found.async_copies > 0  # inputs are loaded ahead


@pytest.mark.parametrize("arch", SHARED_MEMORY_LIMIT)
def test_largest_triton_tile_with_gelu(arch: str) -> None:
    check(compile_triton(triton_regimes(arch, float32=False).tiles[-1], arch, activation="gelu"))


@pytest.mark.parametrize(("arch", "tile"), TRITON_CASES)
def test_triton_tile_with_pixel_rows(arch: str, tile: TritonTile) -> None:
    check(compile_triton(tile, arch, k=592))  # the last step is not a whole one


@pytest.mark.parametrize("arch", SHARED_MEMORY_LIMIT)
def test_float32_tile(arch: str) -> None:
    check(compile_triton(TRITON_FLOAT32.at(1), arch, dtype="fp32"))


@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "gfx942"])
def test_default_tile_fits_everywhere(arch: str) -> None:
    for k, align in ((1280, 16), (592, 16), (588, 8)):
        found = compile_triton(TRITON_DEFAULT.at(1), arch, k=k, align=align)
        check(found)
        assert found.shared <= SMALLEST_SHARED_MEMORY


@pytest.mark.gluon
@pytest.mark.parametrize(("n", "k", "tile"), HOPPER_CASES)
def test_hopper_tile(n: int, k: int, tile: HopperTile) -> None:
    found = compile_hopper(tile, n, k)
    check(found)
    assert found.wgmma > 0
    assert found.tma > 0
    # none that is not used: the compiler would give its memory to others
    residual = n == 1280 or k == 5120
    used = 2 * min(tile.stages, -(-k // tile.block_k)) + 4 * tile.groups * residual + tile.groups * tile.ping_pong
    assert barriers(found) == used


@pytest.mark.gluon
@pytest.mark.parametrize("tile", [case.values[2] for case in HOPPER_CASES if case.values[:2] == (3840, 1280)], ids=name)
def test_hopper_tile_with_rotary(tile: HopperTile) -> None:
    found, bare = compile_hopper(tile, 3840, 1280, rotary_half=40), compile_hopper(tile, 3840, 1280)
    check(found)
    assert found.wgmma == bare.wgmma
    # a box of 16 columns each, in place of one or two: once in the loop, and once a stage that is fetched ahead
    main, tail = tile.column_parts
    boxes = (main + tail) // 16
    assert found.tma == bare.tma + boxes * (1 + (0 if tile.group_rows else tile.stages))
    # cosines and sines of two neighbouring channels at a time
    columns, row_blocks = tile.columns, tile.row_blocks if not tile.ping_pong else tile.groups * tile.rows // 64
    assert len(re.findall(r"LDG\.E\.64\b", found.assembly)) == row_blocks * columns // 16 * 2 * 2


@pytest.mark.gluon
@pytest.mark.parametrize("tile", HOPPER_DEFAULT.tiles, ids=name)
def test_hopper_tile_with_gelu(tile: HopperTile) -> None:
    found, quick = (compile_hopper(tile, 5120, 10240, activation=activation) for activation in ("gelu", "quick_gelu"))
    check(found)
    assert found.wgmma == quick.wgmma
    assert found.assembly != quick.assembly


@pytest.mark.gluon
def test_hopper_tile_in_half_precision() -> None:
    found = compile_hopper(HOPPER_TILES[1280, 1280].at(4000), 1280, 1280, torch.float16)
    check(found)
    assert found.wgmma > 0
    assert "F32.BF16" not in found.assembly


@pytest.mark.gluon
def test_hopper_plan_is_what_triton_asks_of_a_compile_time_argument() -> None:
    from ernie_vit.kernels.hopper.linear_work import Plan

    def plan(rows: int) -> Plan:
        tile = HOPPER_TILES[1280, 1280].at(rows)
        return Plan(tile, 1280, 1280, 132, torch.bfloat16, bias=True, activation=None, residual=True, num_rows=True)

    assert plan(256) == plan(256)
    assert hash(plan(256)) == hash(plan(256))
    assert plan(256) != plan(4000)
    json.dumps({"constants": plan(256)})  # so that a compilation can be counted: hooks get it as JSON
