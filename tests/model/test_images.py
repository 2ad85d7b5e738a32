"""Images as people have them, against transformers' own ERNIE image processor."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ernie_vit.model.images import (
    FRAME_MAX_PIXELS,
    FRAME_MIN_PIXELS,
    UnreadableImage,
    default_processor,
    preprocess_images,
    preprocess_video,
    read_image,
)

WHITE = (255, 255, 255)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_transformers(*pictures: np.ndarray, **limits: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = {"size": {"shortest_edge": limits["least"], "longest_edge": limits["most"]}} if limits else {}
    batch = default_processor()([Image.fromarray(p) for p in pictures], return_tensors="pt", **size)
    return batch["pixel_values"], batch["image_grid_thw"]


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


class TestReading:
    def test_exif_orientation_is_applied(self, tmp_path: Path) -> None:
        stored = picture(20, 30)
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was held a quarter turn to the left: turn right to see it upright
        Image.fromarray(stored).save(tmp_path / "turned.png", exif=exif)
        read = read_image(tmp_path / "turned.png")
        assert read.size == (20, 30)
        assert np.array_equal(np.asarray(read), np.rot90(stored, k=-1))

    @pytest.mark.parametrize(("alpha", "seen"), [(0, WHITE), (255, (200, 40, 0)), (51, (244, 212, 204))])
    def test_transparency_lies_over_white(self, tmp_path: Path, alpha: int, seen: tuple[int, int, int]) -> None:
        Image.new("RGBA", (3, 2), (200, 40, 0, alpha)).save(tmp_path / "rgba.png")
        assert read_image(tmp_path / "rgba.png").getcolors() == [(6, seen)]

    def test_transparent_grey_and_palette_lie_over_white(self, tmp_path: Path) -> None:
        Image.new("LA", (2, 2), (7, 0)).save(tmp_path / "grey.png")
        palette = Image.new("P", (2, 2), 1)
        palette.putpalette([9, 9, 9, 90, 0, 0])
        palette.save(tmp_path / "clear.gif", transparency=1)
        palette.save(tmp_path / "opaque.gif")
        assert read_image(tmp_path / "grey.png").getcolors() == [(4, WHITE)]
        assert read_image(tmp_path / "clear.gif").getcolors() == [(4, WHITE)]
        assert read_image(tmp_path / "opaque.gif").getcolors() == [(4, (90, 0, 0))]

    @pytest.mark.parametrize(
        ("mode", "stored", "name", "seen"),
        [
            pytest.param("L", 77, "grey.png", (77, 77, 77), id="grey"),
            pytest.param("1", 1, "bit.png", WHITE, id="one-bit"),
            pytest.param("CMYK", (255, 0, 0, 0), "cyan.tiff", (0, 255, 255), id="cmyk"),
            pytest.param("CMYK", (0, 0, 0, 255), "black.tiff", (0, 0, 0), id="cmyk-black"),
        ],
    )
    def test_mode_becomes_rgb(self, tmp_path: Path, mode: str, stored: Any, name: str, seen: Any) -> None:
        Image.new(mode, (4, 4), stored).save(tmp_path / name)
        assert read_image(tmp_path / name).getcolors() == [(16, seen)]

    @pytest.mark.parametrize("name", ["grey16.png", "grey16.tiff"])
    def test_16_bits_are_scaled_not_clipped(self, tmp_path: Path, name: str) -> None:
        grey = np.array([[0, 128, 129, 256, 300, 32768, 65406, 65407, 65535]], np.uint16)
        Image.fromarray(grey).save(tmp_path / name)
        read = np.asarray(read_image(tmp_path / name))
        assert read[0, :, 0].tolist() == np.rint(grey / 257)[0].tolist()
        assert (read == read[:, :, :1]).all()

    def test_first_frame_of_an_animation(self, tmp_path: Path) -> None:
        frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
        frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
        assert read_image(tmp_path / "moving.gif").getcolors() == [(16, (255, 0, 0))]

    @pytest.mark.parametrize("kind", ["missing", "text", "empty", "folder", "cut png", "cut jpeg", "float"])
    def test_unreadable_file_is_named(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "picture.png"
        if kind == "text":
            path.write_text("no picture")
        elif kind == "empty":
            path.touch()
        elif kind == "folder":
            path.mkdir()
        elif kind.startswith("cut"):
            Image.fromarray(picture(64, 64)).save(path, format=kind.removeprefix("cut "))
            path.write_bytes(path.read_bytes()[:-2000])
        elif kind == "float":
            path = tmp_path / "depth.tiff"
            Image.fromarray(np.ones((4, 4), np.float32)).save(path)
        with pytest.raises(UnreadableImage) as caught:
            read_image(path)
        assert caught.value.path == str(path)
        assert caught.value.reason
        assert str(caught.value).startswith(f"{path}: ")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_wide_integers_are_refused(self) -> None:
        with pytest.raises(ValueError, match="16 bits, got 0 to 70000"):
            preprocess_images([Image.fromarray(np.array([[0, 70000]], np.int32))])


class TestImages:
    def test_rows_are_transformers(self) -> None:
        image = picture(97, 131)
        assert_same(preprocess_images([image]), by_transformers(image))

    def test_many_images_keep_their_order(self) -> None:
        """Sizes such that the small ones are done before the large ones handed in earlier."""
        images = [picture(40 + 400 * (i % 3), 60 + 90 * i, seed=i) for i in range(7, -1, -1)]
        assert_same(preprocess_images(images), by_transformers(*images))

    def test_path_picture_and_array_are_one(self, tmp_path: Path) -> None:
        image = picture(60, 90)
        Image.fromarray(image).save(tmp_path / "image.png")
        forms = [tmp_path / "image.png", str(tmp_path / "image.png"), Image.fromarray(image), image]
        assert_same(preprocess_images(forms), by_transformers(image, image, image, image))

    def test_picture_in_memory_is_seen_as_a_file_is(self) -> None:
        clear = Image.new("RGBA", (60, 60), (0, 0, 0, 0))
        assert_same(preprocess_images([clear]), by_transformers(np.full((60, 60, 3), 255, np.uint8)))

    @pytest.mark.parametrize("shape", [(3, 40), (40, 3), (1, 1), (3, 3), (1, 200), (200, 1)])
    def test_few_pixels(self, shape: tuple[int, int]) -> None:
        """A side of 3 is no colour channel, and 200 : 1 is what the processor still takes."""
        image = picture(*shape)
        assert_same(preprocess_images([image]), by_transformers(image))

    @pytest.mark.parametrize(("shape", "edges"), [((1, 1000), (2, 2)), ((2, 601), (1, 1)), ((1, 201), (0, 1))])
    @pytest.mark.parametrize("upright", [False, True])
    def test_beyond_an_aspect_of_200(self, shape: tuple[int, int], edges: tuple[int, int], upright: bool) -> None:
        image = picture(*shape)
        widened = np.pad(image, (edges, (0, 0), (0, 0)), mode="edge")
        if upright:
            image, widened = image.swapaxes(0, 1), widened.swapaxes(0, 1)
        with pytest.raises(ValueError, match="aspect ratio"):
            by_transformers(image)
        assert_same(preprocess_images([image]), by_transformers(widened))

    def test_one_open_file_many_times(self, tmp_path: Path) -> None:
        """Pillow decodes a file when its pixels are first asked for, which here several threads do."""
        image = picture(700, 900)
        Image.fromarray(image).save(tmp_path / "image.png")
        with Image.open(tmp_path / "image.png") as opened:
            assert_same(preprocess_images([opened] * 4), by_transformers(*[image] * 4))

    def test_limits(self) -> None:
        image = picture(300, 400)
        assert_same(
            preprocess_images([image], min_pixels=50_000, max_pixels=60_000),
            by_transformers(image, least=50_000, most=60_000),
        )
        _, (reduced,) = preprocess_images([image], max_pixels=784)
        _, (enlarged,) = preprocess_images([image], min_pixels=6_000_000)
        assert reduced.tolist() == [1, 2, 2]  # 784 pixels lie below the default minimum
        assert enlarged.prod() * 14**2 >= 6_000_000  # and these above the default maximum

    @pytest.mark.parametrize("limits", [(100, 99), (0, 99), (-1, None), (None, 0)])
    def test_contradicting_limits(self, limits: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="expected 0 < min <= max"):
            preprocess_images([picture(9, 9)], min_pixels=limits[0], max_pixels=limits[1])

    def test_no_images(self) -> None:
        pixel_values, grid_thw = preprocess_images([])
        assert pixel_values.shape == (0, 588)
        assert pixel_values.dtype == torch.float32
        assert grid_thw.shape == (0, 3)
        assert grid_thw.dtype == torch.int64

    @pytest.mark.parametrize(
        ("image", "error", "message"),
        [
            (np.zeros((9, 9, 3), np.float32), ValueError, r"uint8 array .*got float32 \[9, 9, 3\]"),
            (np.zeros((9, 9), np.uint8), ValueError, r"got uint8 \[9, 9\]"),
            (np.zeros((3, 9, 9), np.uint8), ValueError, r"got uint8 \[3, 9, 9\]"),
            (np.zeros((0, 9, 3), np.uint8), ValueError, "at least one pixel"),
            (torch.zeros(9, 9, 3), TypeError, "got Tensor"),
            (b"bytes", TypeError, "got bytes"),
        ],
    )
    def test_what_is_no_image(self, image: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            preprocess_images([picture(9, 9), image])

    @pytest.mark.parametrize(
        "one", ["photo.jpg", Path("photo.jpg"), Image.new("RGB", (9, 9))], ids=["str", "path", "pil"]
    )
    @pytest.mark.parametrize("preprocess", [preprocess_images, preprocess_video])
    def test_one_image_is_no_sequence(self, preprocess: Any, one: Any) -> None:
        with pytest.raises(TypeError, match="expected a sequence of images, got one"):
            preprocess(one)

    def test_unreadable_image_among_others(self, tmp_path: Path) -> None:
        with pytest.raises(UnreadableImage, match=r"no\.png"):
            preprocess_images([picture(9, 9), tmp_path / "no.png", picture(9, 9)])


class TestVideo:
    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_frames_are_images_and_even_in_number(self, count: int) -> None:
        """The last frame is repeated where the number is odd, as transformers' video processor does."""
        frames = [picture(60, 100, seed=i) for i in range(count)]
        complete = frames + frames[-1:] * (count % 2)
        rows, grids = by_transformers(*complete, least=FRAME_MIN_PIXELS, most=FRAME_MAX_PIXELS)
        assert (grids == grids[0]).all()
        expected = torch.tensor([[len(complete), *grids[0, 1:].tolist()]])
        assert_same(preprocess_video(frames), (rows, expected))
        assert_same(preprocess_video(np.stack(frames)), (rows, expected))

    def test_limits(self) -> None:
        frames = [picture(60, 100), picture(60, 100, seed=1)]
        rows, _ = by_transformers(*frames, least=784, most=4000)
        assert_same(preprocess_video(frames, min_pixels=784, max_pixels=4000), (rows, torch.tensor([[2, 2, 4]])))

    def test_frames_of_several_sizes(self) -> None:
        with pytest.raises(ValueError, match=r"\(100, 60\).* and \(60, 100\) for frame 2"):
            preprocess_video([picture(60, 100), picture(60, 100), picture(100, 60)])

    def test_no_frames(self) -> None:
        with pytest.raises(ValueError, match="at least one frame"):
            preprocess_video([])
