"""Our tower inside transformers' model: same text, same features, and transformers' own path for the rest."""

import copy
from typing import Any

import pytest
import torch
from accuracy import assert_within_budget, relative_error
from eager_graph import EagerRecorder, device_operators
from reference import random_rows, randomize, small_config
from torch import Tensor, nn
from transformers import Ernie4_5_VLMoeForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ernie_vit import hf
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.runner import GraphRunner

IMAGES = [[1, 4, 4], [1, 6, 8]]
VIDEO = [[4, 4, 6]]
FLOAT32 = 2e-6  # relative; a float32 pass over two blocks that adds in another order


@pytest.fixture
def model() -> Ernie4_5_VLMoeForConditionalGeneration:
    """A whole model, as small as can be, whose text depends on what it sees."""
    config = small_config()
    config.image_token_id, config.video_token_id = 3, 4
    model = Ernie4_5_VLMoeForConditionalGeneration(config).eval()
    randomize(model, seed=0)
    return model


def seen(grid: list[list[int]], seed: int = 0) -> dict[str, Tensor]:
    """What the processor gives: token ids with a place for each image or video token, pixel rows, sizes."""
    video = grid[0][0] > 1
    token, kind = (4, 2) if video else (3, 1)
    counts = [max(t // 2, 1) * h * w // 4 for t, h, w in grid]
    input_ids = torch.tensor([[1, *(id_ for count in counts for id_ in (5, *[token] * count)), 5]])
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": torch.where(input_ids == token, kind, 0),
        "pixel_values_videos" if video else "pixel_values": random_rows(grid, seed),
        "video_grid_thw" if video else "image_grid_thw": torch.tensor(grid),
    }


def generated(model: nn.Module, grid: list[list[int]], seed: int = 0) -> list[int]:
    inputs = {name: tensor.to(model.device) for name, tensor in seen(grid, seed).items()}
    text = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return text[0, inputs["input_ids"].shape[1] :].tolist()


def features(model: nn.Module, grid: list[list[int]] = IMAGES, **keywords: Any) -> Any:
    device = "cpu" if model.device.type == "meta" else model.device  # offloaded
    rows, sizes = random_rows(grid).to(device), torch.tensor(grid)
    with torch.no_grad():
        if grid[0][0] > 1:
            return model.get_video_features(rows, sizes, **keywords)
        return model.get_image_features(rows, sizes, **keywords)


def close(ours: Any, theirs: Any) -> bool:
    pairs = zip(
        (ours.last_hidden_state, *ours.pooler_output), (theirs.last_hidden_state, *theirs.pooler_output), strict=True
    )
    return all(relative_error(out, exact) < FLOAT32 for out, exact in pairs)


@pytest.mark.parametrize("grid", [IMAGES, VIDEO], ids=["images", "video"])
def test_generate_writes_the_same_text(model: Any, grid: list[list[int]]) -> None:
    theirs = [generated(model, grid, seed) for seed in range(4)]
    assert len({tuple(text) for text in theirs}) > 1, "the text does not depend on the pixels: the test is blind"
    with hf.patch(model, backend="torch"):
        assert [generated(model, grid, seed) for seed in range(4)] == theirs
        assert hf.stats(model)["calls"] == 4
        assert hf.stats(model)["fallbacks"] == {}


@pytest.mark.parametrize("grid", [IMAGES, VIDEO], ids=["images", "video"])
def test_features_have_transformers_types_and_values(model: Any, grid: list[list[int]]) -> None:
    theirs = features(model, grid)
    hf.patch(model, backend="torch")
    ours = features(model, grid)
    assert type(ours) is BaseModelOutputWithPooling is type(theirs)
    assert [part.shape for part in ours.pooler_output] == [part.shape for part in theirs.pooler_output]
    assert close(ours, theirs)
    assert hf.stats(model)["calls"] == 1


def test_bfloat16_is_within_transformers_own_error(model: Any) -> None:
    for parameter in model.parameters():  # as from_pretrained(dtype=...): the rotary frequencies stay float32
        parameter.data = parameter.data.bfloat16()
    exact = features(copy.deepcopy(model).double())
    plain = features(model)
    hf.patch(model, backend="torch")
    assert_within_budget(features(model).last_hidden_state, plain.last_hidden_state, exact.last_hidden_state)


def test_patching_twice_and_unpatching_restores_the_same_bits(model: Any) -> None:
    names, before = list(model.state_dict()), features(model)
    hf.patch(model, backend="torch")
    first = model.model.vision_tower.forward
    hf.patch(model, backend="torch")
    assert model.model.vision_tower.forward == first
    assert list(model.state_dict()) == names
    hf.unpatch(model)
    hf.unpatch(model)
    assert "forward" not in model.model.vision_tower.__dict__
    assert torch.equal(features(model).last_hidden_state, before.last_hidden_state)
    with pytest.raises(ValueError, match="expected a patched model"):
        hf.stats(model)


def test_a_context_unpatches_whatever_happens(model: Any) -> None:
    with pytest.raises(TypeError), hf.patch(model, backend="torch"):
        model.get_image_features()
    assert "forward" not in model.model.vision_tower.__dict__


def test_a_second_model_and_the_class_are_untouched(model: Any) -> None:
    second = Ernie4_5_VLMoeForConditionalGeneration(model.config)
    forward = type(model.model.vision_tower).forward
    language = model.model.language_model
    hf.patch(model, backend="torch")
    assert type(model.model.vision_tower).forward is forward
    assert "forward" not in second.model.vision_tower.__dict__
    assert model.model.language_model is language
    assert "forward" not in language.__dict__


def test_gradients_go_through_transformers(model: Any) -> None:
    def gradients() -> list[Tensor]:
        model.zero_grad()
        model.get_image_features(random_rows(IMAGES), torch.tensor(IMAGES)).last_hidden_state.square().sum().backward()
        return [parameter.grad for parameter in model.model.vision_tower.parameters()]

    theirs = gradients()
    hf.patch(model, backend="torch")
    assert all(torch.equal(ours, exact) for ours, exact in zip(gradients(), theirs, strict=True))
    assert hf.stats(model) == {
        "calls": 0,
        "fallbacks": {"gradient needed": 1},
        "replays": 0,
        "graph_fallbacks": {},
    }


def test_what_ours_does_not_know_is_forwarded(model: Any) -> None:
    asked = {"output_hidden_states": True}, {"a_new_keyword": 1}
    theirs = [features(model, **keywords) for keywords in asked]
    hf.patch(model, backend="torch")
    for keywords, exact in zip(asked, theirs, strict=True):
        ours = features(model, **keywords)
        assert torch.equal(ours.last_hidden_state, exact.last_hidden_state)
        assert (ours.hidden_states is None) == (exact.hidden_states is None)
    assert len(features(model, return_dict=False)) == 2
    assert hf.stats(model)["calls"] == 1
    assert hf.stats(model)["fallbacks"] == {f"keywords: {name}": 1 for keywords in asked for name in keywords}


def test_weights_are_shared(model: Any) -> None:
    hf.patch(model, backend="torch")
    before = features(model)
    with torch.no_grad():
        model.model.vision_tower.blocks[0].mlp.fc1.weight.mul_(2)
    edited = features(model)
    assert relative_error(edited.last_hidden_state, before.last_hidden_state) > 0.01
    other = Ernie4_5_VLMoeForConditionalGeneration(model.config).eval()
    randomize(other, seed=5)
    model.load_state_dict(other.state_dict(), assign=True)
    assert close(features(model), features(other))
    assert hf.stats(model)["calls"] == 3


def test_the_counters_outlive_graphs_whose_weights_moved(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(tower: Any, resampler: Any, *_: Any, **__: Any) -> GraphRunner:
        return GraphRunner(tower, resampler, device_operators(), [Capacity(64, 4)], record=EagerRecorder())

    monkeypatch.setattr("ernie_vit.shared_tower.capture_graphs", capture)
    theirs = features(model)
    hf.patch(model, backend="torch")
    shared = model.model.vision_tower.forward.__self__.shared
    for calls in (1, 2):
        shared.capture()
        assert close(features(model), theirs)
        assert hf.stats(model)["replays"] == calls
        for parameter in model.model.vision_tower.parameters():
            parameter.data = parameter.data.clone()
        assert close(features(model), theirs)
        assert shared.graphs is None
        assert hf.stats(model)["graph_fallbacks"] == {"weights moved": calls}
    assert hf.stats(model)["calls"] == 4


def test_a_deep_copy_is_patched_on_its_own(model: Any) -> None:
    hf.patch(model, backend="torch")
    before = features(model)
    twin = copy.deepcopy(model)
    randomize(twin, seed=7)
    ours = features(twin)
    assert hf.stats(twin)["calls"] == 2
    assert hf.stats(model)["calls"] == 1
    hf.unpatch(twin)
    assert close(ours, features(twin))
    assert torch.equal(features(model).last_hidden_state, before.last_hidden_state)
    assert hf.stats(model)["calls"] == 2


@pytest.mark.parametrize("hooks_first", [True, False])
def test_device_map_hooks(model: Any, hooks_first: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = features(model)

    def place() -> None:
        parts = {"model.vision_tower": "cpu", "model.resampler_model": "cpu", "model.language_model": "cpu"}
        accelerate.dispatch_model(model, {**parts, "lm_head": "cpu"}, main_device="cpu", force_hooks=True)

    if hooks_first:
        place()
    hf.patch(model, backend="torch")
    if not hooks_first:
        place()
    assert hasattr(model.model.vision_tower, "_hf_hook")
    assert close(features(model), theirs)
    assert hf.stats(model)["calls"] == 1
    hf.unpatch(model)
    assert hasattr(model.model.vision_tower, "_hf_hook")
    assert torch.equal(features(model).last_hidden_state, theirs.last_hidden_state)
    hf.patch(model, backend="torch")
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert close(features(model), theirs)
    assert hf.stats(model)["calls"] == 1


def test_offloaded_weights_are_left_to_transformers(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = features(model)
    hf.patch(model, backend="torch")
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(features(model).last_hidden_state, theirs.last_hidden_state)
    assert hf.stats(model)["fallbacks"] == {"weights offloaded or on several devices": 1}


class Adapted(nn.Module):
    """A linear with an adapter, as LoRA wraps one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * x.sum(-1, keepdim=True)


def test_adapted_linears_are_left_to_transformers(model: Any) -> None:
    attention = model.model.vision_tower.blocks[1].attn
    hf.patch(model, backend="torch")
    attention.proj = Adapted(attention.proj)
    adapted = features(model)
    assert hf.stats(model)["fallbacks"] == {"a layer of the tower was replaced": 1}
    hf.unpatch(model)
    assert torch.equal(features(model).last_hidden_state, adapted.last_hidden_state)
    with pytest.raises(ValueError, match=r"transformers \d.*blocks.1.attn.proj: expected a plain Linear, got Adapted"):
        hf.patch(model)


def test_other_models_are_refused_by_name(model: Any) -> None:
    with pytest.raises(ValueError, match=r"got Linear of transformers \d.*looked for model.vision_tower"):
        hf.patch(nn.Linear(2, 2))
    tower = model.model.vision_tower
    tower.blocks[0].attn.query_key_value = tower.blocks[0].attn.qkv
    del tower.blocks[0].attn.qkv
    with pytest.raises(ValueError, match=r"transformers \d.*looked for blocks.0.attn.qkv.*found no 'qkv'"):
        hf.patch(model)


def test_rows_that_do_not_fit_the_sizes_are_refused(model: Any) -> None:
    hf.patch(model, backend="torch")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"expected shape \[64, 588\], as the sizes say, got \[16, 588\]"),
    ):
        model.get_image_features(random_rows([[1, 4, 4]]), torch.tensor(IMAGES))


def test_on_a_cpu_transformers_computes(model: Any) -> None:
    theirs = features(model)
    hf.patch(model)
    assert torch.equal(features(model).last_hidden_state, theirs.last_hidden_state)
    (reason,) = hf.stats(model)["fallbacks"]
    assert "CPU" in reason


@pytest.mark.interpreter
def test_the_kernels_compute_inside_transformers(model: Any) -> None:
    theirs = features(model, [[1, 4, 4]])
    hf.patch(model, backend="triton")
    assert close(features(model, [[1, 4, 4]]), theirs)
    assert hf.stats(model)["calls"] == 1


@pytest.mark.gpu
def test_generate_replays_graphs(model: Any) -> None:
    model.cuda()
    grids = [IMAGES, VIDEO, IMAGES]
    theirs = [generated(model, grid) for grid in grids]
    with hf.patch(model, graphs=False):
        eager = [features(model, grid).last_hidden_state for grid in grids]
    hf.patch(model)
    assert [generated(model, grid) for grid in grids] == theirs
    assert hf.stats(model)["replays"] >= len(grids)
    assert hf.stats(model)["graph_fallbacks"] == {}
    for grid, exact in zip(grids, eager, strict=True):
        assert torch.equal(features(model, grid).last_hidden_state, exact)
    copy.deepcopy(model)
    replays = hf.stats(model)["replays"]
    model.bfloat16()  # moves every weight: the graphs are captured again
    for _ in range(3):
        features(model)
    assert hf.stats(model)["calls"] == 2 * len(grids) + 3
    assert hf.stats(model)["replays"] == replays + 2
    assert hf.stats(model)["graph_fallbacks"] == {"weights moved": 1}
