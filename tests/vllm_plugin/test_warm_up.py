"""When a worker of vLLM captures our graphs: its real methods in their real order, the device and the text left out."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from reference import random_rows
from vllm_host import build_model, engine_config

from ernie_vit.shared_tower import SharedTower
from ernie_vit.vllm_model import with_our_tower

GRID = [[1, 4, 4], [1, 6, 8]]


@pytest.fixture
def model(vllm_config: Any) -> Any:  # noqa: ARG001  layers are built in its world
    from vllm.model_executor.models import ernie45_vl

    return build_model(with_our_tower(ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration))


def model_runner(model: Any, *, skip_mm_profiling: bool, order: list[str]) -> Any:
    """What ``profile_run`` of vLLM's first model runner uses, around ``model``."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    budget = SimpleNamespace(
        get_encoder_budget=lambda: 64,
        mm_max_toks_per_item={"image": 16},
        mm_max_items_per_batch={"image": len(GRID)},
        get_modality_with_max_tokens=lambda: "image",
    )
    runner = SimpleNamespace(
        model=model,
        model_memory_usage=0,
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(skip_mm_profiling=skip_mm_profiling)),
        supports_mm_inputs=True,
        mm_budget=budget,
        encoder_cache={},
        is_pooling_model=False,
        max_num_tokens=64,
        _get_mm_dummy_batch=lambda *_: {"pixel_values": random_rows(GRID), "image_grid_thw": torch.tensor(GRID)},
        _dummy_run=lambda *_, **__: order.append("text") or (None, None),
        _dummy_sampler_run=lambda *_: None,
        _sync_device=lambda: None,
        profile_cudagraph_memory=lambda: 0,
    )
    runner.profile_run = MethodType(GPUModelRunner.profile_run, runner)
    return runner


@pytest.mark.parametrize("skip_mm_profiling", [False, True])
def test_graphs_are_captured_while_vllm_measures_its_memory(
    model: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch, skip_mm_profiling: bool
) -> None:
    from vllm.v1.worker import gpu_worker

    order: list[str] = []
    numbers = ("total_consumed", "transient_peak_headroom", "non_torch_increase", "weights_memory")
    profile = SimpleNamespace(
        **dict.fromkeys((*numbers, "non_kv_cache_memory"), 1),
        before_profile=SimpleNamespace(torch_peak=0),
        after_profile=SimpleNamespace(free_memory=6),
    )

    @contextmanager
    def memory_profiling(*_: Any, **__: Any) -> Iterator[Any]:
        order.append("measure")
        yield profile
        order.append("measured")

    monkeypatch.setattr(gpu_worker, "memory_profiling", memory_profiling)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda *_: {"allocated_bytes.all.peak": 0})
    monkeypatch.setattr(SharedTower, "capture", lambda *_, **__: order.append("capture"))
    model.attach(engine_config(skip_mm_profiling=skip_mm_profiling), backend="torch")
    worker = SimpleNamespace(
        model_runner=model_runner(model, skip_mm_profiling=skip_mm_profiling, order=order),
        vllm_config=vllm_config,
        cache_config=vllm_config.cache_config,
        model_config=SimpleNamespace(multimodal_config=None, enforce_eager=False),
        parallel_config=vllm_config.parallel_config,
        init_snapshot=SimpleNamespace(free_memory=10, total_memory=10),
        requested_memory=9,
        device=torch.device("cpu"),
        randomize_dummy_inputs=False,
        use_v2_model_runner=False,
        _scoped_allocator_max_split=lambda *_, **__: nullcontext(),
        _reserve_mm_ipc_gpu_memory=lambda memory: memory,
    )
    gpu_worker.Worker.determine_available_memory(worker)
    assert order == ["measure", *([] if skip_mm_profiling else ["capture"]), "text", "measured"]
    with torch.inference_mode():  # a request's image comes later
        model.embed_multimodal(**worker.model_runner._get_mm_dummy_batch())
    assert order[-1] == "measured"
