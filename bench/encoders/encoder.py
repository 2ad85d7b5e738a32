"""What every peer is to the benchmark: a call from pixel rows to tokens, and how to capture it in graphs.

All of them compute with the same random weights, of one encoder of ours.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench.plan import Plan
from bench.records import Capture
from ernie_vit import ErnieVisionEncoder
from ernie_vit.model.operators import Backend

WEIGHT_STD = 0.02

# Opens an encoder's graphs: its own choice of them, or those of the given rows and sequences.
OpenGraphs = Callable[[Sequence[tuple[int, int]] | None], AbstractContextManager["Encoder"]]


@dataclass(frozen=True)
class Encoder:
    """One way to encode.

    Attributes:
        provider: its name in the report: whose, and how it runs.
        library: whose. The bits of all ways of a library are compared with those of its eager call.
        run: what is timed: pixel rows on the device and ``[items, 3]`` integers on the host to the tokens, in one
            tensor or in a tensor an item.
        tower: the module that ``run`` calls, with ``patch_embed`` and ``blocks``; None if it replays a graph or was
            compiled, whose blocks nobody can look at.
        videos: whether it takes videos.
        graphs: its graphs by their provider's name.
        capture: what these graphs cost.
    """

    provider: str
    library: str
    run: Callable[[Tensor, Tensor], Any]
    tower: nn.Module | None = None
    videos: bool = True
    graphs: Mapping[str, OpenGraphs] = field(default_factory=dict)
    capture: Capture | None = None

    def __call__(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """The tokens ``[tokens, text_hidden_size]``."""
        tokens = self.run(pixel_values, grid_thw)
        return tokens if isinstance(tokens, Tensor) else torch.cat(list(tokens))

    def takes(self, sizes: Sequence[Sequence[int]]) -> bool:
        return self.videos or all(frames == 1 for frames, _, _ in sizes)


def random_encoder(plan: Plan) -> ErnieVisionEncoder:
    """The weights of a run, all of them random: drawn on the device, which is quick there, from one seed."""
    generator = torch.Generator(plan.device).manual_seed(0)
    with torch.device(plan.device):
        encoder = ErnieVisionEncoder(plan.config).to(plan.dtype)
    for name, parameter in encoder.named_parameters():
        parameter.data.normal_(0, WEIGHT_STD, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):  # a norm's
            parameter.data.add_(1)
    return encoder


def sharing(
    weights: ErnieVisionEncoder,
    *,
    backend: Backend,
    stages: dict[str, Backend] | None = None,
    dtype: torch.dtype | None = None,
) -> ErnieVisionEncoder:
    """Another encoder with the parameters of ``weights`` themselves, or with copies at ``dtype``."""
    with torch.device("meta"):
        encoder = ErnieVisionEncoder(weights.config, backend=backend, stages=stages)
    state = {name: tensor.to(dtype) for name, tensor in weights.state_dict().items()}
    encoder.load_state_dict(state, assign=True)
    return encoder.requires_grad_(False)
