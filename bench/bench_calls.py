"""Whole calls, pixel rows to tokens, timed as vLLM times its encoder: synchronise, call, synchronise.

Ours eager and from graphs, and beside them, in one process, vLLM's own where it is importable. A call includes all of
the host's work. Run it from the checkout: ``python -m bench.bench_calls``.
"""

import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.measure import ALLOWED_ERROR, relative_error
from bench.results import FOLDER, header
from bench.vllm_peer import vllm_encoder
from ernie_vit import ErnieVisionEncoder
from ernie_vit.graph.call import plan_call
from ernie_vit.graph.capacity import MIB, graph_bytes

Call = Callable[[Tensor, Tensor], Any]
Sizes = Sequence[Sequence[int]]

DTYPE = torch.bfloat16
MAX_TOKENS = 4096
ROUNDS, WARM_UPS = 30, 4
INPUTS: dict[str, Sizes] = {
    "256": [(1, 16, 16)],
    "576": [(1, 24, 24)],
    "1,296": [(1, 36, 36)],
    "1,728": [(1, 36, 48)],
    "3,996": [(1, 54, 74)],
    "6,912": [(1, 72, 96)],
    "16,060": [(1, 110, 146)],
    "8 x 1,296": [(1, 36, 36)] * 8,
    "video 16 x 816": [(16, 24, 34)],
}
# 60 calls of one to eight images, 224 to 2,048 pixels wide, 256 to 21,232 patches a call
MIX: list[Sizes] = json.loads((Path(__file__).parent / "mix.json").read_text())
SMALL = 1728  # patches
CHECKED = ("256", "1,296", "video 16 x 816")


def build() -> ErnieVisionEncoder:
    """The full-size encoder with random weights: as ``from_config`` draws them, but on the GPU, which is quick."""
    with torch.device("cuda"):
        encoder = ErnieVisionEncoder(backend="triton").to(DTYPE)
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.data.normal_(0, 0.02)
    return encoder


def pixels(sizes: Sizes) -> Tensor:
    return torch.randn(sum(t * h * w for t, h, w in sizes), 588, device="cuda", dtype=DTYPE)


def check(graph: ErnieVisionEncoder, eager: ErnieVisionEncoder) -> dict[str, Any]:
    """Bits of graph against eager, and the error of both, and of plain PyTorch, against float64.

    Raises:
        click.ClickException: a bit differs, or an error is far above plain PyTorch's: then nothing is timed.
    """
    found: dict[str, Any] = {}
    plain, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    for encoder in (plain, exact):
        encoder.set_backend("torch")
    for name, sizes in INPUTS.items():
        rows = pixels(sizes)
        out = graph(rows, sizes)
        found[name] = {"bitwise": torch.equal(out, eager(rows, sizes))}
        if name in CHECKED:
            truth = exact(rows.double(), sizes)
            found[name] |= {"error": relative_error(out, truth), "plain": relative_error(plain(rows, sizes), truth)}
    wrong = [
        name
        for name, of in found.items()
        if not of["bitwise"] or not of.get("error", 0.0) <= ALLOWED_ERROR * of.get("plain", 0.0)
    ]
    if wrong:
        raise click.ClickException(f"wrong results for {', '.join(wrong)}: {found}")
    return found


def milliseconds(call: Call, rows: Tensor, grid: Tensor) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call(rows, grid)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def time_input(calls: dict[str, Call], sizes: Sizes) -> dict[str, dict[str, float]]:
    """Each provider's statistics; they take turns, so that a change of clocks meets all of them."""
    rows, grid = pixels(sizes), torch.tensor(sizes)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UPS + ROUNDS):
        for name, call in calls.items():
            times[name].append(milliseconds(call, rows, grid))
    return {name: statistics(of[WARM_UPS:]) for name, of in times.items()}


def time_mix(calls: dict[str, Call]) -> dict[str, dict[str, dict[str, float]]]:
    """The mix once to warm up and three times for the figures, one provider after the other, on fresh rows.

    Returns:
        Statistics of all calls and of the small ones, by provider.
    """
    small = [sum(t * h * w for t, h, w in sizes) <= SMALL for sizes in MIX]
    whole: dict[str, dict[str, float]] = {}
    part: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        passes = [[milliseconds(call, pixels(sizes), torch.tensor(sizes)) for sizes in MIX] for _ in range(4)][1:]
        whole[name] = statistics([ms for times in passes for ms in times])
        part[name] = statistics([ms for times in passes for ms, is_small in zip(times, small, strict=True) if is_small])
    return {"mix of 60": whole, f"mix, up to {SMALL:,}": part}


def statistics(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": median(times), "mean": mean(times), "p99": ordered[int(len(ordered) * 0.99)]}


def capture_cost(encoder: ErnieVisionEncoder) -> dict[str, float]:
    """Seconds and bytes of the default graphs; what compiles has been compiled."""
    encoder.release()
    torch.cuda.synchronize()
    started = time.perf_counter()
    encoder.capture(max_tokens=MAX_TOKENS)
    seconds = time.perf_counter() - started
    assert encoder._graphs is not None
    return {
        "graphs": len(encoder._graphs.capacities),
        "seconds": seconds,
        "bytes": encoder.graph_stats().memory_bytes,
        "estimated bytes": graph_bytes(encoder._graphs.capacities, encoder.config, encoder.dtype),
    }


def host_time(encoder: ErnieVisionEncoder) -> dict[str, float]:
    """Microseconds until a call returns, of sizes that were met before and of new ones."""
    sizes = INPUTS["256"]
    rows, grid, found = pixels(sizes), torch.tensor(sizes), {}
    for name, forget in {"sizes met before": lambda: None, "new sizes": plan_call.cache_clear}.items():
        times = []
        for _ in range(100):
            forget()
            torch.cuda.synchronize()
            started = time.perf_counter()
            encoder(rows, grid)
            times.append((time.perf_counter() - started) * 1e6)
        found[name] = median(times[10:])
    return found


def capacity_cost(encoder: ErnieVisionEncoder) -> dict[str, float]:
    """Milliseconds of 1,296 patches in graphs of other sizes. The encoder's graphs are lost."""
    sizes, found = INPUTS["1,296"], {}
    for capacity in [(1296, 1), (1536, 8), (16384, 64)]:
        encoder.capture(capacities=[capacity])
        found[f"{capacity[0]:,} rows, {capacity[1]} sequences"] = time_input({"": encoder}, sizes)[""]["median"]
    return found


def show(console: Console, results: dict[str, Any]) -> None:
    console.print(*(f"{name}: {value}" for name, value in results["header"].items()), sep="\n", highlight=False)
    for name, of in results["check"].items():
        errors = f", error {of['error']:.2e}, plain PyTorch's {of['plain']:.2e}" if "error" in of else ""
        console.print(f"{name}: graph {'=' if of['bitwise'] else '!='} eager{errors}", highlight=False)
    table = Table("patches", title="milliseconds: median (mean, P99)")
    providers = list(results["calls"]["256"])
    for column in (*providers, "graph: / vLLM eager", "/ vLLM graph"):
        table.add_column(column, justify="right")
    for name, of in results["calls"].items():
        ours = of["ours graph"]
        key = "mean" if name.startswith("mix") else "median"
        figures = [
            f"{of[p]['median']:.2f} ({of[p]['mean']:.2f}, {of[p]['p99']:.2f})" if p in of else "-" for p in providers
        ]
        peers = [f"{of[p][key] / ours[key]:.2f}x" if p in of else "-" for p in ("vLLM eager", "vLLM graph")]
        table.add_row(name, *figures, *peers)
    console.print(table)
    for name in ("capture", "host microseconds", "1,296 patches, milliseconds", "vLLM"):
        console.print(f"{name}: {results[name]}", highlight=False)


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER / "calls.json", help="JSON of all figures.")
@click.option("--vllm/--no-vllm", default=True, help="Measure vLLM too, where it can be imported.")
@torch.no_grad()
def main(out: Path, vllm: bool) -> None:
    """Time whole calls of the encoder, eager and from graphs, ours and vLLM's."""
    torch.manual_seed(0)
    results: dict[str, Any] = {"header": header(), "vLLM": "not measured"}
    graph = build()
    eager = copy.deepcopy(graph)
    graph.capture(max_tokens=MAX_TOKENS)
    results["check"] = check(graph, eager)
    results["capture"] = capture_cost(graph)
    calls: dict[str, Call] = {"ours eager": eager, "ours graph": graph}
    with ExitStack() as stack:
        if vllm:
            try:
                peer = stack.enter_context(vllm_encoder(graph.config, DTYPE))
            except Exception as error:  # whatever it lacks here: ours is measured all the same
                results["vLLM"] = f"not measured: {type(error).__name__}: {error}"
            else:
                calls |= {"vLLM eager": peer.eager, "vLLM graph": peer.graph}
                results["vLLM"] = (
                    f"{peer.version}, attention {peer.attention}, captured in {peer.capture_seconds:.2f} s, "
                    f"{peer.capture_bytes / MIB:.0f} MiB"
                )
        results["calls"] = {}
        for name, sizes in INPUTS.items():
            # vLLM's graphs take images only
            able = {key: call for key, call in calls.items() if key != "vLLM graph" or "video" not in name}
            results["calls"][name] = time_input(able, sizes)
        results["calls"] |= time_mix(calls)
    results["graph stats"] = vars(graph.graph_stats())
    results["host microseconds"] = host_time(graph)
    results["1,296 patches, milliseconds"] = capacity_cost(graph)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    show(Console(width=160), results)


if __name__ == "__main__":
    main()
