"""transformers' own vision tower and resampler, eager, with PyTorch's scaled_dot_product_attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.encoders.encoder import Encoder
from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder

PROVIDER = "transformers"


@contextmanager
def open_transformers(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    """The parameters are those of ``weights`` themselves; the rotary frequencies stay float32, as a checkpoint's do.

    Raises:
        ImportError: transformers is not installed, or does not know the model.
    """
    from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as modeling

    config = _config(weights.config)
    with weights.device:
        tower = modeling.Ernie4_5_VLMoeVisionTransformerPretrainedModel._from_config(
            config.vision_config, attn_implementation="sdpa", dtype=torch.float32
        )
        resampler = modeling.Ernie4_5_VLMoeVariableResolutionResamplerModel(config)
    for part, module in (("vision_tower.", tower), ("resampler_model.", resampler)):
        state = weights.state_dict().items()
        mine = {name.removeprefix(part): tensor for name, tensor in state if name.startswith(part)}
        module.load_state_dict(mine, assign=True)
        module.requires_grad_(False).eval()

    def run(pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        grid_thw = grid_thw.to(pixel_values.device)  # where transformers' processor and users put it
        hidden_states = tower(pixel_values, grid_thw=grid_thw).last_hidden_state
        tokens: Tensor = resampler(hidden_states, grid_thw)
        return tokens

    yield Encoder(PROVIDER, PROVIDER, run, tower=tower)


def _config(config: ErnieVisionConfig) -> Any:
    from transformers import Ernie4_5_VLMoeConfig

    return Ernie4_5_VLMoeConfig(
        vision_config={
            "depth": config.depth,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
            "patch_size": config.patch_size,
            "in_channels": config.in_channels,
            "rms_norm_eps": config.norm_eps,
        },
        text_config={"hidden_size": config.text_hidden_size, "rms_norm_eps": config.text_norm_eps},
    )
