"""The patch embedding against float64: the cast, the ragged 588 columns, pixel rows at any address."""

import sys
from types import SimpleNamespace

import pytest
import torch
from accuracy import assert_within_budget, relative_error
from torch import Tensor

from ernie_vit.kernels.compilation import compilations
from ernie_vit.kernels.patch_embed import patch_embed, patch_embed_ref
from ernie_vit.kernels.tiles.linear import HopperTile, hopper_regimes

PIXELS, WIDTH = 588, 160
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(
    rows: int, pixel_dtype: torch.dtype, dtype: torch.dtype, device: str, *, width: int = WIDTH
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(rows)
    pixels = torch.randn(rows, PIXELS, generator=generator, device=device)
    weight = torch.randn(width, PIXELS, generator=generator, device=device) / PIXELS**0.5
    return pixels.to(pixel_dtype), weight.to(dtype)


def check(pixels: Tensor, weight: Tensor) -> None:
    rounded = pixels.to(weight.dtype)  # the cast is part of the operation, not of its error
    exact = patch_embed_ref(rounded.double(), weight.double())
    out = patch_embed(pixels, weight)
    if weight.dtype == torch.float32:
        # cuBLAS may cut the sum over 588 columns into shorter ones; added in order, each term brings half an eps
        assert relative_error(out, exact) <= PIXELS**0.5 * torch.finfo(torch.float32).eps / 2
    else:
        assert_within_budget(out, patch_embed_ref(pixels, weight), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pixel_dtype", DTYPES, ids=str)
def test_equals_float64_within_the_error_of_torch(device: str, pixel_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check(*inputs(65, pixel_dtype, dtype, device))


@pytest.mark.parametrize("rows", [1, 3, 63, 64, 129])
def test_any_number_of_rows(device: str, rows: int) -> None:
    check(*inputs(rows, torch.float32, torch.bfloat16, device))


def test_pixels_are_rounded_to_the_weight_first(device: str) -> None:
    pixels, weight = inputs(9, torch.float32, torch.bfloat16, device)
    assert torch.equal(patch_embed(pixels, weight), patch_embed(pixels.bfloat16(), weight))


def test_no_rows(device: str) -> None:
    assert patch_embed(*inputs(0, torch.float32, torch.bfloat16, device)).shape == (0, WIDTH)


def test_dead_rows_reach_no_live_one(device: str) -> None:
    pixels, weight = inputs(70, torch.float32, torch.bfloat16, device)
    full = patch_embed(pixels, weight)
    pixels[41:] = float("nan")
    num_rows = torch.tensor([41], dtype=torch.int32, device=device)
    assert torch.equal(patch_embed(pixels, weight, num_rows=num_rows)[:41], full[:41])


def test_uninitialised_memory_reaches_no_result(device: str) -> None:
    """The copies are as wide as 592 columns: what lies behind the 588th must not be what the memory held."""
    pixels, weight = inputs(70, torch.float32, torch.bfloat16, device)
    expected = patch_embed(pixels, weight)
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        out = patch_embed(pixels, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, expected)


def test_a_weight_changed_in_place_takes_effect(device: str) -> None:
    pixels, weight = inputs(9, torch.float32, torch.bfloat16, device)
    doubled = 2 * patch_embed(pixels, weight)
    weight *= 2
    assert torch.equal(patch_embed(pixels, weight), doubled)


def test_the_weight_is_not_fetched_before_its_copy_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear that starts early fetches weights while the kernel before still runs: here that kernel writes them."""
    tiles: list[HopperTile] = []
    launcher = SimpleNamespace(launch_linear=lambda *_, tile, **__: tiles.append(tile))
    copies = SimpleNamespace(aligned_copies=lambda pixels, weight, _: (pixels, weight))
    monkeypatch.setitem(sys.modules, "ernie_vit.kernels.hopper.linear", launcher)
    monkeypatch.setitem(sys.modules, "ernie_vit.kernels.triton.patch_embed", copies)
    for module in ("linear", "patch_embed"):
        monkeypatch.setattr(f"ernie_vit.kernels.{module}.require_triton", lambda *_: None)
    monkeypatch.setattr("ernie_vit.kernels.patch_embed.runs_on_hopper", lambda *_: True)
    regimes = hopper_regimes(WIDTH, PIXELS)
    for rows in (*regimes.bounds, regimes.bounds[-1] + 1):
        patch_embed(*inputs(rows, torch.bfloat16, torch.bfloat16, "cpu"))
    assert len(tiles) == len(regimes.tiles)
    assert any(tile.pdl for tile in regimes.tiles)
    assert not any(tile.pdl or tile.group_rows == 0 for tile in tiles)


@pytest.mark.parametrize("pixel_dtype", DTYPES, ids=str)
def test_slices_of_rows_and_of_columns(device: str, pixel_dtype: torch.dtype) -> None:
    pixels, weight = inputs(20, pixel_dtype, torch.bfloat16, device)
    full = patch_embed(pixels, weight)
    for first in (1, 2, 3, 17):
        assert torch.equal(patch_embed(pixels[first:], weight), full[first:])
    wide = torch.full((20, PIXELS + 3), float("nan"), device=device).to(pixel_dtype)
    wide[:, 1:-2] = pixels
    assert torch.equal(patch_embed(wide[:, 1:-2], weight), full)


def test_wrong_arguments_are_named(device: str) -> None:
    pixels, weight = inputs(4, torch.float32, torch.bfloat16, device)
    wrong = [
        (TypeError, "pixel_values", (pixels.to(torch.uint8), weight)),
        (TypeError, "weight", (pixels, weight.double())),
        (ValueError, "pixel_values", (pixels[0], weight)),
        (ValueError, "pixel_values", (pixels.t().contiguous().t(), weight)),
        (ValueError, "weight", (pixels[:, :-1], weight)),
        (ValueError, "weight", (pixels, weight.to("meta"))),
    ]
    for error, name, arguments in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            patch_embed(*arguments)


def test_operator_registration(device: str) -> None:
    pixels, weight = inputs(5, torch.float32, torch.bfloat16, device)
    torch.library.opcheck(torch.ops.ernie_vit.patch_embed.default, (pixels, weight, None))


@pytest.mark.gpu
@pytest.mark.parametrize("pixel_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slices_of_rows_compile_nothing_new(pixel_dtype: torch.dtype) -> None:
    pixels, weight = inputs(64, pixel_dtype, torch.bfloat16, "cuda", width=1280)
    counts = torch.zeros(8, dtype=torch.int32, device="cuda") + 16
    patch_embed(pixels, weight, num_rows=counts[:1])
    before = compilations()
    for first in range(8):
        patch_embed(pixels[first:], weight, num_rows=counts[first : first + 1])
    assert compilations() == before


@pytest.mark.gpu
def test_the_towers_shape() -> None:
    check(*inputs(1296, torch.float32, torch.bfloat16, "cuda", width=1280))
