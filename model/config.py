"""The numbers that define the encoder, read from any of the model's config files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class ErnieVisionConfig:
    """Sizes and constants of ERNIE-4.5-VL's vision tower and resampler.

    The defaults are those of baidu/ERNIE-4.5-VL-28B-A3B-PT.

    Attributes:
        depth: number of transformer blocks.
        hidden_size: width of the tower.
        num_heads: attention heads; a head is ``hidden_size / num_heads`` wide.
        intermediate_size: width inside the tower's MLP.
        text_hidden_size: width of an image token, the text model's hidden size.
        patch_size: side of a patch in pixels.
        in_channels: colour channels.
        norm_eps: eps of every LayerNorm, in the tower and in the resampler.
        text_norm_eps: eps of the resampler's last RMSNorm, which the text model's config gives.
        rope_theta: base of the rotary frequencies.

    Raises:
        ValueError: a size is not positive, or the heads do not divide the width into multiples of 4.
    """

    depth: int = 32
    hidden_size: int = 1280
    num_heads: int = 16
    intermediate_size: int = 5120
    text_hidden_size: int = 2560
    patch_size: int = 14
    in_channels: int = 3
    norm_eps: float = 1e-6
    text_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    # One token is made of 2x2 patches of 2 frames: the weights' shapes and the row order hold no other choice.
    spatial_merge_size: ClassVar[int] = 2
    temporal_merge_size: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for name in ("depth", "hidden_size", "num_heads", "intermediate_size", "text_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size: expected a multiple of 4 * num_heads = {4 * self.num_heads} (rotary turns height "
                f"and width in pairs of each head's channels), got {self.hidden_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Values in one pixel row: ``in_channels * patch_size ** 2``, 588."""
        return self.in_channels * self.patch_size**2

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ErnieVisionConfig":
        """Read a ``config.json``'s dictionary.

        Accepts transformers' nested form (``vision_config``, ``text_config``) and the original flat one, whose top
        level is the text model's config. Absent values take the defaults above.

        Raises:
            ValueError: there is no vision config, or it describes another architecture.
        """
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            raise ValueError(
                f"config: expected a dictionary under 'vision_config', got keys {sorted(map(str, config))}"
            )
        text = config.get("text_config", config)
        expected = {
            "hidden_act": "quick_gelu",
            "spatial_merge_size": cls.spatial_merge_size,
            "temporal_merge_size": cls.temporal_merge_size,
        }
        for name, value in expected.items():
            if vision.get(name, value) != value:
                raise ValueError(f"vision_config.{name}: expected {value!r}, got {vision[name]!r}")
        hidden_size = _first(vision, "hidden_size", "embed_dim", default=cls.hidden_size)
        mlp_ratio = vision.get("mlp_ratio", cls.intermediate_size / cls.hidden_size)
        return cls(
            depth=vision.get("depth", cls.depth),
            hidden_size=hidden_size,
            num_heads=_first(vision, "num_heads", "num_attention_heads", default=cls.num_heads),
            intermediate_size=vision.get("intermediate_size", int(hidden_size * mlp_ratio)),
            text_hidden_size=text.get("hidden_size", cls.text_hidden_size),
            patch_size=_square(_first(vision, "patch_size", "spatial_patch_size", default=cls.patch_size)),
            in_channels=_first(vision, "in_channels", "in_chans", default=cls.in_channels),
            norm_eps=vision.get("rms_norm_eps", cls.norm_eps),
            text_norm_eps=text.get("rms_norm_eps", cls.text_norm_eps),
            rope_theta=(vision.get("rope_parameters") or {}).get("rope_theta", cls.rope_theta),
        )


def _first(config: Mapping[str, Any], *names: str, default: Any) -> Any:
    """The value under the first of ``names`` that the dictionary has."""
    return next((config[name] for name in names if name in config), default)


def _square(patch_size: Any) -> Any:
    """transformers also allows a pair of equal sides."""
    if isinstance(patch_size, (list, tuple)):
        if len(set(patch_size)) != 1:
            raise ValueError(f"vision_config.patch_size: expected a square, got {list(patch_size)}")
        return patch_size[0]
    return patch_size
