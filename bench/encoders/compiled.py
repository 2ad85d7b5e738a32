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
from bench.plan import Sizes, pixels
from ernie_vit import ErnieVisionEncoder

PROVIDER = "torch.compile"
ONE_AND_MANY: tuple[Sizes, ...] = ([(1, 16, 16)], [(1, 16, 16), (1, 18, 22), (1, 24, 24)])


@contextmanager
def open_compiled(weights: ErnieVisionEncoder, *, backend: str = "inductor") -> Iterator[Encoder]:
    """Compiled when it opens: for a call of one sequence, and for calls of any number of them."""
    encoder = sharing(weights, backend="torch")
    operators = encoder._operators()
    operators = replace(operators, attention=torch.compiler.disable(operators.attention))
    encoder._operators = lambda: operators  # type: ignore[method-assign]
    for block in encoder.vision_tower.blocks:
        block.compile(dynamic=True, backend=backend)
    encoder.resampler_model.compile(dynamic=True, backend=backend)
    for sizes in ONE_AND_MANY:
        encoder(pixels(sizes, device=weights.device, dtype=weights.dtype), sizes)
    try:
        yield Encoder(PROVIDER, PROVIDER, encoder)
    finally:
        torch.compiler.reset()
