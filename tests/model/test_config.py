"""Every value of the config is read, from either form of the file."""

from typing import Any

import pytest
import reference

from ernie_vit import ErnieVisionConfig

# No value is the default, and no two norms have one eps.
VISION = {
    "depth": 3,
    "hidden_size": 96,
    "num_heads": 2,
    "intermediate_size": 200,
    "patch_size": 16,
    "in_channels": 1,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
}
TEXT = {"hidden_size": 72, "rms_norm_eps": 1e-3}
READ = ErnieVisionConfig(
    depth=3,
    hidden_size=96,
    num_heads=2,
    intermediate_size=200,
    text_hidden_size=72,
    patch_size=16,
    in_channels=1,
    norm_eps=1e-4,
    text_norm_eps=1e-3,
    rope_theta=500.0,
)


@pytest.mark.parametrize(
    "config",
    [{"vision_config": VISION, "text_config": TEXT}, {"vision_config": VISION, **TEXT}],
    ids=["nested", "flat"],
)
def test_both_forms(config: dict[str, Any]) -> None:
    assert ErnieVisionConfig.from_dict(config) == READ


def test_the_original_names() -> None:
    """The published checkpoint's own vision config says ``embed_dim`` and ``mlp_ratio``."""
    vision = {"embed_dim": 96, "mlp_ratio": 4, "num_heads": 2, "in_chans": 3, "spatial_patch_size": 14}
    config = ErnieVisionConfig.from_dict({"vision_config": vision, "hidden_size": 72})
    assert (config.hidden_size, config.intermediate_size, config.text_hidden_size) == (96, 384, 72)
    assert config.norm_eps == 1e-6  # the vision part's own default, not the text part's
    assert config.text_norm_eps == 1e-5


def test_transformers_defaults_are_ours() -> None:
    from transformers import Ernie4_5_VLMoeConfig

    assert ErnieVisionConfig.from_dict(Ernie4_5_VLMoeConfig().to_dict()) == ErnieVisionConfig()
    assert ErnieVisionConfig.from_dict(reference.small_config().to_dict()) == reference.SMALL


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 2560}, r"under 'vision_config', got keys \['hidden_size'\]"),
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act: expected 'quick_gelu', got 'gelu'"),
        ({"vision_config": {"spatial_merge_size": 4}}, "spatial_merge_size: expected 2, got 4"),
        ({"vision_config": {"temporal_merge_size": 1}}, "temporal_merge_size: expected 2, got 1"),
        ({"vision_config": {"patch_size": [14, 16]}}, r"patch_size: expected a square, got \[14, 16\]"),
        ({"vision_config": {"depth": 0}}, "depth: expected a positive number, got 0"),
        ({"vision_config": {"hidden_size": 100, "num_heads": 2}}, "multiple of 4 \\* num_heads = 8"),
    ],
)
def test_another_architecture_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErnieVisionConfig.from_dict(config)
