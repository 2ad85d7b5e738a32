"""One rank of two: builds the model with ``mm_encoder_tp_mode="data"``, encodes, and stores what it got.

usage: data_parallel_rank.py RANK FOLDER
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from reference import random_rows
from vllm_host import engine_config, fill_model, graph_manager, pretend_cpu_build, vllm_world

from ernie_vit import vllm_plugin
from ernie_vit.vllm_model import with_our_tower

# One image leaves the second rank without any.
GRIDS = [[[1, 4, 4]], [[1, 4, 4], [1, 6, 8], [1, 2, 2]], [[4, 4, 4], [2, 6, 4]]]


def main(rank: int, folder: Path) -> None:
    pretend_cpu_build()
    from vllm.model_executor.models import ernie45_vl

    class Stock(ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration):  # type: ignore[misc,name-defined]
        """vLLM's class without its language model of 28 billion parameters."""

        __module__ = ernie45_vl.__name__

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002
            fill_model(self)

    ours: Any = with_our_tower(Stock)
    options = {"mm_encoder_tp_mode": "data", "tensor_parallel_size": 2}
    stored: dict[str, Any] = {}
    with vllm_world(folder, rank, 2) as config, torch.inference_mode():
        model = ours(vllm_config=engine_config(**options))
        model.attach(engine_config(**options), backend="torch")
        stored["eager"] = [model.embed_multimodal(**batch(grid)) for grid in GRIDS]
        stored["calls"] = vllm_plugin.stats(model)["calls"]
        if hasattr(model, "get_encoder_cudagraph_config"):
            model.attach(engine_config(cudagraph_mm_encoder=True, **options), backend="torch")
            manager = graph_manager(model, config, budgets=[32, 64, 128], max_items=4, ranks=2)
            stored["manager"] = [manager.execute(batch(grid)) for grid in GRIDS]
            stored["replays"] = vllm_plugin.stats(model)["replays"]
        torch.save(stored, folder / f"{rank}.pt")


def batch(grid: list[list[int]]) -> dict[str, torch.Tensor]:
    rows, sizes = random_rows(grid), torch.tensor(grid)
    if grid[0][0] > 1:
        return {"pixel_values_videos": rows, "video_grid_thw": sizes}
    return {"pixel_values": rows, "image_grid_thw": sizes}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
