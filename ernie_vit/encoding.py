"""Files in, tokens out: reads, encodes and times images and videos one by one, and stores the tokens."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ernie_vit.encoder import ErnieVisionEncoder
from ernie_vit.inputs import Source
from ernie_vit.model.images import UnreadableImage, preprocess_images, preprocess_video, read_image

# Files read together, in parallel. Nothing is read while an encoding is timed.
READ_AHEAD = 16


@dataclass(frozen=True)
class Encoded:
    """A source's tokens.

    Attributes:
        source: what was encoded.
        size: width and height of the image or of a frame, upright, in pixels.
        grid_thw: frames, height and width in patches.
        tokens: ``[tokens, text_width]``, on the CPU.
        milliseconds: from pixel rows to tokens, both on the device; reading and preprocessing are not in it.
    """

    source: Source
    size: tuple[int, int]
    grid_thw: tuple[int, int, int]
    tokens: Tensor
    milliseconds: float

    @property
    def patches(self) -> int:
        frames, height, width = self.grid_thw
        return frames * height * width


@dataclass(frozen=True)
class Failure:
    """Why a source could not be read, naming the file."""

    reason: str


@dataclass(frozen=True)
class _Read:
    size: tuple[int, int]
    pixel_values: Tensor
    grid_thw: Tensor


def encode_sources(
    encoder: ErnieVisionEncoder,
    sources: Sequence[Source],
    *,
    min_pixels: int | None,
    max_pixels: int | None,
) -> Iterator[Encoded | Failure]:
    """Encode ``sources`` one by one, in order.

    Where a limit is None, transformers' own for an image, or for a video's frame, holds. On a GPU the first
    source is encoded once before it is timed, which compiles the kernels.
    """
    given = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    warm = encoder.device.type == "cpu"
    with ThreadPoolExecutor(max_workers=min(READ_AHEAD, os.cpu_count() or 1)) as pool:
        for start in range(0, len(sources), READ_AHEAD):
            chunk = sources[start : start + READ_AHEAD]
            readings = list(pool.map(partial(_read, limits=limits), chunk))
            for source, reading in zip(chunk, readings, strict=True):
                if isinstance(reading, Failure):
                    yield reading
                    continue
                if not warm:
                    _encode(encoder, reading)
                    warm = True
                tokens, milliseconds = _encode(encoder, reading)
                frames, height, width = reading.grid_thw[0].tolist()
                yield Encoded(source, reading.size, (frames, height, width), tokens, milliseconds)


def save_tokens(file: Path, results: Sequence[Encoded], origin: dict[str, str | int]) -> None:
    """Store the tokens under their files' names (folders' names for videos) in one safetensors file.

    A name that comes again is stored as ``name#2``, ``name#3``. The metadata holds two JSON texts: ``items``,
    which has ``path``, ``size`` (width, height) and ``grid_thw`` for each name, and ``encoder``: ``origin``.
    """
    named: dict[str, Encoded] = {}
    for result in results:
        name = result.source.path.name
        key, count = name, 1
        while key in named:
            count += 1
            key = f"{name}#{count}"
        named[key] = result
    items = {
        key: {"path": str(result.source.path), "size": result.size, "grid_thw": result.grid_thw}
        for key, result in named.items()
    }
    save_file(
        {key: result.tokens for key, result in named.items()},
        file,
        metadata={"items": json.dumps(items), "encoder": json.dumps(origin)},
    )


def _read(source: Source, limits: dict[str, int]) -> _Read | Failure:
    try:
        if source.frames is None:
            image = read_image(source.path)
            return _Read(image.size, *preprocess_images([image], **limits))
        frames = [read_image(frame) for frame in source.frames]
        return _Read(frames[0].size, *preprocess_video(frames, **limits))
    except UnreadableImage as error:
        return Failure(str(error))
    except ValueError as error:  # frames of several sizes
        return Failure(f"{source.path}: {error}")


@torch.inference_mode()
def _encode(encoder: ErnieVisionEncoder, reading: _Read) -> tuple[Tensor, float]:
    pixel_values = reading.pixel_values.to(encoder.device)
    _synchronize(encoder.device)
    start = time.perf_counter()
    tokens = encoder(pixel_values, reading.grid_thw)
    _synchronize(encoder.device)
    milliseconds = 1000 * (time.perf_counter() - start)
    return tokens.cpu(), milliseconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
