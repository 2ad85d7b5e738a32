"""The patch embedding: ``pixel_values.to(weight.dtype) @ weight.T``, without bias.

Replaces the cast of the pixel rows and ``F.linear``, for live rows only. Pixels are rounded to the weight's dtype as
the cast does, the sum is in fp32, and the result is rounded once. A row of 588 16-bit numbers is no multiple of 16
bytes, as wide loads and TMA ask: so the cast writes rows with zeros behind, and the weight is copied into such rows by
the same kernel, every time, for it may have changed in place (3 MB moved at 1280 x 588).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie_vit.kernels.checks import FLOAT_DTYPES, check_num_rows, check_tensor, refuse_gradient
from ernie_vit.kernels.dispatch import require_triton
from ernie_vit.kernels.linear import launch, runs_on_hopper


def patch_embed(pixel_values: Tensor, weight: Tensor, *, num_rows: Tensor | None = None) -> Tensor:
    """Embed each live pixel row.

    Args:
        pixel_values: ``[rows, pixels]``, bf16, fp16 or fp32, whatever the weight's dtype; the stride between rows is
            free, and slices of rows may start anywhere.
        weight: ``[width, pixels]``, bf16, fp16 or fp32.
        num_rows: int32 ``[1]``, how many rows are live; None: all. Rows past it are not read and not written.

    Returns:
        ``[rows, width]``, dtype of ``weight``; rows past the live ones are uninitialised.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or stride is not as above.
        RuntimeError: a gradient is wanted, or Triton does not run on the device.
    """
    device = pixel_values.device
    check_tensor("pixel_values", pixel_values, shape=[None, None], dtypes=FLOAT_DTYPES, device=device)
    pixels = pixel_values.shape[1]
    check_tensor("weight", weight, shape=[None, pixels], dtypes=FLOAT_DTYPES, device=device)
    if 0 in weight.shape:
        raise ValueError(f"weight: expected at least one row and one column, got {list(weight.shape)}")
    check_num_rows(num_rows, device)
    refuse_gradient("patch_embed", pixel_values, weight)
    out: Tensor = torch.ops.ernie_vit.patch_embed.default(pixel_values, weight, num_rows)
    return out


def patch_embed_ref(
    pixel_values: Tensor,
    weight: Tensor,
    *,
    num_rows: Tensor | None = None,  # noqa: ARG001  all rows are computed
) -> Tensor:
    """The same in plain PyTorch, differentiable, on any device and at any dtype."""
    return F.linear(pixel_values.to(weight.dtype), weight)


torch.library.define("ernie_vit::patch_embed", "(Tensor pixel_values, Tensor weight, Tensor? num_rows) -> Tensor")


@torch.library.impl("ernie_vit::patch_embed", ["cpu", "cuda"])
def _run(pixel_values: Tensor, weight: Tensor, num_rows: Tensor | None) -> Tensor:
    require_triton("patch_embed", pixel_values.device)
    from ernie_vit.kernels.triton.patch_embed import aligned_copies

    if not len(pixel_values):
        return weight.new_empty((0, len(weight)))
    x, weight = aligned_copies(pixel_values, weight, num_rows)
    return launch(x, weight, None, None, num_rows, hopper=runs_on_hopper(x, weight), fresh_weight=True)


@torch.library.register_fake("ernie_vit::patch_embed")
def _fake(pixel_values: Tensor, weight: Tensor, num_rows: Tensor | None) -> Tensor:  # noqa: ARG001
    return weight.new_empty((pixel_values.shape[0], weight.shape[0]))
