"""How many programs a persistent kernel starts."""

from functools import cache

import torch

INTERPRETED_PROGRAMS = 3  # few, because they run one after the other, and more than one, so that tests see the stride


def persistent_programs(blocks: int, device: torch.device, *, per_multiprocessor: int) -> int:
    """``blocks``, or as many programs as the device runs at once if that is less.

    The programs walk over the live blocks, so that blocks past the live rows cost no program.
    """
    if device.type == "cpu":
        return min(blocks, INTERPRETED_PROGRAMS)
    return min(blocks, multiprocessors(device) * per_multiprocessor)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
