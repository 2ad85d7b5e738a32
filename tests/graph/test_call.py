"""A call's plan: the frames of its items, cut as packed, each told where it belongs."""

from hypothesis import given
from hypothesis import strategies as st

from ernie_vit.graph.call import plan_call
from ernie_vit.graph.capacity import Capacity

side = st.integers(1, 5).map(lambda n: 2 * n)
sizes = st.lists(st.tuples(st.sampled_from([1, 1, 2, 4]), side, side), max_size=8).map(tuple)
CAPACITIES = (Capacity(16, 2), Capacity(64, 4), Capacity(96, 3))


@given(sizes)
def test_plans_cover_the_calls_frames_in_order(sizes):
    call = plan_call(sizes, CAPACITIES)

    frames = tuple((1, height, width) for count, height, width in sizes for _ in range(count))
    if call.capacity is None:
        assert tuple(frame for plan in call.plans for frame in plan.grid_thw) == frames
    assert call.whole.grid_thw == sizes
    assert call.whole.num_patches == sum(chunk.rows for chunk in call.chunks)
    assert [plan.num_patches for plan in call.plans] == [chunk.rows for chunk in call.chunks]


@given(sizes)
def test_plans_have_the_static_size_of_their_capacity(sizes):
    call = plan_call(sizes, CAPACITIES)

    for chunk, plan in zip(call.chunks, call.plans, strict=True):
        if chunk.capacity is not None:
            assert (plan.max_seqlen, plan.max_sequences) == (chunk.capacity.rows, chunk.capacity.sequences)
            assert plan.num_frames <= plan.max_sequences
    assert (call.capacity is None) == (len(call.chunks) != 1 or call.chunks[0].capacity is None)
    if call.capacity is not None:
        assert call.plans == (call.whole,)
    else:  # a captured resampler has nothing to do in a cut call: its frames are resampled together
        assert all(plan.packed[:4].tolist() == [plan.num_patches, 0, 0, 0] for plan in call.plans)
