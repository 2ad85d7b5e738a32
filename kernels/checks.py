"""Checks of kernel arguments: on the host, before anything is allocated or launched.

Each names the argument, what was expected and what came.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Check shape (``None``: any size), dtype and device, and that neighbours in the last dimension touch.

    Raises:
        TypeError: the dtype is not one of ``dtypes``.
        ValueError: shape, device or stride are not as expected.
    """
    # Every argument of every launch passes here: plain comparisons, and the words only for what fails.
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}")
    size = tensor.shape
    fits = len(size) == len(shape)
    for got, want in zip(size, shape, strict=False):
        if want is not None and got != want:
            fits = False
    if not fits:
        expected = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {list(size)}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    if size and size[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides {list(tensor.stride())}"
        )


def check_num_rows(num_rows: Tensor | None, device: torch.device) -> None:
    """Check the count of live rows, an int32 tensor ``[1]`` on ``device`` or None."""
    if num_rows is not None:
        check_tensor("num_rows", num_rows, shape=[1], dtypes=[torch.int32], device=device)


def refuse_gradient(op: str, *tensors: Tensor | None) -> None:
    """The kernels are forward only: a result cut off from its gradient would be wrong without a word.

    Raises:
        RuntimeError: gradients are recorded and one of ``tensors`` asks for them.
    """
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f'{op}: the Triton kernels compute no gradients; use backend="torch", which is differentiable, '
                "or call under torch.no_grad()"
            )
