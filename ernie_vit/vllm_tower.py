"""Our tower behind one loaded vLLM model: whether it computes, its graphs, and data parallelism over ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ernie_vit
from ernie_vit.encoder import choose_backend
from ernie_vit.graph.capacity import LARGEST_IMAGE_TOKENS, MIB
from ernie_vit.model.operators import Backend
from ernie_vit.shared_tower import Mismatch, SharedTower
from ernie_vit.vllm_plugin import logger, vllm_version

ROPE_THETA = 10000.0  # vLLM's default, which it never overrides; its frequencies are checked against it
UNLIMITED_MB = 1 << 30
LINEARS = ("Linear", "QKVParallelLinear", "ColumnParallelLinear", "RowParallelLinear")


class Vision:
    """Whether our tower computes the images of one loaded model, and the tower.

    Decided at the first call, when weights are loaded and adapters in place: vLLM's memory profiling makes it, so the
    graphs captured then are taken off the KV cache. They are captured again when weights have moved.

    Args:
        host: vLLM's tower.
        vllm_config: vLLM's ``VllmConfig``.
        manager_captures: vLLM's own graph manager may capture our tower.
        backend: as in :class:`ErnieVisionEncoder`; "auto" leaves the tower to vLLM where Triton does not run.

    Attributes:
        data_parallel: each rank computes its own images (``mm_encoder_tp_mode="data"``).
        replays: batches that vLLM's graph manager prepared for a replay of our tower.
    """

    def __init__(
        self,
        host: nn.Module,
        vllm_config: Any,
        *,
        manager_captures: bool,
        backend: Literal["auto"] | Backend = "auto",
    ) -> None:
        from vllm.distributed import get_pp_group

        self._host, self._backend = host, backend
        self.data_parallel = is_data_parallel(vllm_config)
        self.replays = 0
        self._decided = False
        self._shared: SharedTower | None = None
        self._had_graphs = False
        model = vllm_config.model_config
        limits = (vllm_config.scheduler_config.max_num_batched_tokens, model.max_model_len)
        self._max_tokens = min(*limits, LARGEST_IMAGE_TOKENS)
        in_manager = manager_captures and vllm_config.compilation_config.cudagraph_mm_encoder
        self._why_no_graphs: str | None = None
        if model.enforce_eager:
            self._why_no_graphs = "none (enforce_eager)"
        elif in_manager:
            self._why_no_graphs = "vLLM's (cudagraph_mm_encoder)"
        elif model.multimodal_config.skip_mm_profiling:
            self._why_no_graphs = "none (skip_mm_profiling: vLLM would not account for their memory)"
        elif not get_pp_group().is_first_rank:
            self._why_no_graphs = "none (a later pipeline stage, which gets no images)"
        # the first call comes from vLLM's profiling and can take its time, where graphs ask for a quick server
        profiled = not (model.enforce_eager or model.multimodal_config.skip_mm_profiling)
        self._warms_up = profiled and (self._why_no_graphs is None or in_manager)

    def shared(self) -> SharedTower | None:
        """Our tower, or None if vLLM's computes."""
        if not self._decided:
            self._decided = True
            try:
                self._shared = self._share()
            except (AttributeError, Mismatch) as error:
                logger.warning("ernie-vit: vLLM %s computes its own vision tower: %s", vllm_version(), error)
        return self._shared

    def check_use(self) -> None:
        """Call after an image was encoded: warns, once, if vLLM never asked for the tower."""
        if not self._decided:
            self._decided = True
            logger.warning(
                "ernie-vit: vLLM %s computes its own vision tower: looked for a call of _vision_forward, none came",
                vllm_version(),
            )

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`ernie_vit.vllm_plugin.stats`."""
        none: dict[str, Any] = {"calls": 0, "fallbacks": {}, "replays": 0, "graph_fallbacks": {}}
        counters = self._shared.stats() if self._shared else none
        return {**counters, "replays": counters["replays"] + self.replays}

    def encode(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor | None:
        """The tower's rows, or None if vLLM's tower must compute them.

        In data parallelism every rank calls with the same items, computes its own share and gets all rows.
        """
        shared = self.shared()
        if shared is None:
            return None
        if self._warms_up:
            self._warms_up = False
            shared.warm_up(above=4 * self._max_tokens)  # what no graph holds: vLLM reports kernels compiled later
        if self._had_graphs and shared.graphs is None and shared.obstacle(pixel_values) is None:
            logger.info("ernie-vit: the vision tower's weights have moved; graphs: %s", self._capture(shared))
        if not self.data_parallel:
            return shared.encode(pixel_values, grid_thw)
        obstacle = shared.obstacle(pixel_values)  # the same on every rank, so none waits for another in vain
        if obstacle is not None:
            shared.fallbacks[obstacle] += 1
            return None
        from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model

        rows = run_dp_sharded_mrope_vision_model(_Rows(shared), pixel_values, grid_thw.tolist(), rope_type="rope_3d")
        return torch.cat(rows)

    def _share(self) -> SharedTower:
        host: Any = self._host
        attention = host.blocks[0].attn
        if attention.tp_size != 1:
            raise Mismatch(f"it is sharded over {attention.tp_size} ranks; --mm-encoder-tp-mode data keeps it whole")
        if getattr(attention.attn, "fp8_enabled", False):
            raise Mismatch("its attention is quantised (mm_encoder_attn_dtype)")
        shared = SharedTower(
            host,
            num_heads=attention.num_attention_heads_per_partition,
            scale=attention.attn.scale,
            rope_theta=ROPE_THETA,
            why_not_linear=_why_not_linear,
            backend=self._backend,
        )
        weight = host.patch_embed.proj.weight
        with torch.no_grad():  # whether a gradient is needed is asked at every call, not for all of them at the first
            obstacle = shared.obstacle(weight.new_empty(0, weight.shape[1]))
        if obstacle is not None:
            raise Mismatch(obstacle)
        backend = choose_backend(self._backend, weight.device, weight.dtype)[0]
        dtype = str(weight.dtype).removeprefix("torch.")
        graphs = self._why_no_graphs or self._capture(shared)
        logger.info(
            "ernie-vit %s computes the vision tower: %s, %s, %s; graphs: %s",
            *(ernie_vit.__version__, backend, weight.device, dtype, graphs),
        )
        return shared

    def _capture(self, shared: SharedTower) -> str:
        """Capture, and say what came of it."""
        try:
            with large_blocks_are_split():
                shared.capture(max_tokens=self._max_tokens)
        except (ValueError, torch.OutOfMemoryError) as error:  # not on a CUDA GPU, or it is full
            return f"none ({error})"
        finally:
            self._had_graphs = shared.graphs is not None
        return f"up to {self._max_tokens} tokens, {shared.graph_bytes // MIB} MiB"


class _Rows:
    """What vLLM's data-parallel helper wants of a tower. No patches are merged: vLLM's resampler does that."""

    spatial_merge_size = 1

    def __init__(self, shared: SharedTower) -> None:
        self._shared = shared
        self.out_hidden_size = shared.tower.config.hidden_size
        self.parameters = shared.tower.parameters

    def __call__(self, pixel_values: Tensor, grid_thw: list[list[int]]) -> Tensor:
        return self._shared(pixel_values, grid_thw)


@contextmanager
def large_blocks_are_split() -> Iterator[None]:
    """PyTorch's allocator may split blocks of any size in here.

    vLLM profiles under ``max_split_size_mb:20``, so that blocks above stay releasable. The graphs' memory is never
    released, and the smaller graphs live in the blocks of the largest: unsplit they took twice as much.
    """
    settings = _allocator_settings()
    if "max_split_size_mb" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{settings},max_split_size_mb:{UNLIMITED_MB}")  # the last one counts
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    get_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get_settings is not None:
        return str(get_settings())
    # PyTorch before 2.13 has them in a snapshot, which other allocators than its own cannot take
    if not torch.cuda.is_available() or torch.cuda.memory.get_allocator_backend() != "native":
        return ""
    return str(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


def is_data_parallel(vllm_config: Any) -> bool:
    """Whether each rank of a tensor-parallel group encodes its own images."""
    mode = vllm_config.model_config.multimodal_config.mm_encoder_tp_mode
    return bool(mode == "data" and vllm_config.parallel_config.tensor_parallel_size > 1)


@contextmanager
def whole_on_every_rank(module: ModuleType) -> Iterator[None]:
    """Tower and resampler built in here are whole: their layers see a tensor-parallel group of one.

    Args:
        module: vLLM's ``ernie45_vl``.
    """
    from vllm.distributed import parallel_state

    def alone(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @wraps(build)
        def build_alone(*args: Any, **kwargs: Any) -> nn.Module:
            group, parallel_state._TP = parallel_state._TP, SimpleNamespace(world_size=1, rank_in_group=0)
            try:
                return build(*args, **kwargs)
            finally:
                parallel_state._TP = group

        return build_alone

    names = ("Ernie4_5_VisionTransformer", "VariableResolutionResamplerModel")
    classes = {name: getattr(module, name) for name in names}
    try:
        for name, build in classes.items():
            setattr(module, name, alone(build))
        yield
    finally:
        for name, build in classes.items():
            setattr(module, name, build)


def _why_not_linear(module: nn.Module) -> str | None:
    """LoRA wraps a linear in a class of its own, quantisation gives it another method."""
    name = type(module).__name__
    method = type(getattr(module, "quant_method", None)).__name__
    if name not in LINEARS:
        return f"expected a plain linear, got {name}"
    return None if method in ("NoneType", "UnquantizedLinearMethod") else f"it is quantised ({method})"
