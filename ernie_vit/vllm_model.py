"""vLLM's ERNIE-4.5-VL with our vision tower.

``with_our_tower`` derives a class from vLLM's own. Parameters, weight loading, processors, resampler and language model
are vLLM's, and the tower's linears and norms too: our tower computes with them. What differs is where vLLM calls its
tower: ``_vision_forward``, and the methods of ``SupportsEncoderCudaGraph`` for vLLM's graph manager. When our tower
cannot compute (quantised or adapted linears, a tower sharded over ranks, an unsupported GPU or dtype), every method is
vLLM's, and one line in the log says why.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ernie_vit.model.metadata import EncoderMetadata, prepare_encoder_metadata
from ernie_vit.model.operators import Backend
from ernie_vit.shared_tower import Mismatch, split_frames
from ernie_vit.vllm_tower import Vision, is_data_parallel, whole_on_every_rank

# A frame counts at least so much against a graph's token budget, so that room for budget / 16 frames is always enough,
# however small they are. 16 tokens are a frame of 8x8 patches.
FRAME_TOKENS = 16
HOOKS = ("_vision_forward", "embed_multimodal")
PROTOCOL = (
    "get_encoder_cudagraph_config",
    "get_encoder_cudagraph_item_specs",
    "select_encoder_cudagraph_items",
    "prepare_encoder_cudagraph_capture_inputs",
    "prepare_encoder_cudagraph_replay_buffers",
    "encoder_cudagraph_forward",
    "encoder_eager_forward",
    "postprocess_encoder_output",
)


def with_our_tower(stock: type[nn.Module]) -> type[nn.Module]:
    """vLLM's class ``stock`` with our tower.

    Raises:
        Mismatch: ``stock`` lacks what we hook into, or it takes other arguments.
    """
    protocol = hasattr(stock, PROTOCOL[0])  # since vLLM 0.28
    ours = OurTowerInVllmGraphs if protocol else OurTower
    hooks = (*HOOKS, *PROTOCOL) if protocol else HOOKS
    where = f"{stock.__module__}.{stock.__name__}"
    missing = [name for name in hooks if not hasattr(stock, name)]
    if missing:
        raise Mismatch(f"looked for {', '.join(missing)} in {where}")
    for name in hooks:
        parameters = signature(getattr(ours, name)).parameters.values()
        expected = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        found = list(signature(getattr(stock, name)).parameters)
        if found[: len(expected)] != expected:
            raise Mismatch(f"looked for {name}({', '.join(expected)}) in {where}, found ({', '.join(found)})")
    return type(stock.__name__, (ours, stock), {"__module__": __name__, "stock": stock})


class OurTower:
    """In front of vLLM's class, whatever its version."""

    stock: type[nn.Module]
    manager_captures = False
    config: Any
    vision_model: Any
    resampler_model: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        module = sys.modules[self.stock.__module__]
        with whole_on_every_rank(module) if is_data_parallel(vllm_config) else nullcontext():
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.attach(vllm_config)

    def attach(self, vllm_config: Any, *, backend: Literal["auto"] | Backend = "auto") -> None:
        """Put our tower in front of ``self.vision_model``."""
        self.ernie_vit = Vision(self.vision_model, vllm_config, manager_captures=self.manager_captures, backend=backend)

    def _vision_forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        rows = self.ernie_vit.encode(pixel_values, grid_thw)
        if rows is None:
            rows = super()._vision_forward(pixel_values, grid_thw)  # type: ignore[misc]
        return rows

    def embed_multimodal(self, **kwargs: Any) -> Any:
        embeddings = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        if embeddings:
            self.ernie_vit.check_use()
        return embeddings


class OurTowerInVllmGraphs(OurTower):
    """Our tower as vLLM's ``EncoderCudaGraphManager`` captures and replays it, for images and videos.

    A graph for a budget of tokens has ``4 * budget`` rows; how many are live is data in its buffers, so that the rest
    is not computed (the tiles' shape still follows the budget). The resampler runs eagerly on the live rows. A video
    counts a token for each 4 rows against the budget, though it has one for each 8.
    """

    manager_captures = True

    def get_encoder_cudagraph_config(self) -> Any:
        config = super().get_encoder_cudagraph_config()  # type: ignore[misc]
        if self.ernie_vit.shared() is None:
            return config
        return replace(
            config,
            modalities=["image", "video"],
            buffer_keys=["pixel_values", "num_rows", "cu_seqlens", "frame_sizes"],
            # rows past the live ones are never read; frame_sizes are padded with zeros, vLLM's way
            padding_logics={"pixel_values": _copy_live, "cu_seqlens": _copy_repeating_last},
        )

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        if self.ernie_vit.shared() is None:
            return super().get_encoder_cudagraph_item_specs(mm_kwargs)  # type: ignore[misc,no-any-return]
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderItemSpec

        _, grid_thw = _items(mm_kwargs)
        return [
            EncoderItemSpec(
                input_size=t * h * w,
                output_tokens=max(t // 2, 1) * h * w // 4,
                path_output_tokens={"default": max(t * h * w // 4, FRAME_TOKENS * t)},
            )
            for t, h, w in grid_thw.tolist()
        ]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        pixel_values, grid_thw = _items(mm_kwargs)
        as_images = {"pixel_values": pixel_values, "image_grid_thw": grid_thw}
        selected: dict[str, Any] = super().select_encoder_cudagraph_items(as_images, indices)  # type: ignore[misc]
        return selected

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.ernie_vit.shared() is None:
            return super().prepare_encoder_cudagraph_capture_inputs(  # type: ignore[misc]
                token_budget, max_batch_size, max_frames_per_batch, device, dtype, *args, **kwargs
            )
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphCaptureInputs

        frames = max(token_budget // FRAME_TOKENS, 1)
        values = {
            "pixel_values": torch.zeros(4 * token_budget, self._patch_width(), device=device, dtype=dtype),
            "num_rows": torch.zeros(1, device=device, dtype=torch.int32),
            "cu_seqlens": torch.zeros(frames + 1, device=device, dtype=torch.int32),
            "frame_sizes": torch.zeros(frames, 2, device=device, dtype=torch.int32),
        }
        return EncoderCudaGraphCaptureInputs(values=values)

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.ernie_vit.shared() is None:
            return super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, *args, **kwargs)  # type: ignore[misc]
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphReplayBuffers

        self.ernie_vit.replays += 1
        pixel_values, grid_thw = _items(mm_kwargs)
        metadata = prepare_encoder_metadata(split_frames(grid_thw), device=pixel_values.device)
        values = {
            "pixel_values": pixel_values,
            "num_rows": metadata.num_rows,
            "cu_seqlens": metadata.cu_seqlens,
            "frame_sizes": metadata.frame_sizes,
        }
        return EncoderCudaGraphReplayBuffers(values=values)

    def encoder_cudagraph_forward(self, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        shared = self.ernie_vit.shared()
        if shared is None:
            return super().encoder_cudagraph_forward(values, *args, **kwargs)  # type: ignore[misc,no-any-return]
        pixel_values, cu_seqlens = values["pixel_values"], values["cu_seqlens"]
        metadata = EncoderMetadata(
            num_rows=values["num_rows"],
            cu_seqlens=cu_seqlens,
            frame_sizes=values["frame_sizes"],
            temporal_rows=cu_seqlens.new_empty(0, 2),  # the resampler's, which is vLLM's
            live_counts=cu_seqlens.new_empty(0),  # too
            max_seqlen=pixel_values.shape[0],
            cu_seqlens_host=cu_seqlens,  # read on a CPU only, where it is the same memory
            grid_thw=(),
        )
        rows: Tensor = shared.tower(pixel_values, metadata, shared.operators())
        return rows

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The tower's rows of what no graph holds; :meth:`postprocess_encoder_output` resamples them as a graph's."""
        shared = self.ernie_vit.shared()
        if shared is None:
            return super().encoder_eager_forward(mm_kwargs, *args, **kwargs)  # type: ignore[misc,no-any-return]
        return shared(*_items(mm_kwargs))

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if self.ernie_vit.shared() is None:
            super().postprocess_encoder_output(  # type: ignore[misc]
                outputs, indices, per_item_out_tokens, dest, clone, batch_mm_kwargs
            )
            return
        from vllm.model_executor.models.utils import scatter_output_slices

        assert batch_mm_kwargs is not None
        pixel_values, grid_thw = _items(batch_mm_kwargs)
        # the grid stays on the host, where vLLM's resampler reads it
        tokens = self.resampler_model(outputs["default"][: len(pixel_values)], grid_thw.cpu())
        scatter_output_slices(tokens, indices, per_item_out_tokens, dest, clone)

    def _patch_width(self) -> int:
        width: int = self.vision_model.patch_embed.proj.weight.shape[1]
        return width


def _items(mm_kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Pixel rows and sizes of images, or of videos: vLLM batches each kind for itself."""
    if "pixel_values_videos" in mm_kwargs:
        return mm_kwargs["pixel_values_videos"], mm_kwargs["video_grid_thw"]
    return mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"]


def _copy_live(buffer: Tensor, source: Tensor) -> None:
    buffer[: len(source)].copy_(source)


def _copy_repeating_last(buffer: Tensor, source: Tensor) -> None:
    buffer[: len(source)].copy_(source)
    buffer[len(source) :].copy_(source[-1].expand(len(buffer) - len(source)))
