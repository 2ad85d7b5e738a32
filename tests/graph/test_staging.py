"""The staging ring: copies what it is given, and keeps it until it has been copied."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ernie_vit.graph.staging import StagingRing

SIZE = 64
plans = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=SIZE), max_size=40)


@given(plans, st.integers(1, 4))
def test_copies_arrive_and_the_rest_of_the_target_stays(plans, depth):
    ring = StagingRing(SIZE, torch.device("cpu"), depth)
    for plan in plans:
        source, target = np.array(plan, np.int32), torch.full((SIZE,), 7, dtype=torch.int32)
        ring.copy(source, target)
        assert target[: len(plan)].tolist() == plan
        assert (target[len(plan) :] == 7).all()


def test_the_source_may_change_at_once():
    ring = StagingRing(SIZE, torch.device("cpu"))
    source, target = np.arange(8, dtype=np.int32), torch.empty(8, dtype=torch.int32)
    ring.copy(source, target)
    source[:] = -1
    assert target.tolist() == list(range(8))


@pytest.mark.gpu
def test_many_copies_in_flight_each_keep_their_values():
    device = torch.device("cuda", torch.cuda.current_device())
    ring = StagingRing(1 << 16, device)
    targets = [torch.empty(1 << 16, dtype=torch.int32, device=device) for _ in range(100)]
    torch.cuda._sleep(100_000_000)  # all copies queue behind it
    for i, target in enumerate(targets):
        ring.copy(np.full(1 << 16, i, np.int32), target)
    assert all(bool((target == i).all()) for i, target in enumerate(targets))
