"""Which tests run where: on a GPU, in Triton's interpreter, or anywhere."""

import os

import pytest
import torch

from ernie_vit.kernels.dispatch import HOPPER_TRITON, soaked_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import interpreter  # noqa: F401  repairs bf16 before the first kernel runs


def _reason_to_skip(item: pytest.Item) -> str | None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if item.get_closest_marker("gpu") and INTERPRETED:
        return "needs TRITON_INTERPRET unset: this run interprets the kernels"
    if item.get_closest_marker("interpreter") and not INTERPRETED:
        return "needs TRITON_INTERPRET=1"
    if item.get_closest_marker("compile") and INTERPRETED:
        return "needs TRITON_INTERPRET unset: interpreted kernels cannot be compiled"
    if item.get_closest_marker("gluon") and not soaked_triton():
        return f"needs triton {' or '.join(HOPPER_TRITON)}, which the Gluon kernels were soaked with"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = _reason_to_skip(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
