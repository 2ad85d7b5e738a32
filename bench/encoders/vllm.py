"""vLLM's own ERNIE-4.5-VL vision tower and resampler: eager, through its CUDA-graph manager, and the tower alone.

The real classes of vLLM 0.33 without the language model around them, in the caller's process.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench.encoders.encoder import Encoder
from bench.plan import Sizes, pixels
from bench.records import Capture
from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder
from ernie_vit.graph.capacity import MIB
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.weights import canonical_name

LIBRARY = "vLLM"
EAGER, GRAPH = "vLLM eager", "vLLM graph"
# Tokens of its graphs, and images in one of them: its own choice for 4,096 tokens, and room for the mix.
BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096]
MAX_ITEMS = 64
SMALL: Sizes = [(1, 16, 16)]


@contextmanager
def open_vllm(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    """vLLM's eager encoder with the parameters of ``weights`` themselves; it opens its graphs.

    Raises:
        ImportError: vLLM is not installed.
    """
    with vllm_world() as vllm_config:
        model = build_model(weights)

        @torch.inference_mode()
        def eager(pixel_values: Tensor, grid_thw: Tensor) -> Any:
            return model.encoder_eager_forward({"pixel_values": pixel_values, "image_grid_thw": grid_thw})

        # as ours are: what a first call loads and compiles is not part of capturing
        eager(pixels(SMALL, device=weights.device, dtype=weights.dtype), torch.tensor(SMALL))
        graphs = {GRAPH: partial(open_graphs, model, vllm_config, weights.dtype)}
        yield Encoder(EAGER, LIBRARY, eager, tower=model.vision_model, graphs=graphs)


@contextmanager
def open_graphs(
    model: Any, vllm_config: Any, dtype: torch.dtype, capacities: Sequence[tuple[int, int]] | None = None
) -> Iterator[Encoder]:
    """Graphs of vLLM's own token budgets, or of ``capacities`` in rows and images."""
    budgets, items = BUDGETS, MAX_ITEMS
    if capacities is not None:
        budgets, items = [rows // 4 for rows, _ in capacities], max(images for _, images in capacities)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
    manager = capture(model, vllm_config, dtype, budgets, items)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    taken = (free - torch.cuda.mem_get_info()[0]) / MIB

    @torch.inference_mode()
    def run(pixel_values: Tensor, grid_thw: Tensor) -> Any:
        return manager.execute({"pixel_values": pixel_values, "image_grid_thw": grid_thw})

    try:
        yield Encoder(GRAPH, LIBRARY, run, videos=False, capture=Capture(GRAPH, len(budgets), seconds, taken))
    finally:
        manager.budget_graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def open_tower(weights: VisionTower) -> Iterator[Any]:
    """vLLM's vision tower by itself, with the parameters of ``weights`` themselves.

    Raises:
        ImportError: vLLM is not installed.
    """
    with vllm_world():
        yield build_tower(weights)


def fixed_sizes(tower: Any, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    """vLLM's tower for pixel rows of these sizes alone, ``[rows, patch_width]`` to ``[rows, hidden_size]``.

    Its first call makes on the host what follows from the sizes, as vLLM's graph manager does before a replay: rotary
    angles, offsets, and the longest sequence in a tensor of the CPU. The later ones can be captured.
    """

    @cache
    def metadata() -> dict[str, Tensor]:
        prepared: dict[str, Tensor] = tower.prepare_encoder_metadata([list(size) for size in sizes])
        return prepared

    def run(pixel_values: Tensor) -> Tensor:
        out: Tensor = tower(pixel_values, encoder_metadata=metadata())
        return out

    return run


@contextmanager
def vllm_world() -> Iterator[Any]:
    """A process group of one and a current ``VllmConfig``, which vLLM's layers want while they are built and run.

    Raises:
        ImportError: vLLM is not installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    vllm_config = VllmConfig()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/rendezvous", backend="gloo"
        )
        parallel_state.initialize_model_parallel(1)
        try:
            yield vllm_config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def build_model(weights: ErnieVisionEncoder) -> Any:
    """The class that vLLM's graph manager drives, with nothing but its vision parts, which share ``weights``."""
    from vllm.model_executor.models import ernie45_vl

    config = original_config(weights.config)
    cls = ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration
    model: Any = cls.__new__(cls)
    nn.Module.__init__(model)
    model.config = config
    with made_like(weights.vision_tower):
        model.vision_model = make_tower(weights.config)
        model.resampler_model = ernie45_vl.VariableResolutionResamplerModel(
            config.pixel_hidden_size,
            config.hidden_size,
            config.spatial_conv_size,
            config.temporal_conv_size,
            config=config,
            prefix="resampler_model",
        )
    return share(weights, model, spelling=canonical_name)


def build_tower(weights: VisionTower) -> Any:
    """Its vision tower alone, which shares ``weights``."""
    with made_like(weights):
        tower = make_tower(weights.config)
    return share(weights, tower)


def make_tower(config: ErnieVisionConfig) -> Any:
    from vllm.model_executor.models.ernie45_vl import Ernie4_5_VisionTransformer

    vision = original_config(config).vision_config
    return Ernie4_5_VisionTransformer(vision, norm_eps=config.norm_eps, prefix="vision_model")


@contextmanager
def made_like(weights: VisionTower) -> Iterator[None]:
    """New parameters have the dtype and the device of these: vLLM's classes ask PyTorch for both."""
    like, default = weights.patch_embed.proj.weight, torch.get_default_dtype()
    torch.set_default_dtype(like.dtype)
    try:
        with like.device:
            yield
    finally:
        torch.set_default_dtype(default)


def share(weights: nn.Module, made: Any, *, spelling: Callable[[str], str] = str) -> Any:
    """``made``, of vLLM, with the parameters of ``weights`` themselves and ready to run.

    Args:
        spelling: our name of a parameter of ``made``.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    state = weights.state_dict()
    for name, parameter in made.named_parameters():
        ours = state.pop(spelling(name))
        if ours.shape != parameter.shape:
            raise ValueError(f"{name}: expected shape {list(ours.shape)}, got {list(parameter.shape)}")
        parameter.data = ours
    if state:
        raise ValueError(f"vLLM's model: expected a parameter for each of ours, got none for {sorted(state)}")
    for module in made.modules():  # the model loader's step after loading
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
            module.quant_method.process_weights_after_loading(module)
    return made.eval().requires_grad_(False)


def original_config(config: ErnieVisionConfig) -> Any:
    """The fields of the original checkpoint's config that vLLM's classes read."""
    vision = SimpleNamespace(
        patch_size=config.patch_size,
        spatial_merge_size=config.spatial_merge_size,
        in_channels=config.in_channels,
        hidden_size=config.hidden_size,
        embed_dim=config.hidden_size,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
    )
    return SimpleNamespace(
        vision_config=vision,
        pixel_hidden_size=config.hidden_size,
        hidden_size=config.text_hidden_size,
        spatial_conv_size=config.spatial_merge_size,
        temporal_conv_size=config.temporal_merge_size,
        use_temporal_conv=True,
        rms_norm_eps=config.text_norm_eps,
    )


@torch.inference_mode()
def capture(
    model: Any, vllm_config: Any, dtype: torch.dtype, budgets: Sequence[int] = BUDGETS, items: int = MAX_ITEMS
) -> Any:
    """vLLM's ``EncoderCudaGraphManager`` for a model, with a graph for each budget of tokens and ``items`` images."""
    from vllm.config import MultiModalConfig
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    compilation = vllm_config.compilation_config
    compilation.encoder_cudagraph_token_budgets = list(budgets)
    compilation.encoder_cudagraph_max_vision_items_per_batch = items
    settings = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(), max_model_len=32768),
        parallel_config=vllm_config.parallel_config,
        scheduler_config=vllm_config.scheduler_config,
    )
    manager = EncoderCudaGraphManager(settings, torch.device("cuda"), dtype, model)
    # vLLM captures on what it takes for the current stream: the one that was set last, be it the default one
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        manager.capture(torch.cuda.graph_pool_handle())
    return manager
