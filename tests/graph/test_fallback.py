"""What cannot be replayed runs eagerly, is counted with its reason, and has the eager result."""

import copy
import pickle

import pytest
import torch
from eager_graph import eager
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import random_rows

from ernie_vit.graph.weights import WeightWatch

GRID = [[1, 8, 8], [2, 4, 4]]


@pytest.fixture(autouse=True)
def runner(capture):
    return capture()


@pytest.fixture
def pixel_values():
    return random_rows(GRID)


def fallback(encoder) -> dict[str, int]:
    stats = encoder.graph_stats()
    assert stats.hits == stats.replays == 0
    return stats.fallbacks


def test_training_mode(encoder, pixel_values):
    encoder.train()
    assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))
    assert fallback(encoder) == {"training mode": 1}


def test_autocast(encoder, pixel_values):
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))
    assert fallback(encoder) == {"autocast": 1}


def test_pixel_rows_that_the_kernels_do_not_take(encoder, pixel_values):
    tokens = encoder(pixel_values.double(), GRID)
    assert torch.equal(tokens, eager(encoder, pixel_values, GRID))
    assert fallback(encoder) == {"dtype of the pixel rows": 1}


def test_a_gradient_of_the_pixel_rows(encoder, pixel_values):
    pixel_values.requires_grad_()
    encoder(pixel_values, GRID).sum().backward()
    assert pixel_values.grad.abs().sum() > 0
    assert fallback(encoder) == {"gradient needed": 1}


@pytest.mark.parametrize("part", ["vision_tower", "resampler_model"])
def test_a_gradient_of_the_weights_of_either_part(encoder, pixel_values, part):
    module = getattr(encoder, part).requires_grad_()
    encoder(pixel_values, GRID).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert fallback(encoder) == {"gradient needed": 1}


def test_without_grad_mode_weights_that_could_have_gradients_are_replayed(encoder, pixel_values):
    encoder.requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))
    assert encoder.graph_stats().hits == 2


def test_in_place_changes_of_weights_take_effect(encoder, pixel_values):
    before = encoder(pixel_values, GRID)
    other = {name: 1.5 * value for name, value in encoder.state_dict().items()}
    encoder.load_state_dict(other)
    tokens = encoder(pixel_values, GRID)
    assert not torch.equal(tokens, before)
    assert torch.equal(tokens, eager(encoder, pixel_values, GRID))
    assert encoder.graph_stats().hits == 2


def _new_data(encoder):
    weight = encoder.vision_tower.blocks[1].mlp.fc2.bias
    weight.data = weight.data + 1


def _assigned(encoder):
    encoder.load_state_dict({name: value + 0.5 for name, value in encoder.state_dict().items()}, assign=True)


def _replaced_module(encoder):
    encoder.vision_tower.blocks[0] = copy.deepcopy(encoder.vision_tower.blocks[1])


def _parametrized(encoder):
    proj = encoder.vision_tower.blocks[0].attn.proj
    torch.nn.utils.parametrizations.weight_norm(proj)


MOVES = {
    "param.data = new": _new_data,
    "load_state_dict(assign=True)": _assigned,
    "to(float64)": lambda encoder: encoder.to(torch.float64),
    "half()": lambda encoder: encoder.half(),
    "half().float()": lambda encoder: encoder.half().float(),
    "a module replaced": _replaced_module,
    "a weight derived from others": _parametrized,
}


@pytest.mark.parametrize("move", [pytest.param(move, id=name) for name, move in MOVES.items()])
def test_weights_that_move_drop_the_graphs_and_say_so(encoder, pixel_values, recorder, caplog, move):
    encoder(pixel_values, GRID)
    with caplog.at_level("WARNING"):
        move(encoder)
        encoder.requires_grad_(False)
        for _ in range(2):
            assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))

    stats = encoder.graph_stats()
    assert (stats.hits, stats.fallbacks) == (1, {"weights moved": 2})
    assert stats.calls == 3
    assert [record.message for record in caplog.records] == [
        "ernie-vit: captured weights have moved; their graphs are dropped, capture() makes new ones"
    ]
    assert recorder.graphs == []


def test_the_resamplers_weights_may_move_unless_it_is_captured(encoder, pixel_values, capture, resampler):
    capture(capture_resampler=resampler)
    weight = encoder.resampler_model.mlp.weight
    weight.data = 2 * weight.data
    assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))
    assert encoder.graph_stats().fallbacks == ({"weights moved": 1} if resampler else {})


@pytest.mark.parametrize("change", ["more", "less"])
def test_a_parameter_more_or_less_at_the_end_is_a_move(change):
    norm = torch.nn.LayerNorm(4)
    watch = WeightWatch([norm], [])
    assert not watch.moved()
    if change == "more":
        norm.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    else:
        del norm.bias
    assert watch.moved()


def test_weights_that_only_changed_places_in_their_module_have_not_moved():
    """vLLM reloads weights by taking them out and putting them back: behind a bias that there is none of."""
    linear = torch.nn.Linear(3, 4, bias=False)
    watch = WeightWatch([linear], [])
    linear._parameters["weight"] = linear._parameters.pop("weight")
    assert list(linear._parameters) == ["bias", "weight"]
    assert not watch.moved()
    linear.bias = torch.nn.Parameter(torch.zeros(4))
    assert watch.moved()


def test_weights_that_moved_can_be_captured_again(encoder, pixel_values, capture):
    encoder.double().float()
    encoder(pixel_values, GRID)
    capture()
    assert torch.equal(encoder(pixel_values, GRID), eager(encoder, pixel_values, GRID))
    assert encoder.graph_stats().hits == 1


CONDITIONS = ("plain", "train", "autocast", "no_grad", "oversize", "none", "release")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(CONDITIONS), max_size=8))
def test_hits_and_fallbacks_are_the_calls(encoder, capture, conditions):
    capture()
    for condition in conditions:
        grid = {"oversize": [[1, 26, 20]], "none": []}.get(condition, [[1, 4, 4]])
        encoder.train(condition == "train")
        if condition == "release":
            encoder._graphs.release()
        with torch.autocast("cpu", torch.bfloat16, enabled=condition == "autocast"):
            encoder(random_rows(grid), grid)
    stats = encoder.graph_stats()
    assert stats.hits + sum(stats.fallbacks.values()) == stats.calls == len(conditions)


def test_copies_have_no_graphs_and_their_own_weights(encoder, pixel_values):
    expected = encoder(pixel_values, GRID)
    del encoder._operators  # local to this test
    for duplicate in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert duplicate._graphs is None
        assert duplicate.graph_stats().calls == 0
        assert torch.equal(eager(duplicate, pixel_values, GRID), expected)
        with torch.no_grad():
            duplicate.vision_tower.ln.weight.zero_()
    assert torch.equal(encoder(pixel_values, GRID), expected)
    assert encoder.graph_stats().hits == 2


def test_state_dict_is_the_same_before_and_after_capture(encoder, capture):
    encoder.release()
    before = encoder.state_dict()
    capture()
    after = encoder.state_dict()
    assert list(before) == list(after)
    assert all(before[name].data_ptr() == after[name].data_ptr() for name in before)


def test_the_counters_that_are_handed_out_are_a_copy(encoder, pixel_values):
    stats = encoder.graph_stats()
    encoder(pixel_values, GRID)
    assert (stats.hits, encoder.graph_stats().hits) == (0, 1)
