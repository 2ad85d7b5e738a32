"""The tower on the Triton kernels is as near to float64 as PyTorch and transformers are, after each block.

At full size on a GPU, 32 blocks; a small tower in the interpreter. With ordinary rows, and with a massive channel, as
trained towers have: one of the residual is 1000 times the others, whose mean is not zero.
"""

import copy
from collections.abc import Callable

import pytest
import reference
import torch
from accuracy import assert_within_budget
from torch import Tensor, nn
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as theirs

from ernie_vit import ErnieVisionConfig, prepare_encoder_metadata
from ernie_vit.model.operators import choose_operators
from ernie_vit.model.tower import VisionTower

MASSIVE = 77


def random_tower(config: ErnieVisionConfig, device: str, dtype: torch.dtype, *, massive: bool) -> VisionTower:
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        tower = VisionTower(config).requires_grad_(False).to(dtype)
    for name, parameter in tower.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, device=device)
        scale, mean = (parameter.shape[-1] ** -0.5, 0) if parameter.dim() > 1 else (0.3, name.endswith("weight"))
        parameter.copy_(scale * drawn + mean)
    if massive:
        tower.patch_embed.proj.weight[MASSIVE] *= 1000
        for block in tower.blocks:
            block.attn.proj.bias += 1 / len(tower.blocks)
    return tower


def of_transformers(tower: VisionTower) -> nn.Module:
    """transformers' tower with the same parameters; its rotary frequencies stay float32, as a checkpoint's do."""
    config = reference.small_config(
        depth=tower.config.depth,
        hidden_size=tower.config.hidden_size,
        num_heads=tower.config.num_heads,
        intermediate_size=tower.config.intermediate_size,
    )
    with tower.ln.weight.device:
        other = theirs.Ernie4_5_VLMoeVisionTransformerPretrainedModel._from_config(config.vision_config)
    other.load_state_dict(tower.state_dict(), assign=True)
    return other.eval()


def hidden_rows(tower: nn.Module, call: Callable[[], Tensor]) -> list[Tensor]:
    """What patch embedding and each block put out, and the call's result."""
    rows: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _arguments, out: rows.append(out.clone()))
        for module in (tower.patch_embed, *tower.blocks)
    ]
    result = call()
    for hook in hooks:
        hook.remove()
    return [*rows, result]


@pytest.mark.parametrize(
    ("device", "config", "grid", "dtype"),
    [
        pytest.param(
            *("cpu", reference.SMALL, [[1, 6, 10], [2, 4, 4]], torch.bfloat16),
            marks=pytest.mark.interpreter,
            id="small-interpreter",
        ),
        *(
            pytest.param(
                *("cuda", ErnieVisionConfig(), [[1, 36, 36], [2, 16, 16]], dtype),
                marks=pytest.mark.gpu,
                id=f"full-size-{dtype}-gpu",
            )
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
)
@pytest.mark.parametrize("massive", [False, True], ids=["ordinary", "massive-channel"])
@torch.no_grad()
def test_after_each_block(
    device: str, config: ErnieVisionConfig, grid: list[list[int]], dtype: torch.dtype, massive: bool
) -> None:
    tower = random_tower(config, device, dtype, massive=massive)
    pixel_values = reference.random_rows(grid).to(device, dtype)
    metadata, sizes = prepare_encoder_metadata(grid, device=device), torch.tensor(grid, device=device)
    exact_tower, other = copy.deepcopy(tower).double(), of_transformers(tower)
    torch_ops, triton_ops = choose_operators("torch"), choose_operators("triton")

    ours = hidden_rows(tower, lambda: tower(pixel_values, metadata, triton_ops))
    plain = hidden_rows(tower, lambda: tower(pixel_values, metadata, torch_ops))
    of_other = hidden_rows(other, lambda: other(pixel_values, sizes).last_hidden_state)
    exact = hidden_rows(exact_tower, lambda: exact_tower(pixel_values.double(), metadata, torch_ops))

    assert len(exact) == config.depth + 2
    # the other channels alone, whose errors a massive one would hide
    channels = [channel for channel in range(config.hidden_size) if channel != MASSIVE]
    if massive:
        assert exact[-2][:, MASSIVE].abs().mean() > 30 * exact[-2][:, channels].abs().mean()
        assert exact[-2][:, channels].mean() > 0.5
    for rows in zip(ours, plain, of_other, exact, strict=True):
        mine, torchs, others, true = (x.flatten(0, -2)[:, channels] for x in rows)
        assert_within_budget(mine, torchs, true)
        assert_within_budget(mine, others, true)
