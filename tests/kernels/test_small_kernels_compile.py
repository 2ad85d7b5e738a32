"""The small kernels, compiled for every architecture: no spills, and vector loads."""

import pytest
import torch
from offline_compile import SHARED_MEMORY_LIMIT, Report, report

from ernie_vit.kernels.rotary import inverse_frequencies
from ernie_vit.kernels.triton import layer_norm, patch_embed, rotary

pytestmark = pytest.mark.compile

ARCHITECTURES = list(SHARED_MEMORY_LIMIT)
EARLY = {arch: arch in ("sm_90", "sm_100", "sm_120") for arch in ARCHITECTURES}
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def check(result: Report) -> None:
    assert result.spill_bytes == 0
    assert result.shared <= SHARED_MEMORY_LIMIT[result.arch]


def live_rows(counted: bool) -> tuple[dict[str, str], dict[str, None]]:
    """Signature and constexprs of ``num_rows_ptr`` with a count of live rows, and without."""
    return ({"num_rows_ptr": "*i32"}, {}) if counted else ({}, {"num_rows_ptr": None})


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("width", "dtype", "counted", "kind"),
    [
        pytest.param(1280, torch.bfloat16, True, "", id="tower"),
        pytest.param(1280, torch.float32, True, "", id="tower-fp32"),
        pytest.param(1280, torch.float16, False, "", id="tower-fp16-all-rows"),
        pytest.param(5120, torch.bfloat16, True, "", id="resampler"),
        pytest.param(5120, torch.bfloat16, True, "indexed", id="resampler-indexed"),
        pytest.param(2560, torch.bfloat16, True, "root mean square", id="resampler-rms"),
    ],
)
def test_layer_norm(arch: str, width: int, dtype: torch.dtype, counted: bool, kind: str) -> None:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), TYPES[dtype])
    signature, constexprs = live_rows(counted)
    if kind == "root mean square":
        constexprs["bias_ptr"] = None
    else:
        pointers["bias_ptr"] = TYPES[dtype]
    if kind == "indexed":
        pointers["index_ptr"] = "*i32"
    else:
        constexprs["index_ptr"] = None
    main, tail = layer_norm.blocks(width)
    early = EARLY[arch] and kind != "indexed"
    result = report(
        layer_norm._layer_norm_kernel,
        {**pointers, **signature, "x_row_units": "i32", "rows": "i32", "eps": "fp32"},
        {**constexprs, "WIDTH": width, "UNIT": 16, "MAIN": main, "TAIL": tail, "EARLY": early},
        arch=arch,
        num_warps=layer_norm.num_warps(width, dtype),
    )
    check(result)
    assert result.widest_load >= 128
    if early and arch == "sm_90":
        # weight and bias are loaded before the wait, and the row does not wait for the count
        ahead, waited = result.assembly.split("ACQBULK")
        loads = width * dtype.itemsize // 16 // 32 // layer_norm.num_warps(width, dtype)  # of 16 bytes a thread
        assert ahead.count("LDG.E.128") == loads * (2 if "bias_ptr" in pointers else 1)
        assert waited.split("EXIT")[0].count("LDG.E.128") == loads


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("counted", [True, False], ids=["live-rows", "all-rows"])
def test_apply_rotary(arch: str, dtype: torch.dtype, counted: bool) -> None:
    signature, constexprs = live_rows(counted)
    result = report(
        rotary._apply_rotary_kernel,
        {
            "qkv_ptr": TYPES[dtype],
            "table_ptr": "*fp32",
            "qkv_row_units": "i32",
            "rows": "i32",
            **signature,
        },
        {**constexprs, "HEADS": 16, "HALF": 40, "UNIT": 8, "BLOCK": rotary.PAIRS // 8, "EARLY": EARLY[arch]},
        arch=arch,
        num_warps=4,
    )
    check(result)
    assert result.widest_load >= 128


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rotary_table(arch: str) -> None:
    result = report(
        rotary._rotary_table_kernel,
        {
            "cu_seqlens_ptr": "*i32",
            "frame_sizes_ptr": "*i32",
            "table_ptr": "*fp32",
            "sequences": "i32",
            "rows": "i32",
        },
        {
            "FREQUENCIES": tuple(inverse_frequencies(80, 10000.0, torch.device("cpu")).tolist()),
            "COUNT": 20,
            "BLOCK_ANGLES": 64,
            "BLOCK_ROWS": rotary.TABLE_ROWS,
            "BLOCK_CUTS": rotary.CUTS,
        },
        arch=arch,
        num_warps=rotary.TABLE_WARPS,
    )
    check(result)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pixels", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counted", [True, False], ids=["live-rows", "all-rows"])
def test_aligned_copies(arch: str, pixels: torch.dtype, counted: bool) -> None:
    pointers = dict.fromkeys(("weight_ptr", "pixels_out_ptr", "weight_out_ptr"), "*bf16")
    signature, constexprs = live_rows(counted)
    numbers = {"N": 1280, "K": 588, "PADDED": 592, "BLOCK_ROWS": patch_embed.BLOCK_ROWS, "BLOCK_COLUMNS": 1024}
    result = report(
        patch_embed.align_kernel,
        {
            "pixels_ptr": TYPES[pixels],
            **pointers,
            **signature,
            **dict.fromkeys(("rows", "stride_pixels", "stride_weight"), "i32"),
        },
        # rows of 588 numbers: 8 bytes divide their addresses, or 16
        {**constexprs, **numbers, "ALIGN_PIXELS": 4 * pixels.itemsize, "ALIGN_WEIGHT": 8},
        arch=arch,
        num_warps=4,
    )
    check(result)
    assert result.widest_load >= 32 * pixels.itemsize
