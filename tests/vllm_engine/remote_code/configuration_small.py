"""The original checkpoint's config as far as vLLM's classes read it. transformers loads this from the checkpoint."""

from typing import Any

from transformers import PretrainedConfig


class VisionConfig(PretrainedConfig):
    model_type = "ernie4_5_vl_small_vision"


class SmallConfig(PretrainedConfig):
    model_type = "ernie4_5_vl_small"

    def __init__(self, vision_config: dict[str, Any] | None = None, **values: Any) -> None:
        self.vision_config = VisionConfig(**(vision_config or {}))
        super().__init__(**values)
