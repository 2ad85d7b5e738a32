"""The benchmark's adapter of vLLM: the real classes with the weights of an encoder of ours compute what that does."""

import pytest
import torch
from accuracy import relative_error

from bench.accuracy import Blocks
from bench.encoders.encoder import Encoder, random_encoder, sharing
from bench.plan import choose_plan, pixels

TOLERANCE = 1e-5  # float32, two blocks


@torch.no_grad()
@pytest.mark.usefixtures("vllm_config")
def test_it_computes_what_ours_does() -> None:
    from bench.encoders.vllm import build_model

    plan = choose_plan(quick=True)
    weights = random_encoder(plan)
    exact = sharing(weights, backend="torch", dtype=torch.float64)
    model = build_model(weights)
    if not hasattr(model, "encoder_eager_forward"):
        pytest.skip("the benchmark drives vLLM from 0.28 on")
    eager = Encoder(
        "vLLM eager",
        "vLLM",
        lambda rows, grid: model.encoder_eager_forward({"pixel_values": rows, "image_grid_thw": grid}),
        tower=model.vision_model,
    )
    for sizes in plan.inputs.values():
        rows, grid = pixels(sizes, device="cpu", dtype=torch.float32), torch.tensor(sizes)
        assert relative_error(eager(rows, grid), exact(rows.double(), grid)) < TOLERANCE
    errors = [entry.error for entry in Blocks("2 x 64", exact, plan).errors(eager)]
    assert len(errors) == 1 + plan.config.depth
    assert max(errors) < TOLERANCE
