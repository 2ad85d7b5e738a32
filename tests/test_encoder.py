"""The encoder as its users meet it: what it takes, what it refuses, whose parameters it computes with."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from accuracy import relative_error
from PIL import Image
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder, prepare_encoder_metadata
from ernie_vit.model.images import UnreadableImage, preprocess_images, preprocess_video

# An item alone and packed with others goes through matrix products of other sizes, for which a CPU's library may sum
# in another order. Everything else is the same bits.
ALONE_OR_PACKED = 2e-6

MIXED = [[4, 8, 8], [1, 16, 16], [1, 2, 2], [2, 4, 6], [1, 6, 4]]


@pytest.fixture(scope="module")
def model() -> Ernie4_5_VLMoeForConditionalGeneration:
    return reference.small_model()


@pytest.fixture(scope="module")
def encoder(model: Ernie4_5_VLMoeForConditionalGeneration) -> ErnieVisionEncoder:
    return own_encoder(model)


def own_encoder(model: Ernie4_5_VLMoeForConditionalGeneration) -> ErnieVisionEncoder:
    """An encoder with a copy of the model's parameters."""
    encoder = ErnieVisionEncoder(reference.SMALL, backend="torch")
    encoder.load_state_dict(vision_state(model))
    return encoder


def vision_state(model: Ernie4_5_VLMoeForConditionalGeneration) -> dict[str, torch.Tensor]:
    state = model.model.state_dict()
    return {name: tensor for name, tensor in state.items() if not name.startswith("language_model.")}


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class TestItems:
    @torch.no_grad()
    @pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], ids=str)
    def test_images_and_videos_in_any_order_equal_single_calls(
        self, encoder: ErnieVisionEncoder, order: list[int]
    ) -> None:
        rows = reference.random_rows(MIXED).split([t * h * w for t, h, w in MIXED])
        packed = encoder(torch.cat([rows[item] for item in order]), [MIXED[item] for item in order])
        counts = [max(MIXED[item][0] // 2, 1) * MIXED[item][1] * MIXED[item][2] // 4 for item in order]
        for item, tokens in zip(order, packed.split(counts), strict=True):
            alone = encoder(rows[item], [MIXED[item]])
            assert alone.shape == tokens.shape
            assert relative_error(tokens, alone) <= ALONE_OR_PACKED

    @torch.no_grad()
    def test_others_in_the_call_change_no_bit(self, encoder: ErnieVisionEncoder) -> None:
        """Where the sizes are the same, the order of sums is too: what the others show cannot matter."""
        start, end = 4 * 8 * 8, 4 * 8 * 8 + 16 * 16
        rows, others = reference.random_rows(MIXED, seed=1), reference.random_rows(MIXED, seed=2)
        others[start:end] = rows[start:end]
        image = slice(2 * 16, 2 * 16 + 64)
        assert torch.equal(encoder(rows, MIXED)[image], encoder(others, MIXED)[image])

    @torch.no_grad()
    def test_one_frame_is_an_image_and_two_are_a_video(self, encoder: ErnieVisionEncoder) -> None:
        """Two equal frames carry the same information as one, and give the same tokens, once."""
        rows = reference.random_rows([[1, 4, 6]])
        image = encoder(rows, [[1, 4, 6]])
        video = encoder(rows.repeat(2, 1), [[2, 4, 6]])
        assert image.shape == video.shape == (6, 128)
        assert relative_error(video, image) <= ALONE_OR_PACKED
        assert encoder(reference.random_rows([[2, 16, 16]]), [[2, 16, 16]]).shape == (64, 128)

    @pytest.mark.parametrize("empty", [[], np.zeros((0, 3), int), torch.zeros(0, 3, dtype=torch.int64)], ids=str)
    def test_no_items(self, encoder: ErnieVisionEncoder, empty: Any) -> None:
        tokens = encoder(torch.zeros(0, 588), empty)
        assert tokens.shape == (0, 128)
        assert tokens.dtype == encoder.dtype
        assert encoder.encode([]) == []

    @torch.no_grad()
    @pytest.mark.parametrize("form", [np.array, torch.tensor, tuple], ids=["numpy", "tensor", "tuple"])
    def test_forms_of_a_grid(self, encoder: ErnieVisionEncoder, form: Any) -> None:
        rows = reference.random_rows(MIXED)
        assert torch.equal(encoder(rows, form(MIXED)), encoder(rows, MIXED))

    @torch.no_grad()
    def test_metadata_in_place_of_the_grid(self, encoder: ErnieVisionEncoder) -> None:
        """Padded to static sizes, with a bound above the longest sequence: the same bits."""
        rows = reference.random_rows(MIXED)
        metadata = prepare_encoder_metadata(MIXED, max_sequences=20, max_seqlen_override=500)
        assert torch.equal(encoder(rows, metadata=metadata), encoder(rows, MIXED))

    @torch.no_grad()
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_rows_of_any_floating_dtype(self, encoder: ErnieVisionEncoder, dtype: torch.dtype) -> None:
        rows = reference.random_rows([[1, 4, 4]]).to(dtype)
        assert torch.equal(encoder(rows, [[1, 4, 4]]), encoder(rows.float(), [[1, 4, 4]]))


class TestRefusals:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool], ids=str)
    def test_rows_that_are_not_normalised(self, encoder: ErnieVisionEncoder, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=f"pixel_values: expected .* floating-point rows, got {dtype}"):
            encoder(torch.ones(16, 588, dtype=dtype), [[1, 4, 4]])

    @pytest.mark.parametrize("shape", [(16, 1176), (16, 587), (16 * 588,), (1, 16, 588), (16, 3, 14, 14)], ids=str)
    def test_rows_of_another_width(self, encoder: ErnieVisionEncoder, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"pixel_values: expected shape \[16, 588\]"):
            encoder(torch.ones(shape), [[1, 4, 4]])

    @pytest.mark.parametrize("rows", [0, 15, 17, 32])
    def test_another_number_of_rows_than_the_grid_says(self, encoder: ErnieVisionEncoder, rows: int) -> None:
        with pytest.raises(ValueError, match=rf"pixel_values: expected shape \[16, 588\].* got \[{rows}, 588\]"):
            encoder(torch.ones(rows, 588), [[1, 4, 4]])

    def test_rows_and_metadata_that_do_not_belong_together(self, encoder: ErnieVisionEncoder) -> None:
        with pytest.raises(ValueError, match=r"expected shape \[16, 588\].* got \[20, 588\]"):
            encoder(torch.ones(20, 588), metadata=prepare_encoder_metadata([[1, 4, 4]]))

    @pytest.mark.parametrize(
        ("grid", "message"),
        [
            ([3, 16, 16], r"an even number of them .* got \[3, 16, 16\]"),
            ([1, 15, 16], r"even height and width .* got \[1, 15, 16\]"),
            ([1, 16, 15], r"even height and width .* got \[1, 16, 15\]"),
        ],
    )
    def test_sizes_that_would_be_cut(self, encoder: ErnieVisionEncoder, grid: list[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            encoder(torch.ones(grid[0] * grid[1] * grid[2], 588), [grid])

    def test_lengths_in_place_of_sizes(self, encoder: ErnieVisionEncoder) -> None:
        with pytest.raises(ValueError, match=r"grid_thw: expected shape \[items, 3\]"):
            encoder(torch.ones(320, 588), [256, 64])

    def test_both_or_neither_of_grid_and_metadata(self, encoder: ErnieVisionEncoder) -> None:
        with pytest.raises(TypeError, match="one of grid_thw and metadata"):
            encoder(torch.ones(16, 588))
        with pytest.raises(TypeError, match="one of grid_thw and metadata"):
            encoder(torch.ones(16, 588), [[1, 4, 4]], metadata=prepare_encoder_metadata([[1, 4, 4]]))

    def test_backend_of_no_such_name(self) -> None:
        with pytest.raises(ValueError, match=r"backend: expected .* got 'cuda'"):
            ErnieVisionEncoder(reference.SMALL, backend="cuda")  # type: ignore[arg-type]

    def test_model_without_a_vision_tower(self) -> None:
        with pytest.raises(ValueError, match=r"got Linear without \['vision_tower', 'resampler_model'\]"):
            ErnieVisionEncoder.from_transformers(torch.nn.Linear(1, 1))


class TestImages:
    @torch.no_grad()
    def test_one_result_an_image_in_order(self, encoder: ErnieVisionEncoder, tmp_path: Path) -> None:
        pictures = [picture(60, 90), picture(90, 60, seed=1), picture(1, 500, seed=2)]
        Image.fromarray(pictures[0]).save(tmp_path / "first.png")
        results = encoder.encode([tmp_path / "first.png", Image.fromarray(pictures[1]), pictures[2]])
        assert len(results) == 3
        for tokens, image in zip(results, pictures, strict=True):
            expected = encoder(*preprocess_images([image]))
            assert tokens.shape == expected.shape
            assert relative_error(tokens, expected) <= ALONE_OR_PACKED

    @torch.no_grad()
    def test_video_of_an_odd_number_is_completed(self, encoder: ErnieVisionEncoder) -> None:
        frames = [picture(56, 84, seed) for seed in range(3)]
        completed = encoder.encode_video([*frames, frames[-1]], max_pixels=84 * 56)
        assert torch.equal(encoder.encode_video(frames, max_pixels=84 * 56), completed)
        assert completed.shape == (2 * 2 * 3, 128)
        assert torch.equal(encoder.encode_video(frames), encoder(*preprocess_video(frames)))

    @torch.no_grad()
    def test_limits_reach_the_processor(self, encoder: ErnieVisionEncoder) -> None:
        (small,) = encoder.encode([picture(280, 280)], max_pixels=56 * 56)
        (large,) = encoder.encode([picture(28, 28)], min_pixels=112 * 112)
        assert len(small) == 2 * 2
        assert len(large) == 4 * 4

    def test_unreadable_image_is_named(self, encoder: ErnieVisionEncoder, tmp_path: Path) -> None:
        with pytest.raises(UnreadableImage, match=r"no\.png"):
            encoder.encode([tmp_path / "no.png"])


class TestParameters:
    def test_state_is_transformers(
        self, model: Ernie4_5_VLMoeForConditionalGeneration, encoder: ErnieVisionEncoder
    ) -> None:
        ours, theirs = encoder.state_dict(), vision_state(model)
        assert {name: tensor.shape for name, tensor in ours.items()} == {
            name: tensor.shape for name, tensor in theirs.items()
        }

    def test_state_loads_strictly_both_ways(self, model: Ernie4_5_VLMoeForConditionalGeneration) -> None:
        encoder = ErnieVisionEncoder.from_config(reference.SMALL, device="cpu")
        encoder.load_state_dict(vision_state(model), strict=True)
        other = reference.small_model(seed=8)
        for part in ("vision_tower", "resampler_model"):
            other.model.get_submodule(part).load_state_dict(encoder.get_submodule(part).state_dict(), strict=True)
        rows = reference.random_rows([[1, 4, 6]])
        with torch.no_grad():
            expected = reference.encode(model.model, rows, [[1, 4, 6]])
            assert relative_error(encoder(rows, [[1, 4, 6]]), expected) < 1e-5
            assert torch.equal(reference.encode(other.model, rows, [[1, 4, 6]]), expected)

    @pytest.mark.parametrize("change", ["add", "remove"])
    def test_a_state_that_does_not_fit_is_refused(self, encoder: ErnieVisionEncoder, change: str) -> None:
        state = encoder.state_dict()
        if change == "add":
            state["vision_tower.extra"] = torch.zeros(1)
        else:
            del state["resampler_model.mlp.bias"]
        with pytest.raises(RuntimeError, match=r"vision_tower\.extra|resampler_model\.mlp\.bias"):
            ErnieVisionEncoder(reference.SMALL).load_state_dict(state)

    @torch.no_grad()
    @pytest.mark.parametrize("place", ["parameter", "state_dict"])
    def test_edit_in_place_takes_effect(self, model: Ernie4_5_VLMoeForConditionalGeneration, place: str) -> None:
        """In each parameter, after a first call that might have kept something derived from it."""
        encoder = own_encoder(model)
        rows = reference.random_rows([[1, 4, 4]])
        tokens = encoder(rows, [[1, 4, 4]])
        for name, parameter in encoder.named_parameters():
            tensor = parameter if place == "parameter" else encoder.state_dict()[name]
            before = tensor.clone()
            tensor.mul_(1.5).add_(torch.linspace(-1, 1, tensor.numel()).view(tensor.shape))
            assert not torch.equal(encoder(rows, [[1, 4, 4]]), tokens), name
            tensor.copy_(before)
            assert torch.equal(encoder(rows, [[1, 4, 4]]), tokens), name

    @torch.no_grad()
    def test_from_transformers_shares_storage(self) -> None:
        model = reference.small_model(seed=9)
        for source in (model, model.model):
            encoder = ErnieVisionEncoder.from_transformers(source, backend="torch")
            assert encoder.config == reference.SMALL
            for name, parameter in encoder.named_parameters():
                assert parameter is model.model.get_parameter(name), name
        rows = reference.random_rows([[1, 4, 4]])
        model.model.vision_tower.blocks[0].mlp.fc1.bias.add_(1)
        expected = reference.encode(model.model, rows, [[1, 4, 4]])
        assert relative_error(encoder(rows, [[1, 4, 4]]), expected) < 1e-5

    @torch.no_grad()
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder))], ids=["deepcopy", "pickle"]
    )
    def test_copies(self, model: Ernie4_5_VLMoeForConditionalGeneration, duplicate: Any) -> None:
        encoder = own_encoder(model)
        other = duplicate(encoder)
        rows = reference.random_rows(MIXED)
        tokens = encoder(rows, MIXED)
        assert torch.equal(other(rows, MIXED), tokens)
        assert other.backend == "torch"
        for ours, theirs in zip(encoder.parameters(), other.parameters(), strict=True):
            assert ours.data_ptr() != theirs.data_ptr()
        next(other.parameters()).zero_()
        assert torch.equal(encoder(rows, MIXED), tokens)

    def test_from_config_follows_the_seed(self) -> None:
        one, same, other = (
            ErnieVisionEncoder.from_config(reference.SMALL, seed=seed, device="cpu").state_dict() for seed in (1, 1, 2)
        )
        assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
        differing = {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}
        assert differing == {name for name, tensor in one.items() if tensor.dim() > 1}
        assert all(tensor.isfinite().all() for tensor in one.values())

    def test_from_config_keeps_the_draw_in_another_dtype(self) -> None:
        fine, coarse = (
            ErnieVisionEncoder.from_config(reference.SMALL, device="cpu", dtype=dtype).state_dict()
            for dtype in (torch.float32, torch.bfloat16)
        )
        assert all(torch.equal(tensor.bfloat16(), coarse[name]) for name, tensor in fine.items())

    def test_an_encoder_is_for_inference(self, encoder: ErnieVisionEncoder) -> None:
        assert not encoder.training
        assert not any(parameter.requires_grad for parameter in encoder.parameters())

    def test_default_is_the_published_model(self) -> None:
        with torch.device("meta"):
            encoder = ErnieVisionEncoder()
        assert encoder.config == ErnieVisionConfig()
        assert len(encoder.state_dict()) == 387 + 15
        assert sum(p.numel() for p in encoder.parameters()) == 630_433_280 + 144_225_280
