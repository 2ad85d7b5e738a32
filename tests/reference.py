"""transformers' own ERNIE-4.5-VL with random parameters: the model that ours must equal."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit.model.config import ErnieVisionConfig

Grids = Sequence[Sequence[int]]

# Real head width, odd numbers nowhere hidden by symmetry: 2 heads, an MLP and a text width of their own.
SMALL = ErnieVisionConfig(depth=2, hidden_size=160, num_heads=2, intermediate_size=640, text_hidden_size=128)


def small_config(**vision: float) -> Ernie4_5_VLMoeConfig:
    """transformers' config of ``SMALL``; ``vision`` overrides single values of its vision part."""
    return Ernie4_5_VLMoeConfig(
        vision_config={"depth": 2, "hidden_size": 160, "num_heads": 2, "intermediate_size": 640, **vision},
        text_config={
            "hidden_size": 128,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 16,
        },
    )


def small_model(seed: int = 0) -> Ernie4_5_VLMoeForConditionalGeneration:
    """The whole model, its text part as small as can be, every parameter random."""
    model = Ernie4_5_VLMoeForConditionalGeneration(small_config()).eval()
    randomize(model, seed)
    return model


def randomize(module: nn.Module, seed: int) -> None:
    """Draw all parameters, norms and biases too: what stays at 0 or 1 could be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * drawn + (0 if name.endswith("bias") else 1))


def encode(model: nn.Module, pixel_values: Tensor, grids: Grids) -> Tensor:
    """What transformers makes of the rows: ``[tokens, text_width]``. ``model`` holds tower and resampler."""
    grid_thw = torch.tensor(grids)
    hidden_states = model.vision_tower(pixel_values, grid_thw).last_hidden_state
    return model.resampler_model(hidden_states, grid_thw)


def random_rows(grids: Grids, seed: int = 0) -> Tensor:
    """Pixel rows as the processor makes them, normalised, float32."""
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, 588, generator=torch.Generator().manual_seed(seed))
