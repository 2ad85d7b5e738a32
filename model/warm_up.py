"""Compiling every kernel that an encoder can need, so that no input compiles one later."""

from collections.abc import Iterable
from itertools import product

import torch

from ernie_vit.kernels.tiles import attention, linear
from ernie_vit.model.metadata import plan_sequences, unpack_metadata
from ernie_vit.model.operators import Operators, ResamplerOperators
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower


def row_regimes(device: torch.device) -> tuple[int, ...]:
    """Row counts up to which every kernel keeps its tile on ``device``, ascending."""
    return tuple(sorted({*linear.row_regimes(device), *attention.ROW_BOUNDS}))


def row_sizes(device: torch.device) -> tuple[int, ...]:
    """A number of rows in each of these regimes, the one above the last bound included."""
    regimes = row_regimes(device)
    return (*regimes, regimes[-1] + 1)


def warm_up(tower: VisionTower, ops: Operators, sizes: Iterable[int] | None = None) -> None:
    """Run every variant once: each row regime with each kind and number of sequences, without a live row.

    The kernels choose their variants by the rows that a call has room for and compute the live ones alone, so this
    compiles everything and computes nothing. ``sizes``: these numbers of rows alone, in place of all regimes.
    """
    weight = tower.patch_embed.proj.weight
    max_seqlens = (*attention.SEQLEN_BOUNDS, attention.SEQLEN_BOUNDS[-1] + 1)
    with torch.no_grad():
        for rows in row_sizes(weight.device) if sizes is None else sizes:
            pixel_values = weight.new_zeros(rows, weight.shape[1])
            for max_sequences, max_seqlen in product(attention.SEQUENCE_COUNTS, max_seqlens):
                plan = plan_sequences((), max_sequences=max_sequences, max_seqlen_override=max_seqlen)
                metadata = unpack_metadata(torch.from_numpy(plan.packed).to(weight.device), plan)
                tower(pixel_values, metadata, ops)
            # the processor's rows are float32, whatever the tower's dtype; only the patch embedding sees them
            tower.patch_embed(pixel_values.float(), metadata.num_rows, ops)


def warm_up_resampler(resampler: Resampler, ops: ResamplerOperators, sizes: Iterable[int] | None = None) -> None:
    """The same for a resampler on the kernels: each row regime for its merge windows and for its tokens."""
    weight = resampler.spatial_linear.fc1.weight
    live_counts = torch.zeros(3, dtype=torch.int32, device=weight.device)
    with torch.no_grad():
        for rows in row_sizes(weight.device) if sizes is None else sizes:
            hidden_states = weight.new_zeros(4 * rows, weight.shape[1] // 4)  # as many merge windows as tokens
            resampler(hidden_states, live_counts.new_zeros(rows, 2), live_counts, ops)
