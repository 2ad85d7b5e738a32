"""Compiling every kernel that a tower can need, so that no input compiles one later."""

import torch

from ernie_vit.kernels.tiles.linear import row_regimes
from ernie_vit.model.metadata import plan_sequences, unpack_metadata
from ernie_vit.model.operators import Operators
from ernie_vit.model.tower import VisionTower

# Longest sequences on either side of where attention's tile changes (kernels/tiles/attention.py).
MAX_SEQLENS = (256, 2048, 4096)


def warm_up(tower: VisionTower, ops: Operators) -> None:
    """Run every variant once: each row regime with each kind of sequence length, without a live row.

    The kernels choose their variants by the rows that a call has room for and compute the live ones alone, so this
    compiles everything and computes nothing.
    """
    weight = tower.patch_embed.proj.weight
    regimes = row_regimes(weight.device)
    with torch.no_grad():
        for rows in (*regimes, max(regimes, default=0) + 4):
            pixel_values = weight.new_zeros(rows, weight.shape[1])
            for max_seqlen in MAX_SEQLENS:
                plan = plan_sequences([], max_sequences=1, max_seqlen_override=max_seqlen)
                metadata = unpack_metadata(torch.from_numpy(plan.packed).to(weight.device), plan)
                tower(pixel_values, metadata, ops)
            # the processor's rows are float32, whatever the tower's dtype; only the patch embedding sees them
            tower.patch_embed(pixel_values.float(), metadata.num_rows, ops)
