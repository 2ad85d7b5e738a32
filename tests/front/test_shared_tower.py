"""The shared tower in front of its graphs, for which recorded passes stand in: what it looks at, and when."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from accuracy import relative_error
from eager_graph import EagerRecorder, device_operators
from reference import random_rows, small_model
from torch import Tensor

from ernie_vit import hf
from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.runner import GraphRunner
from ernie_vit.shared_tower import SharedTower, _OwnRows

GRID = [[1, 4, 4], [1, 6, 8]]
FLOAT32 = 2e-6  # relative; a float32 pass over two blocks that adds in another order


@pytest.fixture
def host() -> Any:
    model = small_model().requires_grad_(False)
    hf.patch(model, backend="torch")
    return model.model.vision_tower


@pytest.fixture
def shared(host: Any) -> SharedTower:
    shared: SharedTower = host.forward.__self__.shared
    rows: Any = _OwnRows()
    shared.graphs = GraphRunner(
        shared.tower, rows, device_operators(), [Capacity(128, 8)], record=EagerRecorder(), lazy=True
    )
    return shared


def encode(host: Any) -> Tensor:
    rows: Tensor = host(random_rows(GRID), torch.tensor(GRID)).last_hidden_state
    return rows


def theirs(host: Any) -> Tensor:
    """What the host's own forward computes, patched or not."""
    rows: Tensor = type(host).forward(host, random_rows(GRID), torch.tensor(GRID)).last_hidden_state
    return rows


def test_layers_and_weights_are_looked_at_behind_the_replay(
    host: Any, shared: SharedTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    graphs, look = shared.graphs, shared._weights_obstacle
    monkeypatch.setattr(shared, "graphs", lambda *call: order.append("replay") or graphs(*call))
    monkeypatch.setattr(shared, "_weights_obstacle", lambda: order.append("look") or look())
    assert relative_error(encode(host), theirs(host)) < FLOAT32
    assert order == ["replay", "look"]


@pytest.mark.parametrize("part", ["blocks.1", "blocks.1.mlp", "blocks.1.mlp.fc1", "blocks.0.mlp.act", "ln"])
def test_what_graphs_of_replaced_layers_computed_is_dropped(host: Any, shared: SharedTower, part: str) -> None:
    encode(host)
    host.set_submodule(part, deepcopy(host.get_submodule(part)))
    for parameter in host.get_submodule(part).parameters():
        parameter.data.mul_(1.5)
    assert torch.equal(encode(host), theirs(host))
    assert shared.graphs is None
    assert torch.equal(encode(host), theirs(host))
    assert shared.fallbacks == {"a layer of the tower was replaced": 2}
    assert shared.calls == 1


def test_weights_that_move_leave_their_graphs(host: Any, shared: SharedTower) -> None:
    encode(host)
    fc1 = host.blocks[0].mlp.fc1
    fc1.weight = torch.nn.Parameter(2 * fc1.weight, requires_grad=False)
    assert relative_error(encode(host), theirs(host)) < FLOAT32
    assert shared.graphs is None
    assert shared.calls == 2
    fc1.weight = torch.nn.Parameter(fc1.weight.to("meta"), requires_grad=False)  # as offloading leaves it
    assert shared.obstacle(random_rows(GRID)) == "weights offloaded or on several devices"


def test_offloaded_behind_a_capture_is_the_hosts(
    host: Any, shared: SharedTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(host)
    monkeypatch.setattr(host.forward.__self__, "original", lambda *_, **__: "the host's own")
    fc1 = host.blocks[0].mlp.fc1
    fc1.weight = torch.nn.Parameter(fc1.weight.to("meta"), requires_grad=False)
    assert host(random_rows(GRID), torch.tensor(GRID)) == "the host's own"
    assert shared.fallbacks == {"weights offloaded or on several devices": 1}


def test_a_gradient_is_the_hosts_before_and_behind_a_replay(host: Any, shared: SharedTower) -> None:
    encode(host)
    host.ln.weight.requires_grad_(True)
    encode(host).sum().backward()
    assert host.ln.weight.grad is not None
    assert shared.fallbacks == {"gradient needed": 1}
    assert shared.graphs is not None
