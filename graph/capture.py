"""Capturing an encoder's tower: how many graphs, what they cost, and whether there is room."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from ernie_vit.graph.capacity import Capacity, check_capacities, default_capacities, graph_bytes
from ernie_vit.graph.recording import CudaGraphRecorder
from ernie_vit.graph.runner import GraphRunner
from ernie_vit.model.operators import Operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.warm_up import row_regimes

logger = logging.getLogger(__name__)


def capture_graphs(
    tower: VisionTower,
    resampler: Resampler,
    ops: Operators,
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    capacities: Sequence[Capacity | tuple[int, int]] | None = None,
    lazy: bool = False,
    progress: Callable[[Iterable[Capacity]], Iterable[Capacity]] = iter,
) -> GraphRunner:
    """Capture ``tower`` at each capacity; arguments and errors as :meth:`ErnieVisionEncoder.capture`."""
    weight = tower.patch_embed.proj.weight
    device = weight.device
    if device.type != "cuda":
        raise ValueError(f"capture: expected an encoder on a CUDA GPU, got one on {device}")
    if capacities is None:
        chosen = default_capacities(row_regimes(tower), max_tokens=max_tokens, max_sequences=max_sequences)
    elif max_tokens is not None or max_sequences is not None:
        raise ValueError("capacities: expected either a list, or max_tokens and max_sequences, got both")
    else:
        chosen = check_capacities(capacities)

    torch.cuda.empty_cache()
    cost, free = graph_bytes(chosen, tower.config, weight.dtype), torch.cuda.mem_get_info(device)[0]
    logger.info("ernie-vit: %d graphs of up to %d rows will take %d MiB", len(chosen), chosen[-1].rows, cost >> 20)
    if cost > free:
        raise torch.OutOfMemoryError(
            f"capture: {len(chosen)} graphs of up to {chosen[-1].rows} rows need {cost >> 20} MiB, "
            f"{free >> 20} MiB are free on {device}; choose a smaller max_tokens"
        )
    started = time.perf_counter()
    with torch.cuda.device(device):
        runner = GraphRunner(
            tower,
            resampler,
            ops,
            chosen,
            record=CudaGraphRecorder(device),
            lazy=lazy,
            progress=progress,
        )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what the recordings' warm-up left behind
    runner.stats.memory_bytes = free - torch.cuda.mem_get_info(device)[0]
    logger.info(
        "ernie-vit: captured %d graphs in %.1f s, %d MiB",
        len(chosen),
        time.perf_counter() - started,
        runner.stats.memory_bytes >> 20,
    )
    return runner
