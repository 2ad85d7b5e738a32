"""A small tower, eager and from a graph, on the Gluon kernels (bf16) and the plain Triton ones (fp32).

Run by ``test_sanitizer.py`` under compute-sanitizer.
"""

import os

import reference
import torch

from ernie_vit import ErnieVisionEncoder

GRID = [[1, 4, 4], [1, 16, 18], [2, 6, 10], [1, 2, 2]]


@torch.no_grad()
def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        encoder = ErnieVisionEncoder.from_config(reference.SMALL, device="cuda", dtype=dtype, backend="triton")
        pixel_values = torch.randn(sum(t * h * w for t, h, w in GRID), encoder.config.patch_width, device="cuda")
        eager = encoder(pixel_values, GRID)
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ:  # a capture needs the cache
            encoder.capture(capacities=[(640, 16)])
            assert torch.equal(encoder(pixel_values, GRID), eager)
            assert encoder.graph_stats().hits == 1
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
