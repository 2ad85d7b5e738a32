"""Pinned host buffers for the plans: a copy from them runs while the host goes on."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class StagingRing:
    """A ring of pinned int32 buffers; one is written again only after the copy from it has ended.

    Nothing waits until ``depth`` copies are queued; from then on the host stays that many copies ahead.
    """

    def __init__(self, size: int, device: torch.device, depth: int = 16) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(depth)]
        self._next = 0

    def copy(self, source: npt.NDArray[np.int32], target: Tensor) -> None:
        """``target[: len(source)] = source`` on the current stream of the target's device."""
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()  # returns at once if the event was never recorded
        self._arrays[index][: len(source)] = source
        target[: len(source)].copy_(self._buffers[index][: len(source)], non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device.index))
