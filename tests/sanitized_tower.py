"""A small tower under compute-sanitizer; run by ``test_sanitizer.py`` with the tool's name.

memcheck: the Gluon kernels (bf16) and the plain Triton ones (fp32), without the caching allocator, so that the end of a
tensor is the end of a block. racecheck: the plain kernels alone, for it knows no mbarriers and reports
every warp-specialised kernel, cuBLAS's own too; the Gluon kernels' proof is the soak (``bench/soak_*.py``).
"""

import sys

import reference
import torch

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.operators import choose_operators

GRID = [[1, 4, 4], [1, 16, 18], [2, 6, 10], [1, 2, 2]]


@torch.no_grad()
def main(tool: str) -> None:
    for dtype in (torch.bfloat16, torch.float32) if tool == "memcheck" else (torch.float32,):
        encoder = ErnieVisionEncoder.from_config(reference.SMALL, device="cuda", dtype=dtype, backend="triton")
        metadata = prepare_encoder_metadata(GRID, device="cuda")
        pixel_values = torch.randn(metadata.num_patches, encoder.config.patch_width, device="cuda")
        rows = encoder.vision_tower(pixel_values, metadata, choose_operators("triton"))
        assert rows.isfinite().all()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
