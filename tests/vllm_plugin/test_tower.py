"""Our tower inside the real vLLM: vLLM's numbers, its weights, its graph manager, and its own path for the rest."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accuracy import relative_error
from eager_graph import EagerRecorder, device_operators
from reference import random_rows
from torch import Tensor, nn
from vllm_host import ARCHITECTURE, build_model, engine_config, graph_manager, log_lines

from ernie_vit import vllm_plugin
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.runner import GraphRunner
from ernie_vit.shared_tower import SharedTower
from ernie_vit.vllm_tower import UNLIMITED_MB, large_blocks_are_split

IMAGES = [[1, 4, 4], [1, 6, 8], [1, 2, 2]]
VIDEOS = [[4, 4, 4], [2, 6, 4]]
FLOAT32 = 2e-6  # relative; a float32 pass over two blocks that adds in another order


def derived_class() -> type[nn.Module]:
    from vllm.model_executor.models.registry import ModelRegistry

    with vllm_plugin.patch():
        cls: type[nn.Module] = ModelRegistry.models[ARCHITECTURE].load_model_cls()
    return cls


@pytest.fixture(scope="module")
def stock(vllm_config: Any) -> Any:  # noqa: ARG001  layers are built in its world
    from vllm.model_executor.models import ernie45_vl

    return build_model(ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration)


@pytest.fixture
def bare(vllm_config: Any) -> Any:  # noqa: ARG001  layers are built in its world
    """A model of the derived class whose tower is not attached yet."""
    return build_model(derived_class())


@pytest.fixture
def model(bare: Any) -> Any:
    bare.attach(engine_config(), backend="torch")
    return bare


@pytest.fixture
def protocol_model(bare: Any) -> Any:
    if not hasattr(bare, "get_encoder_cudagraph_config"):
        pytest.skip("this vLLM has no encoder graphs for ERNIE-4.5-VL: they came with 0.28")
    bare.attach(engine_config(cudagraph_mm_encoder=True), backend="torch")
    return bare


def batch(grid: list[list[int]]) -> dict[str, Tensor]:
    """What vLLM hands its encoder: images, or videos."""
    rows, sizes = random_rows(grid), torch.tensor(grid)
    if grid[0][0] > 1:
        return {"pixel_values_videos": rows, "video_grid_thw": sizes}
    return {"pixel_values": rows, "image_grid_thw": sizes}


@torch.inference_mode()
def embed(model: Any, grid: list[list[int]]) -> tuple[Tensor, ...]:
    return tuple(model.embed_multimodal(**batch(grid)))


def assert_close(ours: Any, theirs: Any) -> None:
    assert [part.shape for part in ours] == [part.shape for part in theirs]
    for out, exact in zip(ours, theirs, strict=True):
        assert relative_error(out, exact) < FLOAT32


@pytest.mark.parametrize("grid", [IMAGES, VIDEOS], ids=["images", "videos"])
def test_vllms_numbers(model: Any, stock: Any, grid: list[list[int]]) -> None:
    with log_lines() as lines:
        assert_close(embed(model, grid), embed(stock, grid))
        embed(model, grid)
    assert vllm_plugin.stats(model) == {"calls": 2, "fallbacks": {}, "replays": 0, "graph_fallbacks": {}}
    assert len(lines) == 1
    assert re.fullmatch(
        r"INFO ernie-vit [\d.]+ computes the vision tower: torch, cpu, float32; graphs: none \(.* on cpu\)", lines[0]
    )


def test_weights_are_vllms(model: Any, stock: Any) -> None:
    embed(model, IMAGES)
    assert list(model.state_dict()) == list(stock.state_dict())
    assert dict(model.named_modules()).keys() == dict(stock.named_modules()).keys()
    tower = model.ernie_vit.shared().tower
    for name, parameter in tower.named_parameters():
        assert parameter is model.vision_model.get_parameter(name)
    assert tower.blocks[0].norm1.eps != tower.ln.eps
    assert type(model.language_model) is type(stock.language_model)
    before = embed(model, IMAGES)
    model.vision_model.blocks[1].mlp.fc2.weight.mul_(2)  # as a weight update in place
    assert relative_error(embed(model, IMAGES)[0], before[0]) > 0.01


def quantise(tower: Any) -> None:
    tower.blocks[1].mlp.fc1.quant_method = type("Fp8LinearMethod", (), {})()


def adapt(tower: Any) -> None:
    tower.blocks[0].attn.qkv = type("QKVParallelLinearWithLoRA", (nn.Identity,), {})()


def shard(tower: Any) -> None:
    tower.blocks[0].attn.tp_size = 2


def rename(tower: Any) -> None:
    del tower.blocks[0].mlp.fc1


def rescale(tower: Any) -> None:
    tower.blocks[0].attn.attn.scale = 1.0


def quantise_attention(tower: Any) -> None:
    tower.blocks[0].attn.attn.fp8_enabled = True


def other_activation(tower: Any) -> None:
    tower.blocks[1].mlp.act = nn.GELU()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantise, r"blocks.1.mlp.fc1: it is quantised \(Fp8LinearMethod\)"),
        (quantise_attention, r"its attention is quantised \(mm_encoder_attn_dtype\)"),
        (adapt, "blocks.0.attn.qkv: expected a plain linear, got QKVParallelLinearWithLoRA"),
        (shard, "it is sharded over 2 ranks"),
        (rename, "looked for blocks.0.mlp.fc1.weight in Ernie4_5_VisionTransformer, found no 'fc1'"),
        (rescale, r"attention scale: expected 80\^-0.5, got 1.0"),
        (other_activation, "blocks.1.mlp.act: expected QuickGELU"),
        (nn.Module.double, "the kernels take bfloat16, float16 and float32, not torch.float64"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_ours_cannot_compute_is_vllms(
    bare: Any, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    import vllm

    monkeypatch.setattr("ernie_vit.encoder.why_not_triton", lambda _: None)
    bare.attach(engine_config(), backend="auto" if change is nn.Module.double else "torch")
    change(bare.vision_model)
    asked = []
    monkeypatch.setattr(type(bare).stock, "_vision_forward", lambda *_: asked.append(1) or torch.zeros(16, 160))
    with log_lines() as lines:
        for _ in range(2):
            bare._vision_forward(random_rows([[1, 4, 4]]), torch.tensor([[1, 4, 4]]))
    assert len(asked) == 2
    assert len(lines) == 1
    assert re.match(rf"WARNING ernie-vit: vLLM {vllm.__version__} computes its own vision tower: .*{reason}", lines[0])


def test_a_first_call_with_a_gradient_decides_nothing(model: Any) -> None:
    model.vision_model.requires_grad_()
    assert model.embed_multimodal(**batch(IMAGES))[0].requires_grad
    embed(model, IMAGES)
    counters = vllm_plugin.stats(model)
    assert (counters["calls"], counters["fallbacks"]) == (1, {"gradient needed": 1})


def test_graphs_are_captured_again_when_weights_have_moved(
    bare: Any, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, room = EagerRecorder(), [2048, 2048]

    def capture(tower: Any, resampler: Any, *_: Any, max_tokens: int, **__: Any) -> GraphRunner:
        if not room:
            raise torch.OutOfMemoryError("capture: no room")
        assert room.pop() == max_tokens
        return GraphRunner(tower, resampler, device_operators(), [Capacity(256, 8)], record=recorder)

    monkeypatch.setattr("ernie_vit.shared_tower.capture_graphs", capture)
    bare.attach(engine_config(), backend="torch")
    with log_lines() as lines:
        for captured in (1, 2, 2):
            assert_close(embed(bare, IMAGES), embed(stock, IMAGES))
            assert recorder.recorded == captured
            for parameter in bare.vision_model.parameters():
                parameter.data = parameter.data.clone()
            assert_close(embed(bare, IMAGES), embed(stock, IMAGES))
    assert lines[1:] == [
        f"INFO ernie-vit: the vision tower's weights have moved; graphs: {graphs}"
        for graphs in ("up to 2048 tokens, 0 MiB", "none (capture: no room)")
    ]
    counters = vllm_plugin.stats(bare)
    assert (counters["calls"], counters["replays"]) == (6, 2)
    assert counters["graph_fallbacks"] == {"weights moved": 2}


def test_on_a_cpu_vllm_computes(bare: Any, stock: Any) -> None:
    bare.attach(engine_config())
    with log_lines() as lines:
        ours = embed(bare, IMAGES)
    assert all(torch.equal(out, exact) for out, exact in zip(ours, embed(stock, IMAGES), strict=True))
    assert len(lines) == 1
    assert "computes its own vision tower: the device is a CPU" in lines[0]
    assert vllm_plugin.stats(bare)["calls"] == 0


def test_a_tower_that_vllm_never_asks_for_is_reported(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model).stock, "embed_multimodal", lambda *_, **__: (torch.zeros(4, 128),))
    with log_lines() as lines:
        embed(model, IMAGES)
        embed(model, IMAGES)
    assert len(lines) == 1
    assert "looked for a call of _vision_forward, none came" in lines[0]


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, "up to 2048 tokens, 3 MiB"),
        ({"max_model_len": 512}, "up to 512 tokens, 3 MiB"),
        ({"max_num_batched_tokens": 10**6, "max_model_len": 10**6}, "up to 6177 tokens, 3 MiB"),
        ({"enforce_eager": True}, r"none \(enforce_eager\)"),
        ({"skip_mm_profiling": True}, r"none \(skip_mm_profiling: .*\)"),
        ({"cudagraph_mm_encoder": True}, r"vLLM's \(cudagraph_mm_encoder\)"),
    ],
)
def test_which_graphs_are_captured(
    bare: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], graphs: str
) -> None:
    if "cudagraph_mm_encoder" in options and not hasattr(bare, "get_encoder_cudagraph_config"):
        graphs = "up to 2048 tokens, 3 MiB"  # this vLLM captures no encoder of ERNIE-4.5-VL: ours does
    captured, warm = [], []
    monkeypatch.setattr(SharedTower, "capture", lambda _, *, max_tokens: captured.append(max_tokens))
    monkeypatch.setattr(SharedTower, "graph_bytes", 3 << 20)
    monkeypatch.setattr(SharedTower, "warm_up", lambda _, *, above: warm.append(above))
    bare.attach(engine_config(**options), backend="torch")
    with log_lines() as lines:
        embed(bare, IMAGES)
        embed(bare, IMAGES)
    assert re.search(rf"graphs: {graphs}$", lines[0])
    assert captured == ([int(graphs.split()[2])] if graphs.startswith("up to") else [])
    # what no graph holds is compiled before the server is up, whoever captures
    assert warm == ([] if graphs.startswith("none") else [4 * captured[0] if captured else 4 * 2048])


@pytest.mark.parametrize("getter", [True, False], ids=["", "PyTorch without a getter"])
def test_graphs_are_captured_outside_of_vllms_split_limit(
    bare: Any, monkeypatch: pytest.MonkeyPatch, getter: bool
) -> None:
    settings, set_settings = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, limited = settings(), "expandable_segments:False,max_split_size_mb:20"
    seen = []
    monkeypatch.setattr(SharedTower, "capture", lambda *_, **__: seen.append(settings()))
    bare.attach(engine_config(), backend="torch")
    set_settings(limited)  # as its profiling does
    if not getter:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
        snapshot = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": limited}}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    try:
        embed(bare, IMAGES)
        seen.append(settings())
    finally:
        set_settings(before)
    assert seen == [f"{limited},max_split_size_mb:{UNLIMITED_MB}", limited]


def test_another_allocator_without_a_getter_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: pytest.fail("it has none"))
    with large_blocks_are_split():
        pass


def test_a_later_pipeline_stage_captures_nothing(bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: SimpleNamespace(is_first_rank=False))
    monkeypatch.setattr(SharedTower, "capture", lambda *_, **__: pytest.fail("captured"))
    bare.attach(engine_config(), backend="torch")
    with log_lines() as lines:
        embed(bare, IMAGES)
    assert lines[0].endswith("graphs: none (a later pipeline stage, which gets no images)")


def test_no_memory_for_graphs_means_no_graphs(bare: Any, monkeypatch: pytest.MonkeyPatch, stock: Any) -> None:
    def full(_: SharedTower, *, max_tokens: int) -> None:
        raise torch.OutOfMemoryError(f"capture: no room for {max_tokens}")

    monkeypatch.setattr(SharedTower, "capture", full)
    bare.attach(engine_config(), backend="torch")
    with log_lines() as lines:
        assert_close(embed(bare, IMAGES), embed(stock, IMAGES))
    assert lines[0].endswith("graphs: none (capture: no room for 2048)")


@pytest.mark.parametrize(
    "grid",
    [
        [[1, 4, 4], [1, 6, 8]],
        [[4, 4, 4]],
        [[2, 4, 4], [4, 8, 8], [2, 2, 2]],
        [[8, 2, 2]],  # more frames than images: each counts 16 tokens
        [[1, 2, 2]] * 9,  # more items than a batch takes
        [[1, 32, 32]],  # larger than every budget
        [[32, 4, 4], [2, 4, 4]],
    ],
    ids=str,
)
def test_vllms_graph_manager(protocol_model: Any, stock: Any, vllm_config: Any, grid: list[list[int]]) -> None:
    manager = graph_manager(protocol_model, vllm_config, budgets=[32, 64, 128], max_items=4)
    assert manager.config.modalities == ["image", "video"]
    assert set(manager.config.buffer_keys) == set(manager.budget_graphs["default"][64].input_buffers)
    with torch.inference_mode():
        tokens = manager.execute(batch(grid))
    assert_close(tokens, embed(stock, grid))
    too_large = sum(max(16 * t, t * h * w // 4) > 128 for t, h, w in grid)
    stats = manager.get_cumulative_stats()
    assert (stats["graph_hits"], stats["graph_misses"]) == (len(grid) - too_large, too_large)
    assert vllm_plugin.stats(protocol_model)["fallbacks"] == {}
    assert vllm_plugin.stats(protocol_model)["calls"] == too_large


def test_the_graph_manager_is_made_while_the_model_loads(protocol_model: Any, vllm_config: Any) -> None:
    """vLLM's second model runner does that: outside of inference mode, with norms that would take a gradient."""
    protocol_model.vision_model.requires_grad_()
    assert torch.is_grad_enabled()
    with log_lines() as lines:
        manager = graph_manager(protocol_model, vllm_config, budgets=[32], max_items=4)
    assert manager.config.modalities == ["image", "video"]
    assert lines[0].endswith("graphs: vLLM's (cudagraph_mm_encoder)")


def test_vllms_graph_manager_spreads_items_over_ranks(protocol_model: Any) -> None:
    items = batch([[1, 4, 4], [1, 6, 8], [1, 2, 2]])
    specs = protocol_model.get_encoder_cudagraph_item_specs(items)
    assert [spec.output_tokens for spec in specs] == [4, 12, 1]
    mine = protocol_model.select_encoder_cudagraph_items(items, [2, 0])
    assert torch.equal(mine["pixel_values"], torch.cat([items["pixel_values"][64:], items["pixel_values"][:16]]))
    none = protocol_model.select_encoder_cudagraph_items(items, [])
    assert none["pixel_values"].shape == (0, 588)
    assert protocol_model.get_encoder_cudagraph_item_specs(none) == []


def test_the_protocol_is_vllms_where_ours_cannot_compute(bare: Any) -> None:
    if not hasattr(bare, "get_encoder_cudagraph_config"):
        pytest.skip("this vLLM has no encoder graphs for ERNIE-4.5-VL: they came with 0.28")
    bare.attach(engine_config(cudagraph_mm_encoder=True))  # on a CPU: "auto" leaves the tower to vLLM
    assert bare.get_encoder_cudagraph_config().modalities == ["image"]
    device = torch.device("cpu")
    values = bare.prepare_encoder_cudagraph_capture_inputs(32, 2, 2, device, torch.float32).values
    assert "rotary_pos_emb" in values
    assert bare.encoder_cudagraph_forward(values).shape == (128, 160)


@pytest.mark.interpreter
def test_the_kernels_compute_inside_vllm(bare: Any, stock: Any, vllm_config: Any) -> None:
    bare.attach(engine_config(cudagraph_mm_encoder=True), backend="triton")
    assert_close(embed(bare, [[1, 4, 4]]), embed(stock, [[1, 4, 4]]))
    if hasattr(bare, "get_encoder_cudagraph_config"):
        manager = graph_manager(bare, vllm_config, budgets=[16], max_items=1)
        with torch.inference_mode():
            assert_close(manager.execute(batch([[1, 4, 4]])), embed(stock, [[1, 4, 4]]))
        assert vllm_plugin.stats(bare)["replays"] == 1
