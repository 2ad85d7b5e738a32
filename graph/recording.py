"""Recording a forward pass so that it can be replayed."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Recording(Protocol):
    """A recorded forward pass: ``replay()`` computes ``outputs`` again from what the input buffers hold then."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None: ...

    def release(self) -> None: ...


Forward = Callable[[], tuple[Tensor, ...]]
Recorder = Callable[[Forward], Recording]


class CudaGraphRecorder:
    """Records CUDA graphs into one memory pool, on a stream of its own.

    Call it for the largest graph first: the smaller ones then live in its memory, also their outputs. So a replay may
    overwrite what another graph has put out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, forward: Forward) -> Recording:
        # entered here as well: a capture that fails leaves its own stream behind as the current one
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                forward()  # compiles and loads every kernel: in a capture that would be an error
                return _CudaGraph(forward, self._pool, self._stream)


class _CudaGraph:
    def __init__(self, forward: Forward, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread's allocations and copies neither fail nor end up in the graph
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.outputs = forward()
        except BaseException:
            self._graph.reset()
            raise

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        del self.outputs
        self._graph.reset()
