"""The encoder: images in, image tokens out."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.capture import capture_graphs
from ernie_vit.graph.runner import GraphRunner
from ernie_vit.graph.stats import GraphStats
from ernie_vit.kernels.dispatch import why_not_triton
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.metadata import EncoderMetadata, Grid, item_sizes, prepare_encoder_metadata, tokens_per_item
from ernie_vit.model.operators import TOWER_STAGES, Backend, Operators, choose_operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.warm_up import warm_up, warm_up_resampler

if TYPE_CHECKING:
    from ernie_vit.model.images import ImageLike

INIT_STD = 0.02  # transformers' initializer_range of this model


def choose_backend(backend: Literal["auto"] | Backend, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The backend that computes on ``device`` at ``dtype``, and why.

    Raises:
        ValueError: ``backend="triton"`` was asked for and cannot run there, or the name is unknown.
    """
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend: expected 'auto', 'triton' or 'torch', got {backend!r}")
    if backend == "torch":
        return "torch", "asked for"
    obstacle = why_not_triton(device)
    if obstacle is None and dtype not in (torch.bfloat16, torch.float16, torch.float32):
        obstacle = f"the kernels take bfloat16, float16 and float32, not {dtype}"
    if backend == "triton":
        if obstacle is not None:
            raise ValueError(f"backend: 'triton' cannot run here: {obstacle}")
        return "triton", "asked for"
    if obstacle is None and device.type == "cpu":
        obstacle = "the device is a CPU"
    return ("triton", f"the kernels run on {device}") if obstacle is None else ("torch", obstacle)


class ErnieVisionEncoder(nn.Module):
    """ERNIE-4.5-VL's vision tower and resampler.

    ``state_dict()`` has the keys and shapes of transformers' ``Ernie4_5_VLMoeModel`` under ``vision_tower.`` and
    ``resampler_model.``. A new encoder is for inference: its parameters ask for no gradient and it is in eval mode. To
    train, use ``backend="torch"`` and ``requires_grad_()``.

    Args:
        config: sizes; default: the model's own.
        backend: of the tower: "triton", "torch", or "auto": Triton on a GPU that its kernels run on, else PyTorch.
        stages: for single stages of the tower ("attention", "rotary", "mlp", "norm", "linear") another backend than the
            rest, to find a fault by halves; "resampler", which is plain PyTorch otherwise, can be taken from Triton.
    """

    def __init__(
        self,
        config: ErnieVisionConfig | None = None,
        *,
        backend: Literal["auto"] | Backend = "auto",
        stages: dict[str, Backend] | None = None,
    ) -> None:
        super().__init__()
        self.config = config or ErnieVisionConfig()
        self.vision_tower = VisionTower(self.config)
        self.resampler_model = Resampler(self.config)
        self._graphs: GraphRunner | None = None
        self.set_backend(backend, stages)
        self.requires_grad_(False).eval()

    @classmethod
    def from_config(
        cls,
        config: ErnieVisionConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Literal["auto"] | Backend = "auto",
    ) -> "ErnieVisionEncoder":
        """Random weights, the same for a seed on every device: normal of std 0.02, norms 1, biases 0.

        ``device`` defaults to the GPU where there is one, ``dtype`` to bfloat16 there and float32 on a CPU.
        """
        device, dtype = _defaults(device, dtype)
        encoder = cls._empty(config, device, dtype, backend)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in encoder.named_parameters():
                if parameter.dim() > 1:
                    drawn = torch.empty(parameter.shape).normal_(0, INIT_STD, generator=generator)
                    parameter.copy_(drawn)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return encoder

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Literal["auto"] | Backend = "auto",
    ) -> "ErnieVisionEncoder":
        """A checkpoint's weights: of a folder, or of a hub, from which only the shards with vision tensors are loaded.

        Takes the spellings of the original checkpoint, of transformers and of vLLM. ``device`` and ``dtype`` default as
        in :meth:`from_config`.

        Raises:
            FileNotFoundError: there is no config or no weights file.
            ValueError: vision tensors are missing, unknown or of another shape; all are named.
        """
        from ernie_vit.model.weights import read_config, read_vision_weights

        device, dtype = _defaults(device, dtype)
        config = read_config(path_or_hub_id)
        encoder = cls._empty(config, device, dtype, backend)
        weights = read_vision_weights(path_or_hub_id, config, dtype=dtype, device=device)
        encoder.load_state_dict(weights, assign=True)
        return encoder.requires_grad_(False)

    @classmethod
    def from_transformers(
        cls, model: nn.Module, *, backend: Literal["auto"] | Backend = "auto"
    ) -> "ErnieVisionEncoder":
        """Share the parameters of a loaded ``Ernie4_5_VLMoeForConditionalGeneration`` (or its ``.model``), no copy.

        Raises:
            ValueError: ``model`` has no ``vision_tower`` and ``resampler_model``.
        """
        inner = getattr(model, "model", model)
        parts = [name for name in ("vision_tower", "resampler_model") if not hasattr(inner, name)]
        if parts:
            raise ValueError(f"model: expected transformers' ERNIE-4.5-VL, got {type(model).__name__} without {parts}")
        model_config: Any = inner.config
        with torch.device("meta"):
            encoder = cls(ErnieVisionConfig.from_dict(model_config.to_dict()), backend=backend)
        for name in dict(encoder.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(encoder.get_submodule(owner), leaf, inner.get_parameter(name))
        return encoder.train(inner.training)

    @classmethod
    def _empty(
        cls,
        config: ErnieVisionConfig | None,
        device: torch.device,
        dtype: torch.dtype,
        backend: Literal["auto"] | Backend,
    ) -> "ErnieVisionEncoder":
        """Parameters of undefined content; a backend that cannot run there is refused before they take memory."""
        choose_backend(backend, device, dtype)
        with torch.device("meta"):
            encoder = cls(config, backend=backend)
        return encoder.to(dtype).to_empty(device=device)

    def set_backend(
        self, backend: Literal["auto"] | Backend = "auto", stages: dict[str, Backend] | None = None
    ) -> None:
        """Choose what computes the tower; arguments as in the class."""
        choose_operators("torch" if backend == "auto" else backend, stages)  # refuses unknown names at once
        self.release()
        self._backend, self._stages = backend, dict(stages or {})

    @property
    def backend(self) -> Backend:
        """What computes the tower where the parameters are now: "triton" or "torch"."""
        return choose_backend(self._backend, self.device, self.dtype)[0]

    @property
    def backend_reason(self) -> str:
        return choose_backend(self._backend, self.device, self.dtype)[1]

    @property
    def device(self) -> torch.device:
        return self.vision_tower.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vision_tower.patch_embed.proj.weight.dtype

    def forward(
        self, pixel_values: Tensor, grid_thw: Grid | None = None, *, metadata: EncoderMetadata | None = None
    ) -> Tensor:
        """Encode images and videos, in any order.

        Args:
            pixel_values: ``[patches, 588]`` normalised rows of the image processor, floating point, on the encoder's
                device; the items one after the other, each frame merge window by merge window.
            grid_thw: ``[items, 3]`` integers on the host: frames, height, width in patches. One frame is an image, an
                even number is a video.
            metadata: in place of ``grid_thw``, what :func:`prepare_encoder_metadata` made of it on this device.

        Returns:
            ``[tokens, text_hidden_size]``, the items' tokens one after the other: a quarter of an image's patches, an
            eighth of a video's.

        Raises:
            TypeError: the rows are integers, or neither or both of ``grid_thw`` and ``metadata`` are given.
            ValueError: the rows have another width, number or device than expected, or a size cannot be encoded (an
                odd number of frames above one is refused, never cut).
            RuntimeError: the call would need a gradient and Triton's kernels compute the tower.
        """
        if (grid_thw is None) == (metadata is None):
            raise TypeError("expected one of grid_thw and metadata, got both or neither")
        sizes = metadata.grid_thw if metadata is not None else item_sizes(cast(Grid, grid_thw))
        self._check_pixels(pixel_values, sum(frames * height * width for frames, height, width in sizes))
        if self._graphs is not None and not torch.compiler.is_compiling():
            replayed = self._graphs(pixel_values, sizes)
            if replayed is not None:
                return replayed
        if metadata is None:
            metadata = prepare_encoder_metadata(sizes, device=self.device)
        elif metadata.cu_seqlens.device != self.device:
            raise ValueError(
                f"metadata: expected tensors on the encoder's {self.device}, got {metadata.cu_seqlens.device}"
            )
        ops = self._operators()
        hidden_states = self.vision_tower(pixel_values, metadata, ops)
        tokens: Tensor = self.resampler_model(
            hidden_states, metadata.temporal_rows, metadata.live_counts, ops.resampler
        )
        return tokens

    def encode(
        self, images: "Sequence[ImageLike]", *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> list[Tensor]:
        """Encode images: PIL images, paths or ``[height, width, 3]`` uint8 arrays.

        Returns:
            One ``[tokens, text_hidden_size]`` an image, in order.
        """
        pixel_values, grid_thw = self.preprocess(images, min_pixels=min_pixels, max_pixels=max_pixels)
        sizes = item_sizes(grid_thw)
        tokens = self(pixel_values.to(self.device), sizes)
        return list(tokens.split(tokens_per_item(sizes)))

    def encode_video(
        self, frames: "Sequence[ImageLike]", *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Tensor:
        """Encode the frames of one video, all of one size; an odd number is completed by repeating the last one.

        ``min_pixels`` and ``max_pixels`` bound a frame's area; default: transformers' limits of video frames.

        Returns:
            ``[tokens, text_hidden_size]``.
        """
        from ernie_vit.model.images import preprocess_video

        pixel_values, grid_thw = preprocess_video(frames, min_pixels=min_pixels, max_pixels=max_pixels)
        tokens: Tensor = self(pixel_values.to(self.device), grid_thw)
        return tokens

    def preprocess(
        self, images: "Sequence[ImageLike]", *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """transformers' image processor: ``pixel_values`` float32 ``[patches, 588]``, ``grid_thw`` int64, on the CPU.

        ``min_pixels`` and ``max_pixels`` bound an image's area after resizing; default: the processor's own.
        """
        from ernie_vit.model.images import preprocess_images

        return preprocess_images(images, min_pixels=min_pixels, max_pixels=max_pixels)

    def warm_up(self) -> None:
        """Compile every kernel variant that this encoder can need on its device; no later call compiles one.

        Without it each variant compiles at its first use, which takes seconds. Capturing compiles what its graphs need.
        """
        if self.backend == "triton":
            ops, stages = self._operators(), self._current_stages()
            warm_up(self.vision_tower, ops)
            if stages.get("resampler") == "triton":
                warm_up_resampler(self.resampler_model, ops.resampler)

    def capture(
        self,
        *,
        resampler: bool = False,
        max_tokens: int | None = None,
        max_sequences: int | None = None,
        capacities: Sequence[Capacity | tuple[int, int]] | None = None,
        lazy: bool = False,
    ) -> None:
        """Capture the tower in CUDA graphs; later calls replay them, with the bits of the eager call.

        A few capacities serve every call: the kernels read the live counts from device memory and compute the live rows
        alone; each call takes the smallest graph that holds it. A call larger than the largest graph takes several, cut
        between frames; a frame that none holds runs eagerly, and so does a call that cannot be replayed (training mode,
        autocast, moved weights); see :meth:`graph_stats`. What it will cost and what it took is logged at level INFO.

        The resampler runs eagerly behind the graph, on the live rows, in PyTorch: cuBLAS may round differently for the
        rows of a capacity. With ``resampler=True`` it is computed by the kernels instead, in the graph: less work for
        the host, and an item has the same bits alone, packed with others and in any graph, tower and resampler. They
        are other bits than PyTorch's resampler gives, so every later call, replayed or eager, takes the kernels'
        resampler, until :meth:`release` or another capture. A call that takes several graphs is resampled by them
        eagerly.

        Args:
            resampler: capture the resampler too.
            max_tokens: image tokens (4 patches each) of the largest graph; default: the largest image that the image
                processor makes, 6,177, or less if that would take more than half of the free memory.
            max_sequences: images and video frames of each graph; default: its rows / 256, at least 8.
            capacities: in place of these, the graphs' (rows, sequences), ascending.
            lazy: capture each graph when a call first needs it. In that order they share less memory.

        Raises:
            ValueError: a limit or capacity is impossible (it is named), or Triton does not compute what is captured.
            torch.OutOfMemoryError: there is not enough memory; everything is given back, a smaller capture may follow.
        """
        captured = (*TOWER_STAGES, "resampler") if resampler else TOWER_STAGES
        if self.backend != "triton" or any(self._stages.get(stage) == "torch" for stage in captured):
            raise ValueError(
                f"capture: expected every captured stage on the triton backend, got backend={self.backend!r} "
                f"({self.backend_reason}), stages={self._stages}"
            )
        self.release()
        stages: dict[str, Backend] = {**self._stages, "resampler": "triton"} if resampler else self._stages
        self._graphs = capture_graphs(
            self.vision_tower,
            self.resampler_model,
            choose_operators("triton", stages),
            capture_resampler=resampler,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            capacities=capacities,
            lazy=lazy,
            progress=partial(tqdm, desc="capturing", unit="graph", leave=False),
        )

    def graph_stats(self) -> GraphStats:
        """Counters since :meth:`capture`: hits, fallbacks by reason, replays, rows, memory."""
        return GraphStats() if self._graphs is None else deepcopy(self._graphs.stats)

    def release(self) -> None:
        """Drop the graphs and give their memory back; calls run eagerly again."""
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ErnieVisionEncoder":
        # .to(), .half() and the like: graphs of weights that moved must not keep the old ones' memory
        super()._apply(fn, recurse)
        if self._graphs is not None:
            self._graphs.check_weights()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # a copy has weights of its own, so the graphs are not its graphs
        return {**self.__dict__, "_graphs": None}

    def _operators(self) -> Operators:
        return choose_operators(self.backend, self._current_stages())

    def _current_stages(self) -> dict[str, Backend]:
        """Stages that differ from the backend; graphs with a resampler also have eager calls compute it as they do."""
        if self._graphs is not None and self._graphs.captures_resampler and self.backend == "triton":
            return {**self._stages, "resampler": "triton"}
        return self._stages

    def _check_pixels(self, pixel_values: Tensor, num_patches: int) -> None:
        if not pixel_values.is_floating_point():
            raise TypeError(
                f"pixel_values: expected the processor's normalised floating-point rows, got {pixel_values.dtype}"
            )
        expected = (num_patches, self.config.patch_width)
        if pixel_values.shape != expected:
            raise ValueError(
                f"pixel_values: expected shape {list(expected)} by the items' sizes, got {list(pixel_values.shape)}"
            )
        if pixel_values.device != self.device:
            raise ValueError(f"pixel_values: expected a tensor on {self.device}, got one on {pixel_values.device}")


def _defaults(device: torch.device | str | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device, dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
