"""The plugin inside the real vLLM on a GPU, at full size: same tokens, and the times beside each other.

vLLM's encoder with random weights, eager and through its own graph manager, and the same modules with our tower: eager,
from our graphs, and through vLLM's manager. Needs vLLM 0.28 to 0.33. Run it from the checkout, it takes under three
minutes: ``python -m bench.check_vllm``. The exit status is 1 if a check fails.
"""

import sys
from collections.abc import Callable
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.calls import time_call
from bench.encoders.encoder import random_encoder, sharing
from bench.encoders.vllm import build_model, capture, vllm_world
from bench.plan import INPUTS, MIX, choose_plan, pixels
from bench.samples import percentile_99
from ernie_vit import ErnieVisionEncoder
from ernie_vit.vllm_model import with_our_tower
from ernie_vit.vllm_plugin import stats

DTYPE = torch.bfloat16
ROUNDS, WARM_UPS, MIX_ROUNDS = 12, 3, 2
LARGEST_EXACT = 7000  # patches; float64 attention over more would fill the GPU
VOCABULARY = 32768
LUCK = 1.02  # two computations that round equally often differ so much by luck
VLLM, VLLM_GRAPHS = "vLLM eager", "vLLM graphs"
EAGER, GRAPHS, IN_VLLM = "ours eager", "ours graphs", "ours in vLLM's graphs"

Call = Callable[[Tensor, Tensor], Tensor]


def main() -> int:
    import vllm

    console = Console(width=140)
    weights = random_encoder(choose_plan(quick=False))
    with vllm_world() as vllm_config:
        stock = build_model(weights)
        with torch.inference_mode():
            calls, models = providers(stock, vllm_config)
            names = f"vLLM {vllm.__version__} ({stock.vision_model.attn_backend}), torch {torch.__version__}"
            console.print(f"{torch.cuda.get_device_name()}, {names}")
            failures = check(console, calls, sharing(weights, backend="torch", dtype=torch.float64))
            compare_times(console, calls)
            for name, model in models.items():
                console.print(name, stats(model))
                failures += [f"{name}: {stats(model)['fallbacks']}"] if stats(model)["fallbacks"] else []
    for failure in failures:
        console.print(f"[red]FAILED[/] {failure}")
    return 1 if failures else 0


def providers(stock: Any, vllm_config: Any) -> tuple[dict[str, Call], dict[str, Any]]:
    """Ways to encode by one set of vLLM's modules, and our models among them."""
    models = {
        EAGER: with_plugin(stock, enforce_eager=True),
        GRAPHS: with_plugin(stock),
        IN_VLLM: with_plugin(stock, cudagraph_mm_encoder=True),
    }
    theirs, ours = (capture(model, vllm_config, DTYPE) for model in (stock, models[IN_VLLM]))
    return {
        VLLM: embed(stock),
        VLLM_GRAPHS: lambda rows, sizes: torch.cat(theirs.execute(batch(rows, sizes))),
        EAGER: embed(models[EAGER]),
        GRAPHS: embed(models[GRAPHS]),
        IN_VLLM: lambda rows, sizes: torch.cat(ours.execute(batch(rows, sizes))),
    }, models


def with_plugin(stock: Any, *, enforce_eager: bool = False, cudagraph_mm_encoder: bool = False) -> Any:
    """The plugin's class around the modules of ``stock``."""
    cls: Any = with_our_tower(type(stock))
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.config, model.vision_model, model.resampler_model = stock.config, stock.vision_model, stock.resampler_model
    multimodal = SimpleNamespace(mm_encoder_tp_mode="weights", skip_mm_profiling=False)
    model.attach(
        SimpleNamespace(
            model_config=SimpleNamespace(
                enforce_eager=enforce_eager, max_model_len=32768, multimodal_config=multimodal
            ),
            compilation_config=SimpleNamespace(cudagraph_mm_encoder=cudagraph_mm_encoder),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )
    return model


def embed(model: Any) -> Call:
    return lambda rows, sizes: torch.cat(model.embed_multimodal(**batch(rows, sizes)))


def batch(rows: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    if sizes[0, 0] > 1:
        return {"pixel_values_videos": rows, "video_grid_thw": sizes}
    return {"pixel_values": rows, "image_grid_thw": sizes}


def check(console: Console, calls: dict[str, Call], exact: ErnieVisionEncoder) -> list[str]:
    """Errors against float64, bits between our ways, and greedy choices of a random language head."""
    failures = []
    head = torch.randn(VOCABULARY, exact.config.text_hidden_size, device="cuda", dtype=DTYPE)
    chosen: dict[str, list[Tensor]] = {name: [] for name in (*calls, "float64")}
    table = Table("input", *calls, "bits of eager", title="Relative error of the tokens against float64")
    for name, grid in INPUTS.items():
        rows, sizes = pixels(grid), torch.tensor(grid)
        video = grid[0][0] > 1
        out = {way: call(rows, sizes) for way, call in calls.items() if not (video and way == VLLM_GRAPHS)}
        same = {way: torch.equal(out[way], out[EAGER]) for way in (GRAPHS, IN_VLLM)}
        # vLLM's manager sorts a batch by size, so its resampler may see the rows in another order
        if not same[GRAPHS] or (len(grid) == 1 and not same[IN_VLLM]):
            failures.append(f"{name}: not the bits of the eager call: {same}")
        errors: dict[str, float] = {}
        if len(rows) <= LARGEST_EXACT or len(grid) > 1 or video:
            truth = exact(rows.double(), sizes)
            errors = {way: float((tokens.double() - truth).norm() / truth.norm()) for way, tokens in out.items()}
            too_far = [way for way in (EAGER, GRAPHS, IN_VLLM) if not errors[way] <= LUCK * errors[VLLM]]
            failures += [f"{name}: {way} is {errors[way]:.2e} off, vLLM {errors[VLLM]:.2e}" for way in too_far]
            if not video:
                for way, tokens in {**out, "float64": truth.to(DTYPE)}.items():
                    chosen[way].append((tokens @ head.T).argmax(-1))
        else:
            failures += [f"{name}: not finite" for tokens in out.values() if not tokens.isfinite().all()]
        table.add_row(
            name,
            *(f"{errors[way]:.2e}" if way in errors else "-" for way in calls),
            ", ".join("yes" if bits else "no" for bits in same.values()),
        )
    console.print(table)
    pairs = (VLLM, VLLM_GRAPHS), (EAGER, GRAPHS), (EAGER, IN_VLLM), (VLLM, EAGER), (VLLM, "float64"), (EAGER, "float64")
    for first, second in pairs:
        a, b = torch.cat(chosen[first]), torch.cat(chosen[second])
        differ = int((a != b).sum())
        console.print(f"greedy choices that differ, {first} and {second}: {differ} of {len(a)}")
        if (first, second) == (EAGER, GRAPHS) and differ:
            failures.append("greedy choices differ between our eager and our graphs")
    return failures


def compare_times(console: Console, calls: dict[str, Call]) -> None:
    table = Table("input", *calls, title="Milliseconds of a call, resampler and host included (median)")
    for name, grid in INPUTS.items():
        rows, sizes = pixels(grid), torch.tensor(grid)
        ways = [way for way in calls if not (grid[0][0] > 1 and way == VLLM_GRAPHS)]
        samples: dict[str, list[float]] = {way: [] for way in calls}
        for round_ in range(WARM_UPS + ROUNDS):
            for way in ways:
                took = time_call(calls[way], rows, sizes)[1]
                if round_ >= WARM_UPS:
                    samples[way].append(took)
        table.add_row(name, *(f"{median(samples[way]):.2f}" if way in ways else "-" for way in calls))
    mixed: dict[str, list[float]] = {way: [] for way in calls}
    for round_ in range(MIX_ROUNDS + 1):
        for grid in MIX:
            rows, sizes = pixels(grid), torch.tensor(grid)
            for way, call in calls.items():
                took = time_call(call, rows, sizes)[1]
                if round_:
                    mixed[way].append(took)
    for label, pick in (("mean", mean), ("median", median), ("P99", percentile_99)):
        table.add_row(f"mix, {label}", *(f"{pick(mixed[way]):.2f}" for way in calls))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
