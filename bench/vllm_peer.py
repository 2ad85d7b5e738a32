"""vLLM's own ERNIE-4.5-VL vision tower and resampler with random weights: eager, and through its CUDA-graph manager.

The real classes of vLLM 0.33 without the language model around them, in the caller's process.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ernie_vit import ErnieVisionConfig

# Tokens of its graphs, and images in one of them: its own choice for 4,096 tokens, and room for the mix.
BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096]
MAX_ITEMS = 64


@dataclass(frozen=True)
class VllmEncoder:
    """Attributes:
    version: vLLM's.
    attention: the backend that it chose.
    capture_seconds, capture_bytes: of all its graphs.
    """

    version: str
    attention: str
    capture_seconds: float
    capture_bytes: int
    _model: Any
    _graphs: Any

    def eager(self, pixel_values: Tensor, grid_thw: Tensor) -> Any:
        return self._model.encoder_eager_forward({"pixel_values": pixel_values, "image_grid_thw": grid_thw})

    def graph(self, pixel_values: Tensor, grid_thw: Tensor) -> Any:
        return self._graphs.execute({"pixel_values": pixel_values, "image_grid_thw": grid_thw})


@contextmanager
def vllm_encoder(config: ErnieVisionConfig, dtype: torch.dtype) -> Iterator[VllmEncoder]:
    """Build and capture vLLM's encoder on the current GPU; use it inside the context.

    Raises:
        ImportError: vLLM is not installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    vllm_config = VllmConfig()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config), torch.inference_mode():
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/rendezvous", backend="gloo"
        )
        parallel_state.initialize_model_parallel(1)
        try:
            model = _model(config, dtype)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
            graphs = _capture(model, vllm_config, dtype)
            torch.cuda.synchronize()
            yield VllmEncoder(
                version=vllm.__version__,
                attention=str(model.vision_model.attn_backend),
                capture_seconds=time.perf_counter() - started,
                capture_bytes=free - torch.cuda.mem_get_info()[0],
                _model=model,
                _graphs=graphs,
            )
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _model(config: ErnieVisionConfig, dtype: torch.dtype) -> Any:
    """The class that vLLM's graph manager drives, with nothing but its vision parts."""
    from vllm.model_executor.models import ernie45_vl

    # the fields of the original checkpoint's config that these classes read
    vision = SimpleNamespace(
        patch_size=config.patch_size,
        spatial_merge_size=config.spatial_merge_size,
        in_channels=config.in_channels,
        hidden_size=config.hidden_size,
        embed_dim=config.hidden_size,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.intermediate_size // config.hidden_size,
    )
    whole = SimpleNamespace(
        vision_config=vision,
        pixel_hidden_size=config.hidden_size,
        hidden_size=config.text_hidden_size,
        spatial_conv_size=config.spatial_merge_size,
        temporal_conv_size=config.temporal_merge_size,
        use_temporal_conv=True,
        rms_norm_eps=config.text_norm_eps,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            tower = ernie45_vl.Ernie4_5_VisionTransformer(vision, norm_eps=config.norm_eps, prefix="vision_model")
            resampler = ernie45_vl.VariableResolutionResamplerModel(
                whole.pixel_hidden_size,
                whole.hidden_size,
                whole.spatial_conv_size,
                whole.temporal_conv_size,
                config=whole,
                prefix="resampler_model",
            )
    finally:
        torch.set_default_dtype(default)
    for parameter in (*tower.parameters(), *resampler.parameters()):
        parameter.data.normal_(0, 0.02)
    for module in (*tower.modules(), *resampler.modules()):
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            module.weight.data.fill_(1)
    model = ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration.__new__(ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration)
    nn.Module.__init__(model)
    model.config, model.vision_model, model.resampler_model = whole, tower.eval(), resampler.eval()
    return model


def _capture(model: Any, vllm_config: Any, dtype: torch.dtype, budgets: Sequence[int] = BUDGETS) -> Any:
    from vllm.config import MultiModalConfig
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    compilation = vllm_config.compilation_config
    compilation.encoder_cudagraph_token_budgets = list(budgets)
    compilation.encoder_cudagraph_max_vision_items_per_batch = MAX_ITEMS
    settings = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(), max_model_len=32768),
        parallel_config=vllm_config.parallel_config,
        scheduler_config=vllm_config.scheduler_config,
    )
    graphs = EncoderCudaGraphManager(settings, torch.device("cuda"), dtype, model)
    graphs.capture(torch.cuda.graph_pool_handle())
    return graphs
