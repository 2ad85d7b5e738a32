"""Photographs and frames as the tower's pixel rows, by transformers' own ERNIE image processor.

Resizing, normalising and cutting into patches is transformers' ``Ernie4_5_VLMoeImageProcessorPil``, the
variant that needs no torchvision, unchanged. Here stands what comes before it: files as people have them
become RGB, as a person sees them, and shapes that the processor refuses are made to fit.

Needs the extra ``images`` (Pillow, transformers). transformers is imported with the first image.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

ImageLike: TypeAlias = "str | os.PathLike[str] | Image.Image | NDArray[np.uint8]"

# The processor's smart_resize refuses a longer image.
MAX_ASPECT_RATIO = 200

# Limits of transformers' Ernie4_5_VLMoeVideoProcessor for a frame; an image's are the image processor's.
FRAME_MIN_PIXELS = 299 * 28 * 28
FRAME_MAX_PIXELS = 1196 * 28 * 28


class UnreadableImage(ValueError):
    """A file from which no picture can be had: ``path`` and ``reason`` say which and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read one image file as RGB, upright.

    The EXIF orientation is applied and then every mode becomes RGB, both as transformers' ``load_image``
    does, but for two modes, of which it makes another picture than a person sees:

    * transparency lies over white, as vLLM serves it (``load_image`` drops the alpha channel, which uncovers
      whatever colour an editor left below, mostly black);
    * 16-bit grey is scaled to 8 bits (``load_image`` clips it at 255, which turns nearly all of it white).

    Of an animation the first frame is read.

    Raises:
        UnreadableImage: no such file, no image, damaged, or of a mode without a known white.
    """
    try:
        with Image.open(path) as image:
            return _to_rgb(image)
    except UnidentifiedImageError:
        reason = "not an image that Pillow can identify"
    except OSError as error:
        reason = error.strerror or str(error)
    except Exception as error:  # a decoder meets damaged bytes with any exception
        reason = f"{type(error).__name__}: {error}"
    raise UnreadableImage(os.fspath(path), reason)


def preprocess_images(
    images: Sequence[ImageLike],
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    processor: Any = None,
) -> tuple[Tensor, Tensor]:
    """Cut images into the tower's pixel rows, several at a time.

    Images beyond an aspect ratio of 200, which the processor refuses, are first widened on their short side,
    evenly on both edges, by repeating the edge pixels: what the picture shows keeps its proportions and no
    border appears.

    Args:
        images: paths, PIL images or uint8 arrays ``[height, width, 3]``.
        min_pixels: an image with fewer pixels is enlarged; by default the processor's own limit.
        max_pixels: an image with more pixels is reduced; by default the processor's own limit.
        processor: another image processor of transformers; by default ERNIE's with its default settings.

    Returns:
        ``pixel_values`` float32 ``[rows, 588]``, one image after the other in the order of ``images``, and
        ``grid_thw`` int64 ``[images, 3]``, on the CPU.

    Raises:
        UnreadableImage: the first of ``images`` that cannot be read.
        TypeError, ValueError: no sequence, an image is none, or the limits contradict each other.
    """
    processor = processor or default_processor()
    own_limits = processor.size["shortest_edge"], processor.size["longest_edge"]
    size = _size(min_pixels, max_pixels, own_limits)
    patches = _in_parallel(partial(_patch, processor=processor, size=size), _as_images(images))
    if not patches:
        row = 3 * processor.patch_size**2
        return torch.empty(0, row), torch.empty(0, 3, dtype=torch.int64)
    return torch.cat([rows for rows, _ in patches]), torch.cat([grid for _, grid in patches])


def preprocess_video(
    frames: Sequence[ImageLike],
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    processor: Any = None,
) -> tuple[Tensor, Tensor]:
    """Cut the frames of one video into the tower's pixel rows, each as an image, several at a time.

    As transformers' video processor does, an odd number of frames is completed by repeating the last (so a
    single frame becomes two), and the limits are those of frames, not of images. Unlike it nothing is sampled
    and no time stamps are drawn: the frames are taken as they come.

    Args:
        frames: as in :func:`preprocess_images`, all of one size; an array ``[frames, height, width, 3]`` too.
        min_pixels: smaller frames are enlarged; by default ``FRAME_MIN_PIXELS``.
        max_pixels: larger frames are reduced; by default ``FRAME_MAX_PIXELS``.
        processor: as in :func:`preprocess_images`.

    Returns:
        ``pixel_values`` float32 ``[rows, 588]``, frame after frame, and ``grid_thw`` int64 ``[1, 3]``, on the
        CPU.

    Raises:
        UnreadableImage: the first frame that cannot be read.
        TypeError, ValueError: no sequence, no frames, frames of several sizes, a frame is none, or the limits
            contradict each other.
    """
    pictures = _as_images(frames)
    if not pictures:
        raise ValueError("frames: expected at least one frame, got none")
    for index, picture in enumerate(pictures):
        if picture.size != pictures[0].size:
            raise ValueError(
                f"frames: expected all of one size, got {pictures[0].size} (width, height) for frame 0 "
                f"and {picture.size} for frame {index}"
            )
    processor = processor or default_processor()
    size = _size(min_pixels, max_pixels, (FRAME_MIN_PIXELS, FRAME_MAX_PIXELS))
    patches = _in_parallel(partial(_patch, processor=processor, size=size), pictures)
    if len(patches) % 2:
        patches.append(patches[-1])
    grid = patches[0][1].clone()
    grid[0, 0] = len(patches)
    return torch.cat([rows for rows, _ in patches]), grid


@cache
def default_processor() -> Any:
    """transformers' ERNIE image processor with its default settings, made once."""
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil,
    )

    return Ernie4_5_VLMoeImageProcessorPil()


def _in_parallel(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    # Threads serve: Pillow and numpy release the interpreter lock over the pixels.
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(len(items), os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _as_images(images: Sequence[ImageLike]) -> list[Image.Image]:
    if isinstance(images, (str, os.PathLike, Image.Image)):
        raise TypeError(f"images: expected a sequence of images, got one {type(images).__name__}")
    for image in images:
        if isinstance(image, Image.Image):
            image.load()  # it may be in the sequence twice, and two threads cannot decode one open file
    return _in_parallel(_as_image, images)


def _as_image(image: ImageLike) -> Image.Image:
    if isinstance(image, Image.Image):
        return _to_rgb(image)
    if isinstance(image, (str, os.PathLike)):
        return read_image(image)
    if not isinstance(image, np.ndarray):
        raise TypeError(f"image: expected a path, a PIL image or a numpy array, got {type(image).__name__}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"image: expected a uint8 array [height, width, 3], got {image.dtype} {list(image.shape)}")
    return _to_rgb(Image.fromarray(image))


def _to_rgb(image: Image.Image) -> Image.Image:
    if 0 in image.size:
        raise ValueError(f"image: expected at least one pixel, got size {image.size}")
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("image: floating-point pixels have no known white; convert them to 8 or 16 bits")
    if image.mode.startswith("I"):
        return _from_16_bits(np.asarray(image))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(grey: NDArray[Any]) -> Image.Image:
    # Mode "I" holds 32 bits, but Pillow uses it for 16-bit files too.
    if grey.min() < 0 or grey.max() > 65535:
        raise ValueError(f"image: expected pixels of at most 16 bits, got {grey.min()} to {grey.max()}")
    eight_bits = (grey.astype(np.uint32) + 128) // 257  # 65535 = 255 * 257
    return Image.fromarray(eight_bits.astype(np.uint8)).convert("RGB")


def _size(min_pixels: int | None, max_pixels: int | None, default: tuple[int, int]) -> dict[str, int]:
    least = default[0] if min_pixels is None else min_pixels
    most = default[1] if max_pixels is None else max_pixels
    # a limit given alone moves the other one's default out of its way
    least = min(least, most) if min_pixels is None else least
    most = max(least, most) if max_pixels is None else most
    if not 0 < least <= most:
        raise ValueError(f"min_pixels, max_pixels: expected 0 < min <= max, got {least} and {most}")
    return {"shortest_edge": least, "longest_edge": most}


def _patch(image: Image.Image, processor: Any, size: dict[str, int]) -> tuple[Tensor, Tensor]:
    """One image's rows float32 ``[rows, 588]`` and grid int64 ``[1, 3]``."""
    batch = processor([_widened(image)], size=size, return_tensors="pt")
    return batch["pixel_values"], batch["image_grid_thw"]


def _widened(image: Image.Image) -> Image.Image:
    width, height = image.size
    rows = max(0, -(-width // MAX_ASPECT_RATIO) - height)
    columns = max(0, -(-height // MAX_ASPECT_RATIO) - width)
    if not rows and not columns:
        return image
    edges = ((rows // 2, rows - rows // 2), (columns // 2, columns - columns // 2), (0, 0))
    return Image.fromarray(np.pad(np.asarray(image), edges, mode="edge"))
