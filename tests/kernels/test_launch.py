"""The launcher: direct launches reach the kernel that Triton's JIT would have chosen."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from ernie_vit.kernels.tiles.linear import HOPPER_DEFAULT, HOPPER_TILES, TRITON_DEFAULT  # noqa: E402
from ernie_vit.kernels.triton import launch, layer_norm, linear, rotary  # noqa: E402
from ernie_vit.kernels.triton.launch import Launcher  # noqa: E402

GPU = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = (None, "quick_gelu", "gelu")
QKV = ((2, 1280), (3840, 1280), (2, 3840))  # x, weight, out
Launch = tuple[Launcher, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the launchers of the kernels are asked for, on tensors of the CPU that stand for a GPU's."""
    seen: list[Launch] = []

    def record(self: Launcher, programs: int, device: torch.device, arguments: Any, constexprs: Any, **options: Any):
        assert programs >= 1
        assert device.type == "cpu"
        seen.append((self, arguments, constexprs, options))

    monkeypatch.setattr(Launcher, "__call__", record)
    monkeypatch.setattr(rotary, "small_kernel_launches_early", lambda _, rows: rows < 100)
    monkeypatch.setattr(layer_norm, "small_kernel_launches_early", lambda _, rows: rows < 100)
    return seen


def views(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Matrices that start and stride at aligned and at odd places."""
    buffer = torch.zeros((rows + 2) * (columns + 24), dtype=dtype)
    for offset in (0, 1, 8):
        for stride in (columns, columns + 1, columns + 16):
            yield buffer.as_strided((rows, columns), (stride, 1), offset)


def launch_everything() -> None:
    counts, indices = (torch.zeros(size, dtype=torch.int32) for size in (8, 256))
    for dtype in DTYPES:
        for rows in (1, 2, 16, 17, 200):
            for num_rows in (None, counts[:1], counts[3:4]):
                bias = torch.zeros(81, dtype=dtype)
                for x in views(rows, 80, dtype):
                    out = torch.zeros(rows, 80, dtype=dtype)
                    layer_norm.launch(x, bias[:80], bias[1:], out, num_rows, 1e-6)
                    layer_norm.launch(x, bias[:80], bias[1:], out, num_rows, 1e-6, index=indices[rows % 2 :][:rows])
                    layer_norm.launch(x, bias[:80], None, out, num_rows, 1e-5)
                    weight = torch.zeros(80, 80, dtype=dtype)
                    parts = (bias[1:], x) if rows % 2 else (None, None)
                    tile = TRITON_DEFAULT.at(rows)
                    linear.launch_linear(x, weight, *parts, num_rows, out, activation=ACTIVATIONS[rows % 3], tile=tile)
                for row in views(rows, 480, dtype):
                    table = torch.zeros(rows, 2, 40)
                    rotary.launch_apply(row.unflatten(1, (3, 2, 80)), table, num_rows)
    for frames in (1, 2, 16, 17):
        sizes = torch.zeros(frames + 1, 2, dtype=torch.int32)
        offsets = torch.zeros(frames + 2, dtype=torch.int32)
        for first in (0, 1):
            rotary.launch_table(offsets[first:], sizes[1:], torch.zeros(frames, 2, 40), (1.0,) * 20)


def launch_hopper_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    from ernie_vit.kernels.hopper import linear as hopper

    monkeypatch.setattr(hopper, "multiprocessors", lambda _: 132)
    counts = torch.zeros(8, dtype=torch.int32)
    for dtype in DTYPES[:2]:
        for rows, tile in zip((1, 16, 200), HOPPER_DEFAULT.tiles, strict=True):
            x, weight, out = (torch.zeros(size, 160, dtype=dtype) for size in (rows, 160, rows))
            bias = torch.zeros(161, dtype=dtype)
            for num_rows in (None, counts[:1], counts[3:4]):
                for parts in ((None, None), (bias[:160], None), (bias[1:], x)):
                    hopper.launch_linear(x, weight, *parts, num_rows, out, activation=ACTIVATIONS[rows % 3], tile=tile)
        for tile in HOPPER_TILES[3840, 1280].tiles:
            x, weight, out = (torch.zeros(size, width, dtype=dtype) for size, width in QKV)
            for table in (None, torch.zeros(2, 2, 40), torch.zeros(161)[1:].view(2, 2, 40)):
                hopper.launch_linear(x, weight, None, None, None, out, activation=None, tile=tile, table=table)


@pytest.mark.compile
@pytest.mark.usefixtures("pretended_gpu")
def test_launches_of_one_key_are_one_kernel_to_the_jit(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    launch_everything()
    launch_hopper_linear(monkeypatch)
    chosen: dict[Any, str] = {}
    for launcher, arguments, constexprs, options in launches:
        *_, bind = launcher.kernel.device_caches[0]
        _, specialisation, bound_options = bind(*arguments, *constexprs, **options)
        key = (id(launcher), launcher.key(0, arguments, constexprs, options))
        wanted = f"{specialisation} {bound_options}"
        assert chosen.setdefault(key, wanted) == wanted
    assert len(launches) > 5 * len(chosen)  # rows and addresses have no part in it
    assert len({launcher for launcher, *_ in launches}) == 5


@pytest.mark.compile
def test_integers_of_another_width_are_another_kernel() -> None:
    launcher = layer_norm._launch
    few, many = (launcher.key(0, (None,) * 6 + (1, rows, 0.5), (), {}) for rows in (2**31 - 1, 2**31))
    assert few != many


class Recorder:
    """A kernel that keeps what it was launched with."""

    params = (SimpleNamespace(is_constexpr=False, do_not_specialize=True, do_not_specialize_on_alignment=False),)

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((grid, arguments, options))
            return self.compiled

        return call


def compiled_kernel() -> Any:
    from triton.compiler import CompiledKernel

    kernel = object.__new__(CompiledKernel)
    kernel.module = None  # not loaded, so that there is nothing to unload when it is deleted
    return kernel


@pytest.mark.compile
def test_the_first_launch_of_a_key_goes_through_the_jit_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    compiled = compiled_kernel()
    direct = Recorder(None)
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda _, grid: direct[grid])
    jit = Recorder(compiled)
    launcher = Launcher(jit)
    for programs in (7, 8, 9):
        launcher(programs, GPU, (programs,), ("constexpr",), num_warps=4)
    assert jit.calls == [((7,), (7, "constexpr"), {"num_warps": 4})]
    assert direct.calls == [((8, 1, 1), (8, "constexpr"), {}), ((9, 1, 1), (9, "constexpr"), {})]
    launcher(1, GPU, (1,), ("constexpr",), num_warps=8)
    assert len(jit.calls) == 2


@pytest.mark.compile
@pytest.mark.parametrize(("version", "hip"), [("3.10.0", None), ("3.6.0", "6.4")])
def test_other_releases_and_amd_always_go_through_the_jit(
    monkeypatch: pytest.MonkeyPatch, version: str, hip: str | None
) -> None:
    monkeypatch.setattr(launch, "triton_version", lambda: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    jit = Recorder(None)
    launcher = Launcher(jit)
    for programs in (7, 8):
        launcher(programs, GPU, (1,), (), num_warps=4)
    assert [call[0] for call in jit.calls] == [(7,), (8,)]


@pytest.mark.compile
@pytest.mark.parametrize("missing", ["CompiledKernel", "__getitem__", "params", "do_not_specialize_on_alignment"])
def test_a_build_without_what_direct_launches_use_always_goes_through_the_jit(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    import triton.compiler

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    jit = Recorder(compiled_kernel())
    if missing == "CompiledKernel":
        monkeypatch.delattr(triton.compiler, missing)
    elif missing == "__getitem__":
        monkeypatch.delattr(triton.compiler.CompiledKernel, missing)
    elif missing == "params":
        monkeypatch.delattr(Recorder, missing)
    else:
        monkeypatch.setattr(Recorder, "params", (SimpleNamespace(is_constexpr=False, do_not_specialize=False),))
    launcher = Launcher(jit)
    for programs in (7, 8):
        launcher(programs, GPU, (1,), ("constexpr",), num_warps=4)
    assert jit.calls == [((programs,), (1, "constexpr"), {"num_warps": 4}) for programs in (7, 8)]
