"""Which backend an encoder takes, and the reason that it gives."""

import pytest
import reference
import torch

from ernie_vit import ErnieVisionEncoder, encoder
from ernie_vit.encoder import choose_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, obstacle: str | None) -> None:
    """Why the kernels do not run, on any device; None: they do."""
    monkeypatch.setattr(encoder, "why_not_triton", lambda _: obstacle)


@pytest.mark.parametrize(
    ("device", "dtype", "obstacle", "chosen"),
    [
        (GPU, torch.bfloat16, None, ("triton", "the kernels run on cuda:0")),
        (GPU, torch.float32, None, ("triton", "the kernels run on cuda:0")),
        (GPU, torch.float64, None, ("torch", "the kernels take bfloat16, float16 and float32, not torch.float64")),
        (GPU, torch.bfloat16, "triton is not installed", ("torch", "triton is not installed")),
        (CPU, torch.float32, None, ("torch", "the device is a CPU")),  # where the interpreter would run them
    ],
    ids=["bf16", "fp32", "fp64", "no triton", "CPU"],
)
def test_auto(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    dtype: torch.dtype,
    obstacle: str | None,
    chosen: tuple[str, str],
) -> None:
    pretend(monkeypatch, obstacle)
    assert choose_backend("auto", device, dtype) == chosen


def test_what_is_asked_for_is_taken_or_refused_and_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert choose_backend("triton", CPU, torch.float32) == ("triton", "asked for")
    assert choose_backend("torch", GPU, torch.bfloat16) == ("torch", "asked for")
    with pytest.raises(ValueError, match=r"'triton' cannot run here: the kernels take .*, not torch\.float64"):
        choose_backend("triton", GPU, torch.float64)
    pretend(monkeypatch, "Tesla T4 is older than compute capability 8.0")
    with pytest.raises(ValueError, match=r"'triton' cannot run here: Tesla T4 is older than compute capability 8\.0"):
        choose_backend("triton", GPU, torch.bfloat16)
    with pytest.raises(ValueError, match="expected 'auto', 'triton' or 'torch', got 'cuda'"):
        choose_backend("cuda", GPU, torch.bfloat16)  # type: ignore[arg-type]


def test_an_encoder_tells_its_backend_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ErnieVisionEncoder(reference.SMALL)
    assert (ours.backend, ours.backend_reason) == choose_backend("auto", CPU, torch.float32)
    ours.set_backend("torch")
    assert (ours.backend, ours.backend_reason) == ("torch", "asked for")
    pretend(monkeypatch, "triton is not installed")
    with pytest.raises(ValueError, match="triton is not installed"):
        ErnieVisionEncoder.from_config(reference.SMALL, device="cpu", backend="triton")
