"""Our tower inside transformers' ERNIE-4.5-VL.

``patch(model)`` replaces ``forward`` of that one model's vision tower; everything around it (processor, resampler,
features' types, language model, ``generate``) stays transformers'. Weights are shared. A call that our tower cannot
compute, training above all, goes transformers' own way, and is counted with its reason.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.operators import Backend
from ernie_vit.shared_tower import Mismatch, SharedTower

# accelerate's hooks (device_map) keep a module's forward under this name and call it between theirs.
HOOKED = "_old_forward"


def patch(model: nn.Module, *, backend: Literal["auto"] | Backend = "auto", graphs: bool = True) -> "Patch":
    """Let ``model`` encode images and videos with our tower; patching again changes nothing.

    Works on the one instance, before or after ``.to()``, ``device_map`` and ``deepcopy``; a copy is patched on its own.

    Args:
        model: a ``Ernie4_5_VLMoeForConditionalGeneration`` (or its ``.model``) of transformers.
        backend: "triton", "torch", or "auto": Triton on a GPU that its kernels run on, else transformers' own path.
        graphs: replay the tower from CUDA graphs, each captured when a call first needs it.

    Returns:
        A context manager that unpatches at its end, if it is used as one.

    Raises:
        ValueError: the model is not transformers' ERNIE-4.5-VL, or its tower has parts that ours does not compute
            (quantised or adapted linears, say). Names transformers' version and what was looked for.
    """
    tower = _vision_tower(model)
    if _patched(tower) is None:
        try:
            shared = SharedTower(
                tower,
                num_heads=tower.blocks[0].attn.num_heads,
                scale=tower.blocks[0].attn.scaling,
                rope_theta=_rope_theta(tower.config),
                why_not_linear=_why_not_linear,
                backend=backend,
            )
        except (AttributeError, Mismatch) as error:
            raise ValueError(f"model: cannot patch the tower of transformers {_version()}: {error}") from error
        slot = _slot(tower)
        setattr(tower, slot, _Forward(tower, getattr(tower, slot), slot in tower.__dict__, shared, graphs).forward)
    return Patch(model)


def unpatch(model: nn.Module) -> None:
    """Give ``model`` transformers' own forward back; without a patch nothing happens."""
    tower = _vision_tower(model)
    ours = _patched(tower)
    if ours is None:
        return
    ours.shared.release()
    slot = _slot(tower)
    if ours.was_own or slot == HOOKED:
        setattr(tower, slot, ours.original)
    else:
        delattr(tower, slot)


def stats(model: nn.Module) -> dict[str, Any]:
    """Counters since :func:`patch`: ``calls`` of our tower, ``fallbacks`` to transformers' by reason, ``replays`` of
    graphs, and ``graph_fallbacks`` by reason.

    Raises:
        ValueError: the model is not patched.
    """
    ours = _patched(_vision_tower(model))
    if ours is None:
        raise ValueError("model: expected a patched model, call ernie_vit.hf.patch(model) first")
    return ours.shared.stats()


class Patch:
    """``with patch(model): ...`` unpatches at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *error: object) -> None:
        unpatch(self.model)


class _Forward:
    """The tower's forward with ours in front. Held by a bound method, so that a deep copy binds to the copied tower."""

    def __init__(
        self, host: nn.Module, original: Callable[..., Any], was_own: bool, shared: SharedTower, graphs: bool
    ) -> None:
        self.host, self.original, self.was_own, self.shared = host, original, was_own, shared
        self._graphs = graphs

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **keywords: Any) -> Any:
        obstacle = self._why_not_keywords(keywords)
        if obstacle is not None:
            self.shared.fallbacks[obstacle] += 1
            return self.original(hidden_states, grid_thw, **keywords)
        if self._wants_graphs() and self.shared.obstacle(hidden_states) is None:
            self.shared.capture(lazy=True)
        rows = self.shared.encode(hidden_states, grid_thw)
        if rows is None:
            return self.original(hidden_states, grid_thw, **keywords)
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=rows)

    def _wants_graphs(self) -> bool:
        return self._graphs and self.shared.graphs is None and self.shared.device.type == "cuda"

    def _why_not_keywords(self, keywords: dict[str, Any]) -> str | None:
        """transformers' path serves what ours does not know: recorded layers, precomputed positions, new keywords."""
        config = self.host.config
        asked = {
            "output_hidden_states": getattr(config, "output_hidden_states", False),
            "output_attentions": getattr(config, "output_attentions", False),
            **{name: value for name, value in keywords.items() if name != "return_dict"},
        }
        unknown = sorted(name for name, value in asked.items() if value is not None and value is not False)
        if keywords.get("return_dict", getattr(config, "return_dict", True)) is False:
            unknown.append("return_dict=False")
        return f"keywords: {', '.join(unknown)}" if unknown else None


def _vision_tower(model: nn.Module) -> Any:
    inner = getattr(model, "model", model)
    tower = getattr(inner, "vision_tower", None)
    if tower is None or not hasattr(inner, "resampler_model"):
        raise ValueError(
            f"model: expected the Ernie4_5_VLMoeForConditionalGeneration of transformers, got {type(model).__name__} "
            f"of transformers {_version()}; looked for model.vision_tower and model.resampler_model"
        )
    return tower


def _slot(tower: nn.Module) -> str:
    return HOOKED if HOOKED in tower.__dict__ else "forward"


def _patched(tower: nn.Module) -> _Forward | None:
    ours = getattr(tower.__dict__.get(_slot(tower)), "__self__", None)
    return ours if isinstance(ours, _Forward) else None


def _why_not_linear(module: nn.Module) -> str | None:
    return None if type(module) is nn.Linear else f"expected a plain Linear, got {type(module).__name__}"


def _rope_theta(config: Any) -> float:
    """transformers 5.3 states none: its tower has the default. The frequencies are checked in any case."""
    theta: float = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", ErnieVisionConfig.rope_theta)
    return theta


def _version() -> str:
    import transformers

    return str(transformers.__version__)
