"""What a run measures, and for how long: the whole of it, a quick look, and a tiny stand-in where there is no GPU."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ernie_vit import ErnieVisionConfig

# Frames, height and width in patches of each image or video of a call.
Sizes = Sequence[Sequence[int]]

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


@dataclass(frozen=True)
class Plan:
    """Attributes:
    config, device, dtype: of the encoder.
    quick: whether this is a quick look.
    graphs: rows and sequences of the graphs that our encoder replays; None: its default set.
    inputs: what is timed, by name.
    checked: inputs whose tokens are compared with float64.
    by_block: inputs whose hidden rows are compared with float64 after every block.
    rounds: how often each provider encodes an input for its figures, at most.
    seconds: after how long an input gets no further round.
    mix, mix_passes: calls of different sizes, and how often all of them are timed.
    images: whose bits are compared.
    neighbours: one before and one after an image in a packed call.
    capacity: rows and sequences of the graph of the padding curve over live rows.
    live: the calls of that curve.
    capacities: graphs of the curve over capacities.
    padded: the call of that curve.
    """

    config: ErnieVisionConfig
    device: torch.device
    dtype: torch.dtype
    quick: bool
    graphs: Sequence[tuple[int, int]] | None
    inputs: Mapping[str, Sizes]
    checked: tuple[str, ...]
    by_block: tuple[str, ...]
    rounds: int
    seconds: float
    mix: Sequence[Sizes]
    mix_passes: int
    images: Sizes
    neighbours: Sizes
    capacity: tuple[int, int]
    live: Sequence[Sizes]
    capacities: Sequence[tuple[int, int]]
    padded: Sizes


def choose_plan(*, quick: bool) -> Plan:
    """The plan for the GPU, or for the CPU where there is none."""
    if torch.cuda.is_available():
        return _quick(_full()) if quick else _full()
    return replace(_tiny(), quick=quick, rounds=3 if quick else 9)


def num_patches(sizes: Sizes) -> int:
    return sum(frames * height * width for frames, height, width in sizes)


def pixels(sizes: Sizes, *, device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random pixel rows ``[patches, 588]``, normal as the image processor's are."""
    return torch.randn(num_patches(sizes), ErnieVisionConfig().patch_width, device=device, dtype=dtype)


def _full() -> Plan:
    return Plan(
        config=ErnieVisionConfig(),
        device=torch.device("cuda", torch.cuda.current_device()),
        dtype=torch.bfloat16,
        quick=False,
        graphs=None,
        inputs=INPUTS,
        checked=("256", "1,296", "video 16 x 816"),
        by_block=("1,296", "3,996"),
        rounds=30,
        seconds=7.0,
        mix=MIX,
        mix_passes=2,
        images=[(1, 16, 16), (1, 24, 24), (1, 36, 36), (1, 36, 48), (1, 34, 46), (1, 54, 74)],
        neighbours=[(1, 32, 32), (1, 18, 22)],
        capacity=(16384, 64),
        live=[INPUTS[name] for name in ("256", "1,296", "3,996", "6,912", "8 x 1,296", "16,060")],
        capacities=[(rows, max(8, rows // 256)) for rows in (1296, 1536, 2560, 5376, 8448, 16384, 24708)],
        padded=INPUTS["1,296"],
    )


# The row regimes of a quick run's inputs. All its other calls stay in them, for each further one compiles a third more.
_QUICK_GRAPHS = ((384, 8), (1536, 8), (8448, 33))


def _quick(plan: Plan) -> Plan:
    return replace(
        plan,
        quick=True,
        graphs=_QUICK_GRAPHS,
        inputs={name: INPUTS[name] for name in ("256", "1,296", "6,912")},
        checked=("256",),
        by_block=("256",),
        rounds=6,  # with vLLM as many as encoders: each is once at each place
        seconds=2.0,
        mix=(),
        images=[(1, 16, 16), (1, 36, 36)],
        neighbours=[(1, 8, 8), (1, 4, 16)],
        capacity=_QUICK_GRAPHS[-1],
        live=plan.live[:2],
        capacities=_QUICK_GRAPHS[1:],
    )


def _tiny() -> Plan:
    """Two blocks, 160 wide, on the CPU: every part of a run in seconds."""
    return Plan(
        config=ErnieVisionConfig(depth=2, hidden_size=160, num_heads=2, intermediate_size=640, text_hidden_size=128),
        device=torch.device("cpu"),
        dtype=torch.float32,
        quick=True,
        graphs=None,
        inputs={"16": [(1, 4, 4)], "2 x 64": [(1, 8, 8)] * 2, "video 4 x 16": [(4, 4, 4)]},
        checked=("16", "video 4 x 16"),
        by_block=("2 x 64",),
        rounds=3,
        seconds=1.0,
        mix=[[(1, 4, 4)], [(1, 6, 4), (1, 4, 8)], [(1, 8, 8)]],
        mix_passes=2,
        images=[(1, 4, 4), (1, 6, 8)],
        neighbours=[(1, 4, 6), (1, 2, 2)],
        capacity=(256, 8),
        live=[[(1, 4, 4)], [(1, 8, 8)]],
        capacities=[(64, 4), (256, 8)],
        padded=[(1, 8, 8)],
    )
