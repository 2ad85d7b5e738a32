"""The tower's row order, positions and activation, each by what it does."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F

from ernie_vit import ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.kernels.rotary import rotary_table_ref
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.images import default_processor, preprocess_images, preprocess_video
from ernie_vit.model.operators import choose_operators
from ernie_vit.model.tower import MLP, Block, VisionTower

TORCH = choose_operators("torch")
LIVE = torch.tensor([1], dtype=torch.int32)  # the torch backend computes all rows


def picture_of_positions(height: int, width: int) -> np.ndarray:
    """A picture of ``height x width`` patches, each filled with its row (red) and its column (green)."""
    rows, columns = np.mgrid[:height, :width]
    patches = np.stack([rows, columns, np.zeros_like(rows)], axis=-1).astype(np.uint8)
    return patches.repeat(14, axis=0).repeat(14, axis=1)


def positions_shown(pixel_values: torch.Tensor) -> list[tuple[int, int]]:
    """What each row of pixels shows, its normalisation undone."""
    colors = pixel_values.unflatten(1, (3, 14 * 14))
    assert (colors == colors[:, :, :1]).all(), "a row holds pixels of several patches"
    processor = default_processor()
    mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
    values = ((colors[:, :, 0] * std + mean) * 255).round().int()
    return [(row, column) for row, column, _ in values.tolist()]


def in_windows(height: int, width: int) -> list[tuple[int, int]]:
    """Positions in the order of the rows: 2x2 windows row-major, row-major inside."""
    return [
        (window_row + row, window_column + column)
        for window_row in range(0, height, 2)
        for window_column in range(0, width, 2)
        for row in (0, 1)
        for column in (0, 1)
    ]


@pytest.mark.parametrize(("height", "width"), [(6, 10), (10, 6), (2, 8), (8, 8)])
def test_rows_and_rotary_positions_follow_the_picture(height: int, width: int) -> None:
    """Each patch of a picture says where it is; its row's angles must say the same."""
    pixel_values, grid_thw = preprocess_images([picture_of_positions(height, width)])
    assert grid_thw.tolist() == [[1, height, width]]
    shown = positions_shown(pixel_values)
    assert shown == in_windows(height, width)
    assert_angles(grid_thw, shown)


def test_frames_and_items_each_start_at_their_own_corner() -> None:
    frame, image = picture_of_positions(4, 6), picture_of_positions(8, 4)
    video_rows, video_grid = preprocess_video([frame, frame], min_pixels=784)
    image_rows, image_grid = preprocess_images([image])
    shown = positions_shown(torch.cat([video_rows, image_rows]))
    assert shown == 2 * in_windows(4, 6) + in_windows(8, 4)
    assert_angles(torch.cat([video_grid, image_grid]), shown)


def assert_angles(grid_thw: torch.Tensor, positions: list[tuple[int, int]]) -> None:
    metadata = prepare_encoder_metadata(grid_thw, max_sequences=5)
    table = rotary_table_ref(
        metadata.cu_seqlens, metadata.frame_sizes, num_rows=len(positions), head_dim=80, theta=10000.0
    )
    frequencies = torch.tensor([10000.0 ** (-2 * i / 40) for i in range(20)], dtype=torch.float64)
    angles = torch.stack([torch.cat([y * frequencies, x * frequencies]) for y, x in positions])
    torch.testing.assert_close(table.double(), torch.stack([angles.cos(), angles.sin()], 1), rtol=0, atol=1e-5)


@torch.no_grad()
def test_angles_stay_float32_in_a_bfloat16_tower() -> None:
    """At position 510 bfloat16 counts in steps of 2: a table of that dtype would be wrong by a whole radian."""
    tables: list[torch.Tensor] = []

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        tables.append(rotary_table_ref(*args, **kwargs))
        return tables[-1]

    grids = [[1, 2, 512]]
    ops = dataclasses.replace(TORCH, rotary_table=record)
    tower = VisionTower(reference.SMALL).bfloat16()
    tower(reference.random_rows(grids), prepare_encoder_metadata(grids), ops)
    (table,) = tables
    assert table.dtype == torch.float32
    last = torch.tensor([511.0 * 10000.0 ** (-2 * i / 40) for i in range(20)], dtype=torch.float64)
    torch.testing.assert_close(table[-1, 0, 20:].double(), last.cos(), rtol=0, atol=1e-4)


@torch.no_grad()
def test_activation_is_quick_gelu() -> None:
    mlp = MLP(ErnieVisionConfig(depth=1, hidden_size=32, num_heads=2, intermediate_size=32))
    for layer in (mlp.fc1, mlp.fc2):
        layer.weight.copy_(torch.eye(32))
        layer.bias.zero_()
    x = torch.linspace(-4, 4, 32 * 3).view(3, 32)
    out = mlp(x, torch.zeros_like(x), LIVE, TORCH)
    torch.testing.assert_close(out, x * torch.sigmoid(1.702 * x))
    assert (out - F.gelu(x)).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_norms_take_the_configs_eps(eps: float) -> None:
    """A row of variance 9e-6: between 1e-6 and 1e-5 its norm differs by 38 %."""
    config = ErnieVisionConfig(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, norm_eps=eps)
    tower = VisionTower(config)
    row = 3e-3 * torch.tensor([1.0, -1.0]).repeat(1, 16)
    expected = row / math.sqrt(9e-6 + eps)
    for norm in (tower.blocks[0].norm1, tower.blocks[0].norm2, tower.ln):
        out = TORCH.layer_norm(row, norm.weight, norm.bias, eps=norm.eps, num_rows=LIVE)
        torch.testing.assert_close(out, expected)


@torch.no_grad()
def test_block_adds_to_what_it_reads() -> None:
    """With both projections at zero a block hands its input on."""
    block = Block(reference.SMALL)
    reference.randomize(block, seed=1)
    for layer in (block.attn.proj, block.mlp.fc2):
        layer.weight.zero_()
        layer.bias.zero_()
    metadata = prepare_encoder_metadata([[1, 4, 4]])
    rotary = rotary_table_ref(metadata.cu_seqlens, metadata.frame_sizes, num_rows=16, head_dim=80)
    sequences = TORCH.attention_arguments(metadata, num_rows=16, num_heads=2, head_dim=80, dtype=torch.float32)
    x = torch.randn(16, 160)
    assert torch.equal(block(x, rotary, sequences, metadata.num_rows, TORCH), x)


@torch.no_grad()
def test_no_row_sees_another_sequence(encoder: ErnieVisionEncoder) -> None:
    """NaN in every other item, before and after, changes no bit."""
    grids = [[2, 4, 4], [1, 6, 8], [1, 2, 2]]
    pixel_values = reference.random_rows(grids)
    poisoned = torch.full_like(pixel_values, torch.nan)
    poisoned[32 : 32 + 48] = pixel_values[32 : 32 + 48]
    clean, hidden = (
        encoder.vision_tower(rows, prepare_encoder_metadata(grids), TORCH) for rows in (pixel_values, poisoned)
    )
    assert torch.equal(hidden[32 : 32 + 48], clean[32 : 32 + 48])
    assert hidden[:32].isnan().all()
