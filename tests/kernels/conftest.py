"""Kernel tests run the same bodies in Triton's interpreter (CPU tensors) and on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class PretendedGpu:
    """As much of a Hopper GPU's driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> SimpleNamespace:
        return SimpleNamespace()


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.runtime.driver, "_active", PretendedGpu())
