"""Runs of the benchmark for the tests of its reports: every figure is invented, by a formula and chance."""

import math
import random

from bench.records import Accuracy, Bits, Call, Capture, Clocks, Host, Kernel, Machine, Missing, Padding, Run

# input -> patches, images; the shapes of a real run
INPUTS = {
    "256": (256, 1),
    "576": (576, 1),
    "1,296": (1296, 1),
    "1,728": (1728, 1),
    "3,996": (3996, 1),
    "6,912": (6912, 1),
    "16,060": (16060, 1),
    "8 x 1,296": (10368, 8),
    "video 16 x 816": (13056, 1),
    "mix": (226_000, 122),
}
# provider -> milliseconds that a call takes at least, and each 1,000 patches
PROVIDERS = {
    "ours eager": (17.0, 4.2),
    "ours graph": (1.2, 4.4),
    "ours eager with resampler": (16.2, 4.1),
    "ours graph with resampler": (1.0, 4.2),
    "vLLM eager": (23.0, 6.3),
    "vLLM graph": (3.0, 6.6),
    "transformers": (29.0, 8.1),
    "torch.compile": (14.0, 7.2),
}
ROWS = (256, 576, 1296, 1728, 3996, 6912, 10368, 16060)
# attention's cases have one size each
LENGTHS = {"256": 256, "1,296": 1296, "16 x 256": 4096, "6,912": 6912, "8 x 1,296": 10368, "16,060": 16060}
# kernel, case -> FLOP and bytes of a row, share of the ceiling that ours reaches, peers and their time over ours
KERNELS = {
    ("linear", "qkv"): (2 * 1280 * 3840, 2 * 5120, 0.85, {"cuBLAS, bias only": 1.02, "torch.compile": 1.12}),
    ("linear", "fc1"): (2 * 1280 * 5120, 2 * 6400, 0.82, {"cuBLAS, bias only": 1.04, "cuBLAS + eager epilogue": 1.7}),
    ("linear", "fc2"): (2 * 1280 * 5120, 2 * 7680, 0.88, {"cuBLAS, bias only": 0.97, "cuBLAS + eager epilogue": 1.3}),
    ("layer_norm", "1280"): (10 * 1280, 2 * 2560, 0.7, {"eager": 1.3, "torch.compile": 1.05}),
    ("rotary", "table"): (0, 320, 0.4, {"eager": 6.0}),
    ("rotary", "rotation"): (6 * 2560, 2 * 5120, 0.75, {"eager": 4.0}),
    ("mlp", "mlp"): (2 * 2560 * 5120, 4 * 2560, 0.81, {"eager": 1.5, "torch.compile": 1.3}),
}
ATTENTION = {"FlashAttention-3": 1.05, "cuDNN": 1.2, "ours, plain Triton": 1.25, "FlashAttention-2": 2.1}
COPY, PRODUCT = 4.3e12, 780e12
CLOCKS = Clocks(sm=1890.0, power=655.0, temperature=58.0)
DEPTH = 32


def synthetic_run(*, date: str = "2031-02-03", gpu: str = "NVIDIA H200", quick: bool = False, seed: int = 0) -> Run:
    """A run with every list filled; another seed is the same machine on another day."""
    chance = random.Random(seed)
    run = Run(
        Machine(
            date=date,
            gpu=gpu,
            versions={"torch": "2.11.0", "triton": "3.6.0", "vllm": "0.33.0", "transformers": "5.17.0"},
            commit="0123abc",
            copy=COPY,
            product=PRODUCT,
            conditions={"driver_version": "580.1", "power.limit": "700.00 W", "clocks.max.sm": "1980 MHz"},
        ),
        quick=quick,
        seconds=431.0,
    )
    run.calls = [
        _call(name, *size, provider, chance)
        for name, size in INPUTS.items()
        for provider in (*PROVIDERS, "ours graph again")
        if not (name.startswith("video") and provider == "vLLM graph")
    ]
    for (kernel, case), shape in KERNELS.items():
        for rows in ROWS:
            run.kernels += _kernels(kernel, case, rows, *shape, chance)
    for case, rows in LENGTHS.items():
        longest = int(case.rpartition(" ")[2].replace(",", ""))
        run.kernels += _kernels("attention", case, rows, 4 * 1280 * longest, 2 * 5120, 0.6, ATTENTION, chance)
    run.padding = [
        Padding(rows, capacity, provider, (1.2 + 4.4e-3 * rows + cost * 1e-4 * capacity) * _near(chance), CLOCKS)
        for provider, cost in (("ours graph", 0.3), ("vLLM graph", 50.0))
        for rows, capacity in [
            *((rows, 16384) for rows in (256, 1296, 4096, 8192, 16384)),
            *((1296, capacity) for capacity in (1296, 1536, 4096, 8192)),
        ]
    ]
    run.accuracy = [
        Accuracy(name, provider, block, scale * (2e-3 + 2e-3 * math.sqrt(DEPTH + 4 if block is None else block)))
        for name in ("256", "1,296")
        for provider, scale in (
            ("ours eager", 0.92),
            ("vLLM eager", 0.99),
            ("transformers", 1.03),
            ("plain PyTorch", 1.04),
        )
        for block in (*range(DEPTH + 1), None)
    ]
    run.bits = [
        Bits(provider, situation, equal, 20)
        for provider, equals in (("ours graph", (20, 20, 20, 20)), ("vLLM graph", (11, 7, 9, 20)))
        for situation, equal in zip(("packed", "padded", "in a graph", "again"), equals, strict=True)
    ]
    run.captures = [Capture("ours graph", 9, 0.34, 486.0, 482.0), Capture("vLLM graph", 7, 0.77, 1162.0)]
    run.hosts = [Host("ours graph", True, 310.0), Host("ours graph", False, 455.0), Host("vLLM graph", True, 640.0)]
    run.missing = [
        Missing("FlashAttention-4", "ModuleNotFoundError: No module named 'flash_attn' [not installed]"),
        Missing("cuDNN", "wrong by value: relative error 3.1e-01, plain PyTorch's 2.2e-03"),
    ]
    return run


def run_without_gpu() -> Run:
    """What the CPU part alone leaves: errors and bits of small models, no times on a GPU."""
    run = Run(Machine("2031-02-04", "no GPU", {"torch": "2.13.0"}, "0123abc-dirty"), quick=True, seconds=20.0)
    run.accuracy = [Accuracy("256", "ours", block, 1e-3) for block in (0, 1, 2, None)]
    run.bits = [Bits("ours", "packed", 4, 4)]
    run.missing = [Missing("vLLM", "ModuleNotFoundError: No module named 'vllm'")]
    return run


def _near(chance: random.Random) -> float:
    return 1 + chance.uniform(-0.004, 0.004)


def _call(name: str, patches: int, images: int, provider: str, chance: random.Random) -> Call:
    least, slope = PROVIDERS[provider.removesuffix(" again")]
    one = patches / 60 if name == "mix" else patches
    at_least = least if "graph" in provider else 0.0
    median = max(least, at_least + slope * one / 1000 * (1 + one / 40_000)) * _near(chance)
    return Call(
        input=name,
        patches=patches,
        images=images,
        provider=provider,
        median=median,
        mean=median * 1.01,
        p99=median * 1.06,
        host=0.7 if "graph" in provider else min(median, least),
        device=None if name == "mix" else median * 0.97,
        images_per_second=1e3 * (images / 60 if name == "mix" else images) / median,
        spread=0.004,
        clocks=Clocks(sm=1980 - patches / 100, power=300 + patches / 50, temperature=41) if name != "mix" else None,
    )


def _kernels(
    kernel: str,
    case: str,
    rows: int,
    flop: float,
    row_bytes: float,
    share: float,
    peers: dict[str, float],
    chance: random.Random,
) -> list[Kernel]:
    row_bytes += 4e6 / rows  # weights, read once
    share *= rows / (rows + 300)
    least = max(rows * flop / PRODUCT, rows * row_bytes / COPY)
    times = {"ours": 1.0, "ours, 1/8 live": 0.3, **peers}
    return [
        Kernel(
            kernel=kernel,
            case=case,
            rows=rows,
            provider=provider,
            microseconds=least / share * factor * 1e6 * _near(chance),
            tflops=rows * flop * share / least / factor / 1e12,
            gigabytes_per_second=rows * row_bytes * share / least / factor / 1e9,
            of_ceiling=share / factor,
            of_ideal=min(1.0, share * 1.08) if provider == "ours" and kernel == "linear" else None,
            error=1.7e-3,
            plain_error=1.8e-3,
            noise=0.006,
            clocks=CLOCKS,
        )
        for provider, factor in times.items()
    ]
