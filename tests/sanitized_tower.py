"""A small tower under compute-sanitizer; run by ``test_sanitizer.py`` with the tool's name.

memcheck: the Gluon kernels (bf16; at the model's width too, where the projection rotates) and the plain Triton ones
(bf16, fp32), each on exactly as many rows as there are and with room for more, and the resampler's; without the caching
allocator, so that the end of a tensor is the end of a block. racecheck: the plain kernels alone, at fp32, for it knows
no mbarriers and reports every warp-specialised kernel, cuBLAS's own too; the Gluon kernels' proof is the soak
(``bench/soak_*.py``).
"""

import sys

import reference
import torch

from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.kernels import dispatch
from ernie_vit.model.operators import choose_operators

GRID = [[1, 4, 4], [1, 16, 18], [2, 6, 10], [1, 2, 2]]
SPARE_ROWS, SPARE_SEQUENCES = 61, 3
WIDE = ErnieVisionConfig(depth=1, text_hidden_size=64)


def run(config: ErnieVisionConfig, dtype: torch.dtype, *, resampler: bool) -> None:
    encoder = ErnieVisionEncoder.from_config(config, device="cuda", dtype=dtype, backend="triton")
    ops = choose_operators("triton", {"resampler": "triton"})
    exact = prepare_encoder_metadata(GRID, device="cuda")
    padded = prepare_encoder_metadata(GRID, max_sequences=len(exact.cu_seqlens) - 1 + SPARE_SEQUENCES, device="cuda")
    rows = torch.randn(exact.num_patches + SPARE_ROWS, encoder.config.patch_width, device="cuda")
    for pixel_values, metadata in ((rows[: exact.num_patches].clone(), exact), (rows, padded)):
        hidden = encoder.vision_tower(pixel_values, metadata, ops)[: exact.num_patches]
        assert hidden.isfinite().all()
    if resampler:
        tokens = encoder.resampler_model(hidden.contiguous(), exact.temporal_rows, exact.live_counts, ops.resampler)
        assert tokens.isfinite().all()


@torch.no_grad()
def main(tool: str) -> None:
    run(reference.SMALL, torch.float32, resampler=tool == "memcheck")
    if tool == "memcheck":
        run(reference.SMALL, torch.bfloat16, resampler=True)
        run(WIDE, torch.bfloat16, resampler=False)
        dispatch.HOPPER_TRITON = ()  # the plain kernels, as with a Triton that Gluon's were not soaked with
        dispatch.why_not_hopper.cache_clear()
        run(reference.SMALL, torch.bfloat16, resampler=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
