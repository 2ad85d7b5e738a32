"""The plans fit together: what is checked is timed, and what is replayed fits its graph."""

from bisect import bisect_left

import pytest
import torch

from bench.calls import new_sizes
from bench.plan import INPUTS, MIX, Plan, choose_plan, num_patches, pixels
from ernie_vit.kernels.dispatch import EARLY_ROWS
from ernie_vit.kernels.tiles.attention import ROW_BOUNDS
from ernie_vit.kernels.tiles.linear import HOPPER_BOUNDS


@pytest.fixture(params=["tiny", "quick", "full"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """As on a machine with a GPU and without one; making a plan does not touch it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param != "tiny")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return choose_plan(quick=request.param == "quick")


def test_what_is_named_is_an_input(plan: Plan) -> None:
    assert {*plan.checked, *plan.by_block} <= plan.inputs.keys()
    assert plan.checked
    assert plan.by_block


def test_what_is_replayed_fits_its_graph(plan: Plan) -> None:
    for sizes, (rows, sequences) in [(sizes, plan.capacity) for sizes in plan.live] + [
        (plan.padded, capacity) for capacity in plan.capacities
    ]:
        assert num_patches(sizes) <= rows
        assert len(sizes) <= sequences
    # vLLM wants a token for each image that a graph may hold
    assert all(sequences <= rows // 4 for rows, sequences in (plan.capacity, *plan.capacities))
    # the two padding curves meet in a point
    assert plan.capacity in plan.capacities or plan.quick
    assert max(map(num_patches, ([size] for size in plan.images))) <= plan.capacity[0]


def test_a_plan_with_graphs_of_its_own_needs_no_other_kernels(plan: Plan) -> None:
    """The kernels of its graphs' row regimes are compiled ahead; one more would be compiled while others wait."""
    if plan.graphs is None:
        return
    bounds = sorted({*HOPPER_BOUNDS, *ROW_BOUNDS, EARLY_ROWS})
    compiled = {bisect_left(bounds, rows) for rows, _ in plan.graphs}
    packed = [[plan.neighbours[0], size, plan.neighbours[1]] for size in plan.images]
    alone = [[size] for size in plan.images]
    small = new_sizes(num_patches(next(iter(plan.inputs.values()))), plan)
    calls = [*plan.inputs.values(), *alone, *packed, *plan.live, plan.padded, *small, *plan.mix]
    assert {bisect_left(bounds, num_patches(sizes)) for sizes in calls} <= compiled
    assert {bisect_left(bounds, rows) for rows, _ in (plan.capacity, *plan.capacities)} <= compiled


def test_the_mix_is_of_images_and_names_say_how_many_patches() -> None:
    assert len(MIX) == 60
    assert all(frames == 1 for sizes in MIX for frames, _, _ in sizes)
    for name, sizes in INPUTS.items():
        times, _, patches = name.removeprefix("video ").rpartition(" x ")
        assert num_patches(sizes) == int(patches.replace(",", "")) * int(times or 1)


def test_pixels_are_random() -> None:
    rows = pixels([(1, 4, 6), (2, 2, 2)], device="cpu", dtype=torch.float32)
    assert rows.shape == (32, 588)
    assert not torch.equal(rows, pixels([(1, 4, 6), (2, 2, 2)], device="cpu", dtype=torch.float32))
