"""Capturing an encoder: how many graphs, what they cost, and whether there is room."""

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch

from ernie_vit.graph.capacity import (
    MIB,
    Capacity,
    affordable_capacities,
    check_capacities,
    default_capacities,
    graph_bytes,
)
from ernie_vit.graph.recording import CudaGraphRecorder
from ernie_vit.graph.runner import GraphRunner
from ernie_vit.model.operators import Operators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower
from ernie_vit.model.warm_up import row_regimes, warm_up_resampler

logger = logging.getLogger(__name__)


def capture_graphs(
    tower: VisionTower,
    resampler: Resampler,
    ops: Operators,
    *,
    capture_resampler: bool = False,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    capacities: Sequence[Capacity | tuple[int, int]] | None = None,
    lazy: bool = False,
    progress: Callable[[Iterable[Capacity]], Iterable[Capacity]] = iter,
) -> GraphRunner:
    """Capture ``tower`` at each capacity, with ``capture_resampler`` the resampler behind it.

    Other arguments and errors as :meth:`ErnieVisionEncoder.capture`.
    """
    weight = tower.patch_embed.proj.weight
    device = weight.device
    if device.type != "cuda":
        raise ValueError(f"capture: expected an encoder on a CUDA GPU, got one on {device}")
    if capacities is None:
        chosen = default_capacities(row_regimes(device), max_tokens=max_tokens, max_sequences=max_sequences)
    elif max_tokens is not None or max_sequences is not None:
        raise ValueError("capacities: expected either a list, or max_tokens and max_sequences, got both")
    else:
        chosen = check_capacities(capacities)

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if capacities is None and max_tokens is None:
        chosen = affordable_capacities(chosen, free, tower.config, weight.dtype, resampler=capture_resampler)
    cost = graph_bytes(chosen, tower.config, weight.dtype, resampler=capture_resampler)
    what = f"{len(chosen)} graphs of up to {chosen[-1].rows} rows"
    if cost > free:
        raise torch.OutOfMemoryError(
            f"capture: {what} need {cost // MIB} MiB, {free // MIB} MiB are free on {device}; "
            "choose a smaller max_tokens"
        )
    logger.info("ernie-vit: %s will take %d MiB", what, cost // MIB)
    started = time.perf_counter()
    try:
        if capture_resampler:
            warm_up_resampler(resampler, ops.resampler)  # also for cut calls, which resample as many rows as they have
        runner = GraphRunner(
            tower,
            resampler,
            ops,
            chosen,
            record=CudaGraphRecorder(device),
            capture_resampler=capture_resampler,
            lazy=lazy,
            progress=progress,
        )
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass that failed
        torch.cuda.empty_cache()
        raise torch.OutOfMemoryError(
            f"capture: {what} did not fit into the {free // MIB} MiB that were free on {device}; "
            "choose a smaller max_tokens"
        ) from error
    torch.cuda.synchronize(device)
    seconds, taken = time.perf_counter() - started, runner.stats.memory_bytes // MIB
    logger.info("ernie-vit: %s %s in %.1f s, took %d MiB", what, "prepared" if lazy else "captured", seconds, taken)
    return runner
