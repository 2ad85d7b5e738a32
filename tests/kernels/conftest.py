"""Kernel tests run the same bodies in Triton's interpreter (CPU tensors) and on a GPU."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ernie_vit.kernels import dispatch


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


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretends a GPU, a Triton and an interpreter; forgets what was decided about them afterwards."""

    def pretend(
        *,
        name: str = "NVIDIA H200",
        capability: tuple[int, int] = (9, 0),
        triton: str | None = "3.6.0",
        hip: str | None = None,
        interpreted: bool = False,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName="gfx942:sramecc+")
        )
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(dispatch, "triton_version", lambda: triton)
        monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        forget()

    def forget() -> None:
        dispatch.why_not_triton.cache_clear()
        dispatch.why_not_gluon.cache_clear()
        dispatch.why_not_hopper.cache_clear()
        dispatch.architecture.cache_clear()
        dispatch.launches_early.cache_clear()

    yield pretend
    monkeypatch.undo()
    forget()
