"""``torch.compile`` of our tower in plain PyTorch, block by block and once for all sizes.

Compiled as a whole, each list of sizes would be a graph of its own, minutes for a mix of them. A block with dynamic
shapes compiles once and serves all 32 and every size, which PyTorch recommends for repeated blocks as regional
compilation. The attention, a call a sequence, stays out of it: its number of calls is data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from bench.encoders.encoder import Encoder, sharing
from ernie_vit import ErnieVisionEncoder

PROVIDER = "torch.compile"


@contextmanager
def open_compiled(weights: ErnieVisionEncoder, *, backend: str = "inductor") -> Iterator[Encoder]:
    """Compiles at the first call, and a second time at the first call of another size."""
    encoder = sharing(weights, backend="torch")
    operators = encoder._operators()
    operators = replace(operators, attention=torch.compiler.disable(operators.attention))
    encoder._operators = lambda: operators  # type: ignore[method-assign]
    for block in encoder.vision_tower.blocks:
        block.compile(dynamic=True, backend=backend)
    encoder.resampler_model.compile(dynamic=True, backend=backend)
    try:
        yield Encoder(PROVIDER, PROVIDER, encoder)
    finally:
        torch.compiler.reset()
