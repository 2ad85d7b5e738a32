"""Our tower over the modules of another library's model.

transformers and vLLM give the tower's modules the names that ours have. So our tower takes their linears and norms
themselves: no weight is copied, an update reaches both, and each norm keeps the eps that its owner gave it.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from ernie_vit.encoder import choose_backend
from ernie_vit.graph.capture import capture_graphs
from ernie_vit.graph.runner import WEIGHTS_MOVED, GraphRunner
from ernie_vit.graph.stats import GraphStats
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import Grid, prepare_encoder_metadata
from ernie_vit.model.operators import Backend, Operators, choose_operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.warm_up import row_sizes, warm_up

QUICK_GELU = ("QuickGELU", "QuickGELUActivation")  # vLLM's class, transformers' class
_END = ...  # behind the last entry, so that one more or one less is a difference; in a deep copy it is the same


class Mismatch(ValueError):
    """The owner's tower is not what ours computes. Says what was looked for and what was found."""


class SharedTower:
    """Our tower with a host's linears and norms, its graphs, and counters of what they did.

    Args:
        host: the host's tower: ``patch_embed.proj``, ``blocks.N.{norm1,norm2,attn.qkv,attn.proj,mlp.fc1,mlp.fc2}``,
            ``ln``, ``rotary_pos_emb.inv_freq``.
        num_heads: of the attention.
        scale: of the host's attention scores.
        rope_theta: base of the rotary frequencies.
        why_not_linear: says why a linear cannot be shared, or None.
        backend: as in :class:`ErnieVisionEncoder`.

    Attributes:
        calls: how many calls it computed.
        fallbacks: reason to the number of calls that its host computed instead.

    Raises:
        Mismatch: something is missing or different.
    """

    def __init__(
        self,
        host: nn.Module,
        *,
        num_heads: int,
        scale: float,
        rope_theta: float,
        why_not_linear: Callable[[nn.Module], str | None],
        backend: Literal["auto"] | Backend = "auto",
    ) -> None:
        self.tower = share_modules(
            host, num_heads=num_heads, scale=scale, rope_theta=rope_theta, why_not_linear=why_not_linear
        )
        self.graphs: GraphRunner | None = None
        self.calls = 0
        self.fallbacks: Counter[str] = Counter()
        self._graph_stats: list[GraphStats] = []  # also of graphs that are no more
        self._backend = backend
        modules = list(host.modules())
        self._layer_tables: list[dict[str, Any]] = [module._modules for module in modules if module._modules]
        self._tables = [*self._layer_tables, *(module._parameters for module in modules if module._parameters)]
        self._layers = [*_entries(self._layer_tables)]
        self._known: Sequence[object] = ()
        self._weights: Sequence[Tensor] = ()
        self._known_device: torch.device | None = None
        self._why_not_weights: str | None = None

    @property
    def device(self) -> torch.device:
        return self.tower.patch_embed.proj.weight.device

    @property
    def graph_bytes(self) -> int:
        """Device memory that the graphs and their buffers hold."""
        return self.graphs.stats.memory_bytes if self.graphs is not None else 0

    def operators(self) -> Operators:
        return choose_operators(choose_backend(self._backend, self.device, self.tower.patch_embed.proj.weight.dtype)[0])

    def obstacle(self, pixel_values: Tensor) -> str | None:
        """Why the host must compute a call, or None: what became of the host's layers, and the call itself."""
        reason = None if torch.compiler.is_compiling() else self._weights_obstacle()
        return reason or self._call_obstacle(pixel_values)

    def _call_obstacle(self, pixel_values: Tensor) -> str | None:
        weight = self.tower.patch_embed.proj.weight
        if torch.compiler.is_compiling():
            return "torch.compile"
        if pixel_values.device != weight.device:
            return "pixel values on another device"
        if not pixel_values.is_floating_point() or pixel_values.dim() != 2:
            return "pixel values are not the processor's rows"
        if torch.is_autocast_enabled(weight.device.type):
            return "autocast"
        if torch.is_grad_enabled() and (
            pixel_values.requires_grad or any(parameter.requires_grad for parameter in self._weights)
        ):
            return "gradient needed"
        chosen, reason = choose_backend(self._backend, weight.device, weight.dtype)
        return reason if self._backend == "auto" and chosen == "torch" else None

    def _weights_obstacle(self) -> str | None:
        """Walks some 700 layers and parameters, without a Python loop; looks closer where one of them is another."""
        device = self.device
        if device != self._known_device or not all(map(operator.is_, _entries(self._tables), self._known)):
            self._known, self._known_device = [*_entries(self._tables)], device
            self._weights = [entry for entry in self._known if isinstance(entry, Tensor)]
            if not all(map(operator.is_, _entries(self._layer_tables), self._layers)):
                self._why_not_weights = "a layer of the tower was replaced"
            elif any(weight.is_meta or weight.device != device for weight in self._weights):
                self._why_not_weights = "weights offloaded or on several devices"
            else:
                self._why_not_weights = None
        return self._why_not_weights

    def capture(self, *, max_tokens: int | None = None, lazy: bool = False) -> None:
        """Capture the tower in CUDA graphs; arguments and errors as :meth:`ErnieVisionEncoder.capture`."""
        self.release()
        rows = cast(Resampler, _OwnRows())
        self.graphs = capture_graphs(self.tower, rows, self.operators(), max_tokens=max_tokens, lazy=lazy)
        self._graph_stats.append(self.graphs.stats)

    def release(self) -> None:
        """Drop the graphs and give their memory back."""
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None

    def warm_up(self, above: int) -> None:
        """Compile every kernel variant of calls with more than ``above`` rows; nothing on a CPU."""
        if self.device.type == "cuda":
            warm_up(self.tower, self.operators(), [rows for rows in row_sizes(self.device) if rows > above])

    def encode(self, pixel_values: Tensor, grid_thw: Grid) -> Tensor | None:
        """As a call, or None for a call with an :meth:`obstacle`, which is counted: the host must compute it.

        Graphs keep the weights that they read. So what became of the host's layers is asked behind a replay, while the
        device computes: it takes as long as the launch.
        """
        rows = self._replay(pixel_values, grid_thw) if self._call_obstacle(pixel_values) is None else None
        obstacle = self.obstacle(pixel_values)
        if obstacle is not None:
            if rows is not None:
                self.release()  # graphs of layers that the host has replaced
            self.fallbacks[obstacle] += 1
            return None
        self.calls += 1
        return self._eager(pixel_values, grid_thw) if rows is None else rows

    def __call__(self, pixel_values: Tensor, grid_thw: Grid) -> Tensor:
        """``[rows, 588]`` to the tower's ``[rows, hidden_size]``, for a call without :meth:`obstacle`.

        Raises:
            ValueError: the rows are not those that the sizes say.
        """
        self.calls += 1
        rows = self._replay(pixel_values, grid_thw)
        return self._eager(pixel_values, grid_thw) if rows is None else rows

    def _replay(self, pixel_values: Tensor, grid_thw: Grid) -> Tensor | None:
        """The rows from graphs, or None without graphs for the call."""
        if self.graphs is None:
            return None
        rows = self.graphs(pixel_values, self._frames(pixel_values, grid_thw))
        if rows is None and WEIGHTS_MOVED in self.graphs.stats.fallbacks:
            self.release()  # they stay unusable; capture() makes new ones
        return rows

    def _eager(self, pixel_values: Tensor, grid_thw: Grid) -> Tensor:
        metadata = prepare_encoder_metadata(self._frames(pixel_values, grid_thw), device=self.device)
        rows: Tensor = self.tower(pixel_values, metadata, self.operators())
        return rows

    def _frames(self, pixel_values: Tensor, grid_thw: Grid) -> np.ndarray[Any, np.dtype[np.int64]]:
        frames = split_frames(grid_thw)
        expected = [int(frames[:, 1:].prod(axis=1).sum()), self.tower.config.patch_width]
        if list(pixel_values.shape) != expected:
            raise ValueError(f"pixel values: expected shape {expected}, as the sizes say, got {[*pixel_values.shape]}")
        return frames

    def stats(self) -> dict[str, Any]:
        """``calls``, ``fallbacks`` by reason, and of all graphs ``replays`` and ``graph_fallbacks`` by reason."""
        graph_fallbacks: Counter[str] = Counter()
        for stats in self._graph_stats:
            graph_fallbacks.update(stats.fallbacks)
        return {
            "calls": self.calls,
            "fallbacks": dict(self.fallbacks),
            "replays": sum(stats.replays for stats in self._graph_stats),
            "graph_fallbacks": dict(graph_fallbacks),
        }

    def __getstate__(self) -> dict[str, Any]:
        # a copy has weights of its own, so the graphs are not its graphs
        return {**self.__dict__, "graphs": None}


def share_modules(
    host: nn.Module,
    *,
    num_heads: int,
    scale: float,
    rope_theta: float,
    why_not_linear: Callable[[nn.Module], str | None],
) -> VisionTower:
    """A tower made of the host's linears and norms; arguments and errors as :class:`SharedTower`."""
    embed = _weight(host, "patch_embed.proj")
    config = ErnieVisionConfig(
        depth=len(cast(nn.ModuleList, _find(host, "blocks"))),
        hidden_size=embed.shape[0],
        num_heads=num_heads,
        intermediate_size=_weight(host, "blocks.0.mlp.fc1").shape[0],
        patch_size=_find(host, "patch_embed.patch_size"),
        in_channels=_find(host, "patch_embed.in_channels"),
        rope_theta=rope_theta,
    )
    if scale != config.head_dim**-0.5:
        raise Mismatch(f"attention scale: expected {config.head_dim}^-0.5, got {scale}")
    _check_frequencies(_find(host, "rotary_pos_emb.inv_freq"), config)
    with torch.device("meta"):
        tower = VisionTower(config).eval()
    for owner, leaf, template in _leaves(tower):
        name = f"{owner}.{leaf}".lstrip(".")
        module = _find(host, name)
        if isinstance(template, nn.LayerNorm):
            reason = None if type(module) is nn.LayerNorm else f"expected LayerNorm, got {type(module).__name__}"
        else:
            reason = why_not_linear(module)
        if reason is not None:
            raise Mismatch(f"{name}: {reason}")
        _check_parameters(name, module, template)
        setattr(tower.get_submodule(owner), leaf, module)
    for index in range(config.depth):
        activation = type(_find(host, f"blocks.{index}.mlp.act")).__name__
        if activation not in QUICK_GELU:
            raise Mismatch(f"blocks.{index}.mlp.act: expected {' or '.join(QUICK_GELU)}, got {activation}")
    return tower


def split_frames(grid_thw: Grid) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Each frame for itself, ``[frames, 3]``: attention stays inside a frame, and which frames make a token is the
    resampler's business, that is the host's."""
    items = np.asarray(grid_thw.tolist() if isinstance(grid_thw, Tensor) else grid_thw, np.int64).reshape(-1, 3)
    frames = np.repeat(items, items[:, 0], axis=0)
    frames[:, 0] = 1
    return frames


class _OwnRows(nn.Module):
    """Stands in the resampler's place behind the graphs: the host resamples, and gets rows that are its own."""

    def forward(self, hidden_states: Tensor, *_: Any) -> Tensor:
        return hidden_states.clone()


def _leaves(tower: VisionTower) -> list[tuple[str, str, nn.Module]]:
    """Owner's name, name in it, and module of each linear and norm."""
    named = [(name.rpartition("."), module) for name, module in tower.named_modules() if module._parameters]
    return [(owner, leaf, module) for (owner, _, leaf), module in named]


def _entries(tables: Iterable[dict[str, Any]]) -> Iterator[object]:
    """What the tables of modules hold, one behind the other, and an end."""
    return chain(chain.from_iterable(map(dict.values, tables)), (_END,))


def _find(host: nn.Module, path: str) -> Any:
    value: Any = host
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            raise Mismatch(f"looked for {path} in {type(host).__name__}, found no {name!r}")
    return value


def _weight(host: nn.Module, path: str) -> Tensor:
    weight: Tensor = _find(host, f"{path}.weight")
    if weight.dim() != 2:
        raise Mismatch(f"{path}.weight: expected two dimensions, got shape {list(weight.shape)}")
    return weight


def _check_parameters(name: str, module: nn.Module, template: nn.Module) -> None:
    for leaf in ("weight", "bias"):
        expected, found = getattr(template, leaf), getattr(module, leaf, None)
        shapes = [None if p is None else list(p.shape) for p in (expected, found)]
        if shapes[0] != shapes[1]:
            raise Mismatch(f"{name}.{leaf}: expected shape {shapes[0]}, got {shapes[1]}")


def _check_frequencies(inv_freq: Tensor, config: ErnieVisionConfig) -> None:
    count = config.head_dim // 4
    expected = config.rope_theta ** (-torch.arange(count, dtype=torch.float64) / count)
    # model.to(bfloat16) rounds transformers' frequencies too; ours stay those that the checkpoint was trained with
    tolerance = max(1e-5, torch.finfo(inv_freq.dtype).eps)
    if inv_freq.shape != (count,) or not torch.allclose(inv_freq.double().cpu(), expected, rtol=tolerance, atol=0):
        raise Mismatch(f"rotary_pos_emb.inv_freq: expected {config.rope_theta}^(-i/{count}), got {inv_freq.tolist()}")
