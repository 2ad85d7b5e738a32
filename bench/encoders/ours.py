"""Our encoder: eager, from its graphs, and from graphs that hold the resampler too where it can capture such."""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.compile_ahead import compile_ahead
from bench.encoders.encoder import Encoder, OpenGraphs, sharing
from bench.plan import Plan
from bench.records import Capture
from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder
from ernie_vit.graph.capacity import MIB, graph_bytes
from ernie_vit.kernels.tiles import attention
from ernie_vit.model.metadata import plan_sequences, unpack_metadata
from ernie_vit.model.warm_up import row_regimes

LIBRARY = "ours"
EAGER, GRAPH, WITH_RESAMPLER = "ours eager", "ours graph", "ours graph with resampler"
MAX_TOKENS = 4096  # of the largest graph, as vLLM's


@contextmanager
def open_ours(weights: ErnieVisionEncoder) -> Iterator[Encoder]:
    """Our eager encoder, which opens its graphs on a GPU."""
    graphs: dict[str, OpenGraphs] = {}
    if weights.backend == "triton":
        weights.warm_up()
        graphs[GRAPH] = partial(open_graphs, weights, GRAPH)
        if "resampler" in inspect.signature(ErnieVisionEncoder.capture).parameters:
            graphs[WITH_RESAMPLER] = partial(open_graphs, weights, WITH_RESAMPLER, resampler=True)
    yield Encoder(EAGER, LIBRARY, weights, tower=weights.vision_tower, graphs=graphs)


@contextmanager
def open_graphs(
    weights: ErnieVisionEncoder, provider: str, capacities: Sequence[tuple[int, int]] | None = None, **options: Any
) -> Iterator[Encoder]:
    """Graphs for up to ``MAX_TOKENS``, or of ``capacities``. What compiles has been compiled."""
    encoder = sharing(weights, backend="triton")
    chosen: dict[str, Any] = {"max_tokens": MAX_TOKENS} if capacities is None else {"capacities": capacities}
    torch.cuda.synchronize()
    started = time.perf_counter()
    encoder.capture(**chosen, **options)
    seconds = time.perf_counter() - started
    graphs = encoder._graphs
    assert graphs is not None
    capture = Capture(
        provider=provider,
        graphs=len(graphs.capacities),
        seconds=seconds,
        mebibytes=encoder.graph_stats().memory_bytes / MIB,
        # what the resampler adds is not estimated
        estimate=None if options else graph_bytes(graphs.capacities, encoder.config, encoder.dtype) / MIB,
    )
    try:
        yield Encoder(provider, LIBRARY, encoder, capture=capture)
    finally:
        encoder.release()


def compile_kernels(plan: Plan) -> None:
    """Compile the tower's kernels in as many processes as there are cores; they are then in Triton's cache on disk."""
    regimes = row_regimes(plan.device)
    compile_ahead(partial(_compile_rows, plan.config, plan.dtype), (*regimes, regimes[-1] + 1))


def _compile_rows(config: ErnieVisionConfig, dtype: torch.dtype, rows: int) -> None:
    """One row regime of ``warm_up``, by a single block: all blocks run the same kernels."""
    one_block = ErnieVisionConfig(**{**vars(config), "depth": 1})
    with torch.device("cuda"), torch.no_grad():
        encoder = ErnieVisionEncoder(one_block, backend="triton").to(dtype)
        pixel_values = torch.zeros(rows, config.patch_width, dtype=dtype)
        max_seqlens = (*attention.SEQLEN_BOUNDS, attention.SEQLEN_BOUNDS[-1] + 1)
        for max_sequences, max_seqlen in product(attention.SEQUENCE_COUNTS, max_seqlens):
            plan = plan_sequences([], max_sequences=max_sequences, max_seqlen_override=max_seqlen)
            metadata = unpack_metadata(torch.from_numpy(plan.packed).cuda(), plan)
            encoder.vision_tower(pixel_values, metadata, encoder._operators())
        encoder.vision_tower.patch_embed(pixel_values.float(), metadata.num_rows, encoder._operators())
    torch.cuda.synchronize()
