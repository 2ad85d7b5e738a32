"""Our encoder: eager and from its graphs, each with the resampler in PyTorch or on the kernels."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.encoders.encoder import Encoder, OpenGraphs, sharing
from bench.plan import Plan
from bench.records import Capture
from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder
from ernie_vit.graph.capacity import MIB, graph_bytes
from ernie_vit.model.operators import choose_operators
from ernie_vit.model.warm_up import row_sizes, warm_up, warm_up_resampler

LIBRARY = "ours"
GRAPH = "ours graph"
TOWER, RESAMPLER = "tower", "resampler"
MAX_TOKENS = 4096  # of the largest graph, as vLLM's


@contextmanager
def open_ours(weights: ErnieVisionEncoder, plan: Plan) -> Iterator[Encoder]:
    """Our eager encoder, which opens its graphs on a GPU. The resampler is PyTorch's, behind the graph."""
    graphs: dict[str, OpenGraphs] = {}
    if weights.backend == "triton":
        warm_up(weights.vision_tower, choose_operators("triton"), tower_rows(plan))
        graphs[GRAPH] = partial(open_graphs, weights, plan, GRAPH, LIBRARY, resampler=False)
    yield Encoder("ours eager", LIBRARY, weights, tower=weights.vision_tower, graphs=graphs)


@contextmanager
def open_ours_with_resampler(weights: ErnieVisionEncoder, plan: Plan) -> Iterator[Encoder]:
    """The same with the resampler on the kernels and in the graphs, which gives other bits.

    Raises:
        ValueError: the kernels cannot run here.
    """
    if weights.backend != "triton":
        raise ValueError(weights.backend_reason)
    provider, library = "ours graph with resampler", "ours with resampler"
    encoder = sharing(weights, backend="triton", stages={RESAMPLER: "triton"})
    encoder.warm_up()
    graphs = {provider: partial(open_graphs, weights, plan, provider, library, resampler=True)}
    yield Encoder("ours eager with resampler", library, encoder, tower=encoder.vision_tower, graphs=graphs)


@contextmanager
def open_graphs(
    weights: ErnieVisionEncoder,
    plan: Plan,
    provider: str,
    library: str,
    capacities: Sequence[tuple[int, int]] | None = None,
    *,
    resampler: bool,
) -> Iterator[Encoder]:
    """Graphs of ``capacities``, else of the plan, else the default set for up to ``MAX_TOKENS``."""
    encoder = sharing(weights, backend="triton")
    capacities = capacities or plan.graphs
    chosen: dict[str, Any] = {"max_tokens": MAX_TOKENS} if capacities is None else {"capacities": capacities}
    torch.cuda.synchronize()
    started = time.perf_counter()
    encoder.capture(**chosen, resampler=resampler)  # everything has been compiled
    seconds = time.perf_counter() - started
    graphs = encoder._graphs
    assert graphs is not None
    capture = Capture(
        provider=provider,
        graphs=len(graphs.capacities),
        seconds=seconds,
        mebibytes=encoder.graph_stats().memory_bytes / MIB,
        estimate=graph_bytes(graphs.capacities, encoder.config, encoder.dtype, resampler=resampler) / MIB,
    )
    try:
        yield Encoder(provider, library, encoder, capture=capture)
    finally:
        encoder.release()


def tower_rows(plan: Plan) -> Sequence[int]:
    """Numbers of rows whose kernels a run needs: of every regime, or those of the plan's graphs."""
    return row_sizes(plan.device) if plan.graphs is None else [rows for rows, _ in plan.graphs]


def compilations(plan: Plan) -> list[partial[None]]:
    """Jobs for ``compile_ahead``: all kernels that a run's encoders need, a row regime each."""
    parts = [(TOWER, rows) for rows in tower_rows(plan)]
    if not plan.quick:
        parts += [(RESAMPLER, rows) for rows in row_sizes(plan.device)]
    return [partial(compile_rows, plan.config, plan.dtype, plan.device, part, rows) for part, rows in parts]


def compile_rows(config: ErnieVisionConfig, dtype: torch.dtype, device: torch.device, part: str, rows: int) -> None:
    """Warm up the tower or the resampler for a single row regime, that of ``rows``.

    By one block: all blocks run the same kernels.
    """
    with device:
        encoder = ErnieVisionEncoder(replace(config, depth=1), backend="triton").to(dtype)
    operators = choose_operators("triton", {RESAMPLER: "triton"})
    if part == TOWER:
        warm_up(encoder.vision_tower, operators, [rows])
    else:
        warm_up_resampler(encoder.resampler_model, operators.resampler, [rows])
