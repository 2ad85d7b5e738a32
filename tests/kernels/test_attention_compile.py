"""Every shipped attention tile, compiled for the GPUs that it serves: no spills, memory within the card's limit."""

import re

import pytest
import torch

from ernie_vit.kernels.tiles.attention import HOPPER_TILES, PIECE_ROWS, HopperTile, plain_tile

pytestmark = pytest.mark.compile

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PLAIN_ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# The model's own head, the widest, and masked parts: 72 is 64 and 8 of 16 channels, 120 is 64 and 56 of 64.
PLAIN_CASES = [
    *((torch.bfloat16, head_dim) for head_dim in (72, 80, 120, 128)),
    (torch.float16, 80),
    *((torch.float32, head_dim) for head_dim in (80, 128)),
]


@pytest.mark.parametrize(("dtype", "head_dim"), PLAIN_CASES, ids=lambda x: NAMES.get(x, str(x)))
@pytest.mark.parametrize("arch", PLAIN_ARCHS)
def test_plain_tile(arch, dtype, head_dim):
    from offline_compile import SHARED_MEMORY_LIMIT, report

    from ernie_vit.kernels.triton.attention import attention_kernel, constants

    vector = 16 // dtype.itemsize
    arguments = constants(dtype, num_heads=16, head_dim=head_dim, vector=vector, tile=plain_tile(arch, dtype))
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages")}
    signature = dict.fromkeys(attention_kernel.arg_names, "i32") | {"work_list_ptr": "*i32", "scale_log2": "fp32"}
    signature |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{NAMES[dtype]}")
    result = report(attention_kernel, signature, arguments, arch=arch, **options)

    assert result.spill_bytes == 0
    assert result.shared <= SHARED_MEMORY_LIMIT[arch]
    assert result.widest_load == 128
    assert result.mma > 0 or (dtype == torch.float32 and arch.startswith("sm_"))  # exact float32 has none on NVIDIA
    if arch == "sm_90" and dtype != torch.float32:
        assert result.wgmma > 0
        assert not result.serialized_wgmma


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.gluon
@pytest.mark.parametrize("tile", HOPPER_TILES, ids=["short", "two rounds", "middle", "long"])
def test_hopper_tile(tile: HopperTile, dtype: torch.dtype):
    from offline_compile import SHARED_MEMORY_LIMIT, report

    from ernie_vit.kernels.hopper.attention import attention_kernel, block_layout

    def descriptor(rows: int, columns: int) -> str:
        return f"tensordesc<{NAMES[dtype]}[{rows}, {columns}],{block_layout(rows, columns, dtype)!r}>"

    signature = {
        "q_main": descriptor(64, 64),
        "q_tail": descriptor(64, 16),
        "k_main": descriptor(128, 64),
        "k_tail": descriptor(128, 16),
        "v_main": descriptor(128, 64),
        "v_tail": descriptor(128, 16),
        "out_ptr": f"*{NAMES[dtype]}",
        "work_list_ptr": "*i32",
        "scale_log2": "fp32",
    }
    constants = {"HEADS": 16, "WARPGROUPS": tile.warpgroups, "PERSISTENT": tile.persistent}
    result = report(attention_kernel, signature, constants, arch="sm_90", num_warps=4, maxnreg=tile.maxnreg)

    assert result.spill_bytes == 0
    assert result.stack == 0
    assert tile.programs * (result.shared + 1024) <= SHARED_MEMORY_LIMIT["sm_90"] + 1024  # 1 KiB a program is reserved
    assert not result.serialized_wgmma
    # a warpgroup's products with K = 16: one block of scores before the loop, one in it, V in the loop and after it
    assert result.wgmma == tile.warpgroups * (2 * 80 // 16 + 2 * 2 * 128 // 16)
    # and its waits: for the first scores, in the loop, for the last values; three have a second one in the loop
    assert result.assembly.count("WARPGROUP.DEPBAR") == tile.warpgroups * (4 if tile.warpgroups == 3 else 3)
    assert result.tma == 2 * tile.warpgroups + 10
    # Q full and empty, two slots of the ring, a turn for each warpgroup: the compiler gives away what is not used
    turns = tile.warpgroups if tile.warpgroups > 1 else 0
    assert len(re.findall(r"SYNCS\.EXCH\.64", result.assembly)) == 2 + 2 * 2 + turns


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
@pytest.mark.parametrize("tile_rows", [32, 64, 128, 192])
def test_work_list(arch, tile_rows):
    from offline_compile import report

    from ernie_vit.kernels.triton.work_list import CHUNK, SCAN, work_list_kernel

    signature = dict.fromkeys(work_list_kernel.arg_names, "i32") | {"cu_seqlens_ptr": "*i32", "work_list_ptr": "*i32"}
    constants = {"TILE_ROWS": tile_rows, "PIECE_ROWS": PIECE_ROWS, "SCAN": SCAN, "CHUNK": CHUNK}
    assert report(work_list_kernel, signature, constants, arch=arch, num_warps=4).spill_bytes == 0
