"""Packing: every frame once, in order, within a capacity, in as few replays as possible."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from ernie_vit.graph.capacity import Capacity
from ernie_vit.graph.packing import Chunk, pack_frames

# small numbers, so that edges are hit
frames = st.lists(st.integers(1, 30).map(lambda n: 4 * n), max_size=24)
capacities = st.sets(
    st.builds(Capacity, st.integers(1, 40).map(lambda n: 4 * n), st.integers(1, 8)), min_size=1, max_size=5
).map(sorted)


@given(frames, capacities)
def test_every_frame_once_and_in_order(lengths, capacities):
    chunks = pack_frames(lengths, capacities)

    covered = [frame for chunk in chunks for frame in range(chunk.first, chunk.end)]
    assert covered == list(range(len(lengths)))
    assert [chunk.rows for chunk in chunks] == [sum(lengths[chunk.first : chunk.end]) for chunk in chunks]
    assert all(chunk.first < chunk.end for chunk in chunks)


@given(frames, capacities)
def test_every_chunk_has_the_smallest_capacity_that_holds_it(lengths, capacities):
    for chunk in pack_frames(lengths, capacities):
        holding = [c for c in capacities if chunk.rows <= c.rows and chunk.end - chunk.first <= c.sequences]
        assert chunk.capacity == (min(holding) if holding else None)


@given(frames, capacities)
def test_only_a_frame_that_fits_nowhere_goes_without_a_graph(lengths, capacities):
    largest = max(c.rows for c in capacities)
    eager = [chunk for chunk in pack_frames(lengths, capacities) if chunk.capacity is None]

    assert [chunk.end - chunk.first for chunk in eager] == [1] * len(eager)
    assert [chunk.first for chunk in eager] == [i for i, length in enumerate(lengths) if length > largest]


@given(frames, capacities)
def test_no_cut_needs_fewer_chunks(lengths, capacities):
    @cache
    def fewest(first: int) -> int:
        """Chunks of the frames from ``first`` on, by trying every cut."""
        if first == len(lengths):
            return 0
        ends = [
            end
            for end in range(first + 1, len(lengths) + 1)
            if end == first + 1 or any(c.holds(sum(lengths[first:end]), end - first) for c in capacities)
        ]
        return 1 + min(fewest(end) for end in ends)

    assert len(pack_frames(lengths, capacities)) == fewest(0)


def test_no_frames_need_no_graph():
    assert pack_frames([], [Capacity(256, 4)]) == []


def test_a_video_of_many_small_frames_is_cut_by_the_number_of_sequences():
    capacity = Capacity(1024, 4)
    assert pack_frames([16] * 8, [capacity]) == [Chunk(0, 4, 64, capacity), Chunk(4, 8, 64, capacity)]


def test_a_frame_too_large_stands_alone_between_its_neighbours():
    capacity = Capacity(256, 4)
    assert pack_frames([64, 1024, 64], [capacity]) == [
        Chunk(0, 1, 64, capacity),
        Chunk(1, 2, 1024, None),
        Chunk(2, 3, 64, capacity),
    ]
