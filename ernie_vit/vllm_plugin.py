"""The vLLM plugin: vLLM loads it in each of its processes, and ERNIE-4.5-VL's vision tower runs on our kernels.

It puts an entry of ours into vLLM's model registry, in front of vLLM's own for this one architecture. Nothing is
imported and nothing of vLLM is changed before a process loads the model; then the entry gives vLLM's class with our
tower (:mod:`ernie_vit.vllm_model`), or vLLM's class alone if it is not what we know.
"""

import logging
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ARCHITECTURE = "Ernie4_5_VLMoeForConditionalGeneration"
MODULE = "vllm.model_executor.models.ernie45_vl"
# The vLLM releases that this was tried with, inclusive.
OLDEST, NEWEST = (0, 24), (0, 33)
# What our class hooks into, looked for in the source: importing it takes ten seconds, in each process.
SOURCE = "model_executor/models/ernie45_vl.py"
WANTED = (
    f"class {ARCHITECTURE}(",
    "class Ernie4_5_VisionTransformer(",
    "class VariableResolutionResamplerModel(",
    "def _vision_forward(",
    "def embed_multimodal(",
)

# A child of vLLM's logger: its lines appear with vLLM's, in every process.
logger = logging.getLogger("vllm.ernie_vit")


def register() -> None:
    """The entry point in the group ``vllm.general_plugins``; ``ERNIE_VIT_DISABLE=1`` makes it do nothing."""
    if os.environ.get("ERNIE_VIT_DISABLE") != "1":
        patch()


def patch() -> "Patch":
    """Let models that vLLM loads from now on in this process have our tower; patching again changes nothing.

    An unknown vLLM is left as it is, with one line in the log.

    Returns:
        A context manager that unpatches at its end, if it is used as one.
    """
    obstacle = _why_not()
    if obstacle is not None:
        logger.warning("ernie-vit leaves vLLM %s as it is: %s", vllm_version(), obstacle)
        return Patch()
    models = _registered_models()
    if not isinstance(models[ARCHITECTURE], _Entry):
        _register(models, _Entry(models[ARCHITECTURE]))
    return Patch()


def unpatch() -> None:
    """Let models that vLLM loads from now on be vLLM's own; without a patch nothing happens."""
    models = _registered_models()
    entry = models.get(ARCHITECTURE)
    if isinstance(entry, _Entry):
        _register(models, entry.stock)


def stats(model: Any) -> dict[str, Any]:
    """Counters of a loaded model: ``calls`` of our tower, ``fallbacks``, ``replays``, ``graph_fallbacks``.

    For instance ``llm.apply_model(ernie_vit.vllm_plugin.stats)``, which asks every worker. ``calls`` came to us, with
    or without a graph; what vLLM's own graph manager replays is in ``replays`` only.

    Raises:
        ValueError: the model was loaded without the plugin.
    """
    vision = getattr(model, "ernie_vit", None)
    if vision is None:
        raise ValueError(f"model: expected one that vLLM loaded with ernie-vit's plugin, got {type(model).__name__}")
    counters: dict[str, Any] = vision.stats()
    return counters


class Patch:
    """``with patch(): ...`` unpatches at the end."""

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *error: object) -> None:
        unpatch()


@dataclass(frozen=True)
class _Entry:
    """Our entry in vLLM's registry, in front of vLLM's ``stock`` entry."""

    stock: Any

    def inspect_model_cls(self) -> Any:
        """What vLLM asks about the class: its own answers (and its own cache of them), but that images can be spread
        over the ranks: ``mm_encoder_tp_mode="data"``."""
        return replace(self.stock.inspect_model_cls(), supports_multimodal_encoder_tp_data=True)

    def load_model_cls(self) -> Any:
        stock = self.stock.load_model_cls()
        try:
            from ernie_vit.vllm_model import with_our_tower

            return with_our_tower(stock)
        except Exception as error:  # whatever is wrong with us must not keep vLLM from serving
            logger.warning("ernie-vit leaves vLLM %s as it is: %s", vllm_version(), error)
            return stock


def vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of unknown version"))


def _registered_models() -> dict[str, Any]:
    """Entries by architecture; none where the registry is not what we know, for a plugin's error would end vLLM."""
    try:
        from vllm.model_executor.models.registry import ModelRegistry

        models: dict[str, Any] = ModelRegistry.models
        return models
    except (ImportError, AttributeError):
        return {}


def _register(models: dict[str, Any], entry: Any) -> None:
    models[ARCHITECTURE] = entry
    # a process that has loaded a model remembers the class that it took for its path
    loader = sys.modules.get("vllm.model_executor.model_loader.utils")
    getattr(loader, "_MODEL_ARCH_BY_HASH", {}).clear()


def _why_not() -> str | None:
    """Why vLLM is left alone, or None."""
    release = re.match(r"(\d+)\.(\d+)", vllm_version())
    if release is None or not OLDEST <= tuple(map(int, release.groups())) <= NEWEST:
        return f"looked for a version from {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    entry = _registered_models().get(ARCHITECTURE)
    if isinstance(entry, _Entry):
        return None
    found = getattr(entry, "module_name", None)
    if found != MODULE or not all(hasattr(entry, name) for name in ("inspect_model_cls", "load_model_cls")):
        return f"looked for {ARCHITECTURE} of {MODULE} in its model registry, found {found or entry}"
    source = _source()
    missing = [text for text in WANTED if text not in source]
    return f"looked for {', '.join(map(repr, missing))} in {SOURCE}" if missing else None


def _source() -> str:
    import vllm

    file = Path(vllm.__file__).parent / SOURCE
    return file.read_text(encoding="utf-8") if file.exists() else ""
