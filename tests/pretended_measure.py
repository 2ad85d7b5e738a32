"""The kernels' benchmarks on a CPU: every case is made, run and checked for real, and its times are made up.

Run as a program it measures the smallest size and prints the findings as JSON, or passes its arguments to pytest; in a
process of its own, since it replaces the kernels by their references.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import (
    attention_peers,
    bench_attention,
    bench_layer_norm,
    bench_linear,
    bench_mlp,
    bench_rotary,
    bench_tower,
    findings,
    ideal,
    kernels,
    measure,
)
from bench.attention_peers import Adapter, Attention, Peer, Sequences
from bench.measure import Ceilings, Inputs
from ernie_vit import ErnieVisionConfig
from ernie_vit.model.operators import choose_operators

MULTIPROCESSORS = 132
CEILINGS = Ceilings(copy=4e12, product=8e14)
REPLAY_SECONDS = 1e-3  # of the first graph; each further one takes as much longer


class PretendedGraph:
    def replay(self) -> None:
        pass


def capture(run: Callable[[Inputs], Tensor], inputs: Sequence[Inputs], calls: int) -> PretendedGraph:
    assert calls % len(inputs) == 0
    run(inputs[-1])
    return PretendedGraph()


def timed(graphs: Mapping[str, PretendedGraph], rounds: int) -> dict[str, float]:
    assert rounds
    return {name: REPLAY_SECONDS * (1 + place) for place, name in enumerate(graphs)}


def pretend_gpu() -> None:
    """Replace what asks the GPU."""
    measure.capture, measure.timed = capture, timed
    measure.ceilings = lambda: CEILINGS
    measure.cache_bytes = lambda: 2**20
    measure.forbid_waiting = nullcontext
    measure.why_not_measured = kernels.why_not_measured = lambda: None
    ideal.multiprocessors = lambda _: MULTIPROCESSORS
    torch.cuda.synchronize = lambda: None
    torch.cuda.get_device_name = lambda _: "Pretended GPU"


def attend(sequences: Sequences) -> Attention:
    """A right peer."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.split(list(sequences.lengths)) for x in (q, k, v))
        of_each = (F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in of)) for of in zip(*parts, strict=True))
        return torch.cat([out.transpose(0, 1) for out in of_each])

    return run


def absent() -> Adapter:
    raise ModuleNotFoundError("No module named 'peer'")


def pretend_peers() -> None:
    attention_peers.PEERS.clear()
    attention_peers.PEERS |= {
        "right": Peer(lambda: attend),
        "wrong": Peer(lambda: lambda sequences: lambda q, k, v: attend(sequences)(q, k, v) * 1.1),
        "absent": Peer(absent),
        "failing": Peer(lambda: lambda _: lambda q, k, v: q @ k @ v),
        "for other sequences": Peer(lambda: attend, takes=lambda _: False),
        "slow": Peer(absent, quick=False),
    }
    bench_tower.ATTENTION = ("right",)


def pretend_kernels() -> None:
    """Our kernels are their references, a tower has one small block, and layer norm is wrong."""
    for name in ("linear", "patch_embed"):
        setattr(bench_linear, name, getattr(bench_linear, f"{name}_ref"))
    bench_mlp.mlp = bench_mlp.mlp_ref
    bench_layer_norm.layer_norm = lambda *args, **kwargs: -bench_layer_norm.layer_norm_ref(*args, **kwargs)
    bench_layer_norm.compiled_layer_norm = bench_layer_norm.layer_norm_ref
    for name in ("qkv_rotary", "apply_rotary", "rotary_table"):
        setattr(bench_rotary, name, getattr(bench_rotary, f"{name}_ref"))
    bench_rotary.linear = bench_linear.linear
    bench_attention.attention = bench_attention.attention_ref
    bench_attention.attention_work_list = lambda *_, **__: None
    bench_tower.choose_operators = lambda _: choose_operators("torch")
    bench_tower.ErnieVisionConfig = lambda: ErnieVisionConfig(depth=1, intermediate_size=640)


def main() -> None:
    pretend_gpu()
    pretend_peers()
    pretend_kernels()
    findings.QUICK_SIZES = ("256",)
    if sys.argv[1:]:
        sys.exit(pytest.main(sys.argv[1:]))
    found, missing = kernels.measure_kernels(quick=True)

    compiled = findings.Findings(sizes=["256"], only_compile=True)
    kernels.run_files(["bench_layer_norm"], compiled)
    broken = findings.Findings()
    kernels.run_files(["no_such_file"], broken)
    print(
        json.dumps(
            {
                "kernels": [asdict(kernel) for kernel in found],
                "missing": [asdict(peer) for peer in missing],
                "only compiled": [len(compiled.kernels), len(compiled.missing)],
                "broken": [asdict(peer) for peer in broken.missing],
            }
        )
    )


if __name__ == "__main__":
    main()
