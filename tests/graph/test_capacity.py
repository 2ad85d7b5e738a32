"""Capacities: defaults that follow the model, users' lists, and their memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ernie_vit.graph.capacity import (
    LARGEST_IMAGE_TOKENS,
    MIB,
    Capacity,
    affordable_capacities,
    check_capacities,
    default_capacities,
    graph_bytes,
)
from ernie_vit.graph.inputs import allocate_inputs
from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.operators import Operators, ResamplerOperators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower

REGIMES = (384, 832, 1536, 2560, 5376, 8448)
FULL_SIZE = ErnieVisionConfig()

limits = st.one_of(st.none(), st.integers(1, 20_000))


@given(regimes=st.sets(st.integers(1, 5000).map(lambda n: 4 * n)).map(sorted), max_tokens=limits, max_sequences=limits)
def test_default_capacities_are_possible_ascending_and_cover_the_limit(regimes, max_tokens, max_sequences):
    capacities = default_capacities(regimes, max_tokens=max_tokens, max_sequences=max_sequences)

    assert check_capacities(capacities) == capacities
    assert capacities[-1].rows == 4 * (max_tokens or LARGEST_IMAGE_TOKENS)


@pytest.mark.parametrize("max_tokens", [4096, 5000])
def test_the_last_default_capacity_covers_max_tokens(max_tokens):
    capacities = default_capacities(REGIMES, max_tokens=max_tokens)

    assert [c.rows for c in capacities] == [*REGIMES, 4 * max_tokens]
    assert capacities[-1].holds(4 * max_tokens, 16)


def test_a_capacity_between_regimes_is_the_largest():
    assert [c.rows for c in default_capacities(REGIMES, max_tokens=384)] == [384, 832, 1536]


def test_default_capacities_hold_as_many_small_images_as_their_rows_do():
    assert all(c.holds(256 * (c.rows // 256), c.rows // 256) for c in default_capacities(REGIMES))


@pytest.mark.parametrize("name", ["max_tokens", "max_sequences"])
def test_limits_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected a positive number, got 0"):
        default_capacities(REGIMES, **{name: 0})


def test_a_list_of_pairs_becomes_capacities():
    assert check_capacities([(256, 4), Capacity(1024, 8)]) == (Capacity(256, 4), Capacity(1024, 8))


@pytest.mark.parametrize(
    ("capacities", "message"),
    [
        pytest.param([], "at least one", id="none"),
        pytest.param([(256, 4), (0, 1)], r"multiple of 4 rows.*rows=0", id="no rows"),
        pytest.param([(258, 4)], r"multiple of 4 rows.*rows=258", id="half a token"),
        pytest.param([(256, 0)], r"1 to 64 sequences.*sequences=0", id="no sequence"),
        pytest.param([(256, 65)], r"1 to 64 sequences.*sequences=65", id="sequences without rows"),
        pytest.param([(1024, 8), (256, 4)], "ascending list", id="descending"),
        pytest.param([(256, 4), (256, 4)], "without repeats", id="twice"),
    ],
)
def test_impossible_lists_are_refused_and_named(capacities, message):
    with pytest.raises(ValueError, match=message):
        check_capacities(capacities)


class _Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._alive = WeakTensorKeyDictionary()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func is torch.ops.aten.empty.memory_format:
            self._alive[out] = out.nbytes
            self.bytes = max(self.bytes, sum(self._alive.values()))
        return out


def _allocating_operators() -> Operators:
    """What the kernels allocate, without computing."""

    def linear(x: Tensor, weight: Tensor, *_, **__) -> Tensor:
        return torch.empty(len(x), len(weight), dtype=weight.dtype)

    def patch_embed(pixel_values: Tensor, weight: Tensor, **_) -> Tensor:
        padded = -(-weight.shape[1] // 8) * 8  # numbers of 16 bits, of whose copies every row is aligned
        copies = (torch.empty(len(matrix), padded, dtype=weight.dtype) for matrix in (pixel_values, weight))
        return linear(*copies)

    def mlp(x: Tensor, fc1_weight: Tensor, _, fc2_weight: Tensor, *__, **___) -> Tensor:
        return linear(linear(x, fc1_weight), fc2_weight)

    def layer_norm(x: Tensor, *_, index: Tensor | None = None, **__) -> Tensor:
        return torch.empty(len(x if index is None else index), x.shape[1], dtype=x.dtype)

    return Operators(
        linear=linear,
        patch_embed=patch_embed,
        mlp=mlp,
        layer_norm=layer_norm,
        rotary_table=lambda *_, num_rows, head_dim, **__: torch.empty(num_rows, 2, head_dim // 2),
        qkv_rotary=lambda x, weight, *_, num_heads, **__: linear(x, weight).unflatten(1, (3, num_heads, -1)),
        attention=lambda q, *_, **__: torch.empty(q.shape, dtype=q.dtype),
        attention_arguments=lambda *_, **__: {},
        resampler=ResamplerOperators(linear, layer_norm, rms_norm=layer_norm),
    )


def test_graph_bytes_follows_the_towers_peak(resampler):
    """The tensors that live at once in a forward pass fit into the estimate; the rest is segments that do not join.

    The resampler's find room where the tower's were.
    """
    config = ErnieVisionConfig(depth=2)
    capacity = Capacity(16384, 64)
    tower = VisionTower(config).to(torch.bfloat16)
    inputs = allocate_inputs((capacity,), config.patch_width, torch.bfloat16, torch.device("cpu"))[capacity]
    with torch.no_grad(), _Peak() as peak:
        ops, metadata = _allocating_operators(), inputs.metadata
        hidden_states = tower(inputs.pixel_values, metadata, ops)
        if resampler:
            Resampler(config).to(torch.bfloat16)(
                hidden_states, metadata.temporal_rows, metadata.live_counts, ops.resampler
            )

    static = inputs.pixel_values.nbytes + inputs.packed.nbytes
    if resampler:
        static += capacity.rows // 4 * config.text_hidden_size * 2
    estimate = graph_bytes([capacity], config, torch.bfloat16, resampler=resampler)
    row = config.hidden_size * 2
    assert peak.bytes == capacity.rows * (4 * row + 4 * row + 4 * config.head_dim)
    # the fused projection's segment serves nothing else, and sizes are rounded up to segments
    assert 0 <= estimate - static - peak.bytes - capacity.rows * 3 * row < 20 * MIB + 4 * MIB


def test_the_default_graphs_for_4096_tokens_stay_under_600_mib(resampler):
    capacities = default_capacities(REGIMES, max_tokens=4096)
    assert graph_bytes(capacities, FULL_SIZE, torch.bfloat16, resampler=resampler) < 600 * MIB


@given(rows=st.integers(1, 10_000).map(lambda n: 4 * n), smaller=st.integers(1, 10_000).map(lambda n: 4 * n))
def test_smaller_graphs_live_in_the_largest_ones_memory(rows, smaller):
    largest = Capacity(rows, 1)
    both = sorted({largest, Capacity(min(rows, smaller), 1)})
    alone = graph_bytes([largest], FULL_SIZE, torch.bfloat16)
    assert alone <= graph_bytes(both, FULL_SIZE, torch.bfloat16) <= alone + 22 * MIB


@given(free=st.integers(0, 10_000).map(lambda n: n * MIB), resampler=st.booleans())
def test_affordable_capacities_leave_half_of_the_memory(free, resampler):
    capacities = default_capacities(REGIMES)
    chosen = affordable_capacities(capacities, free, FULL_SIZE, torch.bfloat16, resampler=resampler)

    assert chosen == capacities[: len(chosen)]
    assert chosen

    def cost(capacities):
        return graph_bytes(capacities, FULL_SIZE, torch.bfloat16, resampler=resampler)

    assert len(chosen) == 1 or 2 * cost(chosen) <= free
    if len(chosen) < len(capacities):
        assert 2 * cost(capacities[: len(chosen) + 1]) > free
