"""A parent that imports every kernel and a child that encodes; run by ``test_processes.py``: ``fork cuda``."""

import importlib
import multiprocessing
import sys
from pathlib import Path

import torch

from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder
from ernie_vit.kernels.dispatch import interpreting, soaked_triton

if interpreting():
    import interpreter  # noqa: F401  repairs bf16 and indices, in the child too

FOLDERS = ["triton", "hopper"] if soaked_triton() and not interpreting() else ["triton"]
KERNELS = [
    f"{folder}.{file.stem}"
    for folder in FOLDERS
    for file in (Path(__file__).parents[1] / "kernels" / folder).glob("*.py")
]
CONFIG = ErnieVisionConfig(depth=1, hidden_size=160, num_heads=2, intermediate_size=160, text_hidden_size=64)
GRID = [[1, 2, 4]]


def encode(device: str) -> None:
    encoder = ErnieVisionEncoder.from_config(CONFIG, device=device, dtype=torch.bfloat16, backend="triton")
    pixel_values = torch.randn(8, CONFIG.patch_width, device=device)
    tokens = encoder(pixel_values, GRID)
    encoder.set_backend("torch")
    # how exact it is, other tests show; here it runs at all
    torch.testing.assert_close(tokens, encoder(pixel_values, GRID), rtol=0.1, atol=0.1)


def main(method: str, device: str) -> int | None:
    for name in KERNELS:
        importlib.import_module(f"ernie_vit.kernels.{name}")
    assert not torch.cuda.is_initialized()
    child = multiprocessing.get_context(method).Process(target=encode, args=(device,))
    child.start()
    child.join()
    return child.exitcode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
