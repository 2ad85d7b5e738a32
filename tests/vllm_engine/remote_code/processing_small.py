"""The original checkpoint's processor as far as vLLM calls it. transformers loads this from the checkpoint."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin

SIDE, MERGE = 14, 2


class ImageProcessor:
    size = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}  # noqa: RUF012  vLLM merges it with dictionaries
    image_mean, image_std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    rescale_factor = 1 / 255


class SmallProcessor(ProcessorMixin):
    """Token ids of a text, and pixels from 0 to 255 in the tower's rows: vLLM normalises them itself."""

    supports_video_metadata = True
    spatial_conv_size, temporal_conv_size = MERGE, 2

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_processor, self.chat_template = tokenizer, ImageProcessor(), None

    @classmethod
    def from_pretrained(cls, folder: str, *_: Any, tokenizer: Any = None, **__: Any) -> "SmallProcessor":
        return cls(tokenizer or AutoTokenizer.from_pretrained(folder, trust_remote_code=True))

    def __call__(self, text: Any = None, images: Any = None, videos: Any = None, **_: Any) -> BatchFeature:
        input_ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        items = [[image] for image in images or []]
        items += [list(map(Image.fromarray, frames)) for frames, _ in videos or []]
        if not items:
            return BatchFeature({"input_ids": input_ids, "images": None})
        rows = [patches(frame) for frames in items for frame in frames]
        sizes = [[len(frames), frames[0].height // SIDE, frames[0].width // SIDE] for frames in items]
        pixels = torch.from_numpy(np.concatenate(rows))
        return BatchFeature({"input_ids": input_ids, "images": pixels, "grid_thw": torch.tensor(sizes)})


def patches(image: Image.Image) -> Any:
    """``[patches, 588]`` of a picture whose sides are multiples of 28 pixels: it is not resized."""
    pixels = np.asarray(image.convert("RGB"))
    h, w = (side // SIDE for side in pixels.shape[:2])
    windows = pixels.reshape(h // MERGE, MERGE, SIDE, w // MERGE, MERGE, SIDE, 3)
    return windows.transpose(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 3 * SIDE * SIDE)
