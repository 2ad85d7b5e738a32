"""What a test asks of a worker, by ``LLM.collective_rpc``: these functions run in the worker's process."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from eager_graph import EagerRecorder, device_operators

from ernie_vit import shared_tower
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.runner import GraphRunner

TOTAL = 16 << 30


def memory_for_kv_cache(worker: Any, graph_bytes: int) -> int:
    """What vLLM's GPU worker leaves for the KV cache of a device of 16 GiB on which our graphs take ``graph_bytes``.

    Its ``determine_available_memory`` is real, and so is what it calls: ``profile_run`` with vLLM's own dummy images.
    The device alone is pretended.
    """
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.gpu_worker import Worker

    used = 0

    def capture(*_: Any, **__: Any) -> None:
        nonlocal used
        used += graph_bytes

    device = SimpleNamespace(
        get_memory_info=lambda *_: (TOTAL - used, TOTAL),
        memory_stats=lambda *_: {},
        memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    model = worker.model_runner.get_model()
    model.attach(worker.vllm_config)  # undecided, as before the first call
    with (
        patch.multiple(torch.accelerator, **vars(device)),
        patch.object(shared_tower.SharedTower, "capture", capture),
        patch.object(worker.cache_config, "kv_cache_memory_bytes", None),
    ):
        worker.init_snapshot = MemorySnapshot(device="cpu")
        worker.requested_memory = TOTAL
        worker.model_runner.model_memory_usage = 0
        available: int = Worker.determine_available_memory(worker)
    return available


def record_graphs(worker: Any) -> None:
    """Let the tower capture stand-ins of graphs at its next call."""

    def record(tower: Any, resampler: Any, *_: Any, **__: Any) -> GraphRunner:
        return GraphRunner(tower, resampler, device_operators(), [Capacity(256, 8)], record=EagerRecorder())

    shared_tower.capture_graphs = record  # type: ignore[assignment]
    worker.model_runner.get_model().attach(worker.vllm_config)
