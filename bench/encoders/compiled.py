"""``torch.compile`` of our tower in plain PyTorch, block by block and once for all sizes.

Compiled as a whole, each list of sizes would be a graph of its own, minutes for a mix of them. A block with dynamic
shapes compiles once and serves all 32 and every size, which PyTorch recommends for repeated blocks as regional
compilation. The attention, a call a sequence, stays out of it: its number of calls is data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from bench.encoders.encoder import Encoder, sharing
from ernie_vit import ErnieVisionEncoder
from ernie_vit.model.metadata import prepare_encoder_metadata
from ernie_vit.model.operators import choose_operators

PROVIDER = "torch.compile"


@contextmanager
def open_compiled(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    """Compiles at the first call, and a second time at the first call of another size."""
    encoder = sharing(weights, backend="torch")
    operators = choose_operators("torch")
    operators = replace(operators, attention=torch.compiler.disable(operators.attention))
    for block in encoder.vision_tower.blocks:
        block.compile(dynamic=True)
    encoder.resampler_model.compile(dynamic=True)

    def run(pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        metadata = prepare_encoder_metadata(grid_thw, device=pixel_values.device)
        hidden_states = encoder.vision_tower(pixel_values, metadata, operators)
        tokens: Tensor = encoder.resampler_model(hidden_states, metadata.temporal_rows)
        return tokens

    try:
        yield Encoder(PROVIDER, PROVIDER, run)
    finally:
        torch.compiler.reset()
