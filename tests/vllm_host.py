"""The real vLLM on a CPU, without its extensions: its ERNIE-4.5-VL tower and resampler, and its graph manager.

vLLM's wheels are CUDA builds. Their Python runs beside a CPU build of PyTorch all the same, if vLLM takes itself for a
CPU build and finds the one operator that it looks up when a layer is built.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from reference import SMALL, small_model
from torch import Tensor, nn

HAVE_VLLM = find_spec("vllm") is not None
ARCHITECTURE = "Ernie4_5_VLMoeForConditionalGeneration"
# vLLM hands the text model's eps to the blocks' norms and 1e-6 to the last one; this one cannot be confused with it.
BLOCK_EPS = 0.1


def pretend_cpu_build() -> None:
    """Call before vLLM is imported. Releases before 0.28 look for "cpu" in the version, later ones at a variable."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    real = metadata.version
    metadata.version = lambda name: real(name) + ("+cpu" if name == "vllm" else "")
    if not hasattr(torch.ops._C, "gelu_quick"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("gelu_quick(Tensor! out, Tensor input) -> ()")
        pretend_cpu_build.library = library  # type: ignore[attr-defined]  # undefined again when it is collected


@contextmanager
def vllm_world(folder: Path, rank: int = 0, size: int = 1) -> Iterator[Any]:
    """A tensor-parallel group and a current ``VllmConfig``: what vLLM's layers need when they are built.

    Args:
        folder: where ``size`` processes meet.
        rank: this process's among them.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    config = VllmConfig()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=size,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{folder}/rendezvous",
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(size)
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def checkpoint_config() -> Any:
    """What vLLM's classes read of the original checkpoint's config, at the size of ``reference.SMALL``."""
    vision = SimpleNamespace(
        patch_size=SMALL.patch_size,
        spatial_merge_size=2,
        in_channels=SMALL.in_channels,
        hidden_size=SMALL.hidden_size,
        embed_dim=SMALL.hidden_size,
        depth=SMALL.depth,
        num_heads=SMALL.num_heads,
        mlp_ratio=SMALL.intermediate_size // SMALL.hidden_size,
    )
    return SimpleNamespace(
        vision_config=vision,
        pixel_hidden_size=SMALL.hidden_size,
        hidden_size=SMALL.text_hidden_size,
        spatial_conv_size=2,
        temporal_conv_size=2,
        use_temporal_conv=True,
        rms_norm_eps=BLOCK_EPS,
    )


def engine_config(**overrides: Any) -> Any:
    """The parts of a ``VllmConfig`` that the plugin reads."""
    values = {
        "enforce_eager": False,
        "cudagraph_mm_encoder": False,
        "skip_mm_profiling": False,
        "mm_encoder_tp_mode": "weights",
        "tensor_parallel_size": 1,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        **overrides,
    }
    multimodal = SimpleNamespace(**_pick(values, "skip_mm_profiling", "mm_encoder_tp_mode"))
    model = SimpleNamespace(**_pick(values, "enforce_eager", "max_model_len"), multimodal_config=multimodal)
    return SimpleNamespace(
        model_config=model,
        compilation_config=SimpleNamespace(**_pick(values, "cudagraph_mm_encoder")),
        scheduler_config=SimpleNamespace(**_pick(values, "max_num_batched_tokens")),
        parallel_config=SimpleNamespace(**_pick(values, "tensor_parallel_size")),
    )


def build_model(cls: type[nn.Module]) -> Any:
    """An instance of vLLM's model class, without its language model of 28 billion parameters."""
    model: Any = cls.__new__(cls)
    fill_model(model)
    return model


def fill_model(model: Any) -> None:
    """Build tower and resampler, and load them under the checkpoint's names."""
    from vllm.model_executor.models import ernie45_vl

    config = checkpoint_config()
    nn.Module.__init__(model)
    model.config = config
    model.vision_model = ernie45_vl.Ernie4_5_VisionTransformer(
        config.vision_config, norm_eps=BLOCK_EPS, prefix="vision_model"
    )
    model.language_model = nn.Identity()
    model.resampler_model = ernie45_vl.VariableResolutionResamplerModel(
        config.pixel_hidden_size, config.hidden_size, 2, 2, config=config, prefix="resampler_model"
    )
    load(model, checkpoint())
    model.eval().requires_grad_(False)


def checkpoint() -> Iterator[tuple[str, Tensor]]:
    """Random vision tensors under the original checkpoint's names."""
    source = small_model().model
    for name, tensor in source.vision_tower.state_dict().items():
        yield f"vision_model.{name}", tensor
    for name, tensor in source.resampler_model.state_dict().items():
        for ours, original in (("fc1", "0"), ("fc2", "2"), ("ln", "3")):
            name = name.replace(f"_linear.{ours}.", f"_linear.{original}.")
        yield f"model.resampler_model.{name}", tensor


def load(model: Any, named: Iterator[tuple[str, Tensor]]) -> None:
    """As the class's ``load_weights``, which wants the language model too: through vLLM's own mapper."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    mapped = list(type(model).hf_to_vllm_mapper.apply(named))
    for part in ("vision_model", "resampler_model"):
        module = getattr(model, part)
        mine = [(name.removeprefix(f"{part}."), tensor) for name, tensor in mapped if name.startswith(f"{part}.")]
        assert module.load_weights(mine) == dict(module.named_parameters()).keys()
    for module in model.modules():  # the model loader's step after loading
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
            module.quant_method.process_weights_after_loading(module)


def graph_manager(model: Any, config: Any, budgets: list[int], max_items: int, *, ranks: int = 1) -> Any:
    """vLLM's real ``EncoderCudaGraphManager``.

    Only its capture is replaced: a replay runs the forward pass again on the captured buffers, whose rows past the live
    ones are poisoned before.
    """
    from vllm.config import MultiModalConfig
    from vllm.v1.worker import encoder_cudagraph

    class CpuManager(encoder_cudagraph.EncoderCudaGraphManager):  # type: ignore[misc,name-defined]
        def _capture_budget_graph(self, token_budget: int, path: str = "default", axis_keys: Any = ()) -> None:
            axes = (axis_keys,) if axis_keys else ()
            values = self.model.prepare_encoder_cudagraph_capture_inputs(
                token_budget, self.max_batch_size, self.max_frames_per_batch, self.device, self.dtype, path, *axes
            ).values
            output = torch.empty_like(self.model.encoder_cudagraph_forward({**values}, path=path))
            self._get_graph_set(path)[token_budget] = encoder_cudagraph.BudgetGraphMetadata(
                token_budget=token_budget,
                max_batch_size=self.max_batch_size,
                max_frames_per_batch=self.max_frames_per_batch,
                graph=SimpleNamespace(replay=_replay(self.model, values, output)),
                input_buffers=values,
                output_buffer=output,
            )

    compilation = config.compilation_config
    compilation.encoder_cudagraph_token_budgets = budgets
    compilation.encoder_cudagraph_max_vision_items_per_batch = max_items
    multimodal = MultiModalConfig(mm_encoder_tp_mode="data" if ranks > 1 else "weights")
    namespace = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(multimodal_config=multimodal, max_model_len=4096),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        scheduler_config=config.scheduler_config,
    )
    manager = CpuManager(namespace, torch.device("cpu"), torch.float32, model)
    manager.capture(graph_pool=None)
    return manager


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What the plugin logs; vLLM's loggers do not propagate to pytest's."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.ernie_vit")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _replay(model: Any, values: dict[str, Tensor], output: Tensor) -> Callable[[], None]:
    def replay() -> None:
        values["pixel_values"][int(values["num_rows"]) :] = torch.nan
        output.fill_(torch.nan)
        output.copy_(model.encoder_cudagraph_forward({**values}))

    return replay


def _pick(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}
