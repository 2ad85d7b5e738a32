"""``mm_encoder_tp_mode="data"``: two ranks, each encodes its own images, some calls leave one without any."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accuracy import relative_error
from vllm_host import build_model
from vllm_plugin.data_parallel_rank import GRIDS, batch

FLOAT32 = 2e-6  # relative; a float32 pass over two blocks that adds in another order


def test_each_rank_encodes_its_own_images(tmp_path: Path, vllm_config: Any) -> None:  # noqa: ARG001
    from vllm.model_executor.models import ernie45_vl

    script = Path(__file__).with_name("data_parallel_rank.py")
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]

    stock = build_model(ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration)
    with torch.inference_mode():
        expected = [stock.embed_multimodal(**batch(grid)) for grid in GRIDS]
    stored = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for path in ("eager", "manager") if "manager" in stored[0] else ("eager",):
        for rank in stored:
            for tokens, exact in zip(rank[path], expected, strict=True):
                assert [part.shape for part in tokens] == [part.shape for part in exact]
                assert all(relative_error(out, item) < FLOAT32 for out, item in zip(tokens, exact, strict=True))
    # the second rank had nothing to do in the first call
    assert [rank["calls"] for rank in stored] == [len(GRIDS), len(GRIDS) - 1]
    if "manager" in stored[0]:
        assert [rank["replays"] for rank in stored] == [len(GRIDS), len(GRIDS) - 1]
