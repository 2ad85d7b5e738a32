"""vLLM's tower as a peer of ours: with a stand-in of its interface, and the real one where vLLM is installed.

The real one opens and closes vLLM's groups of processes, which the tests of tests/vllm_plugin keep open: not in one
process with them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accuracy import relative_error
from torch import Tensor, nn
from vllm_host import HAVE_VLLM, pretend_cpu_build

from bench import bench_tower, ideal
from bench.bench_tower import VLLM
from bench.encoders.vllm import fixed_sizes, open_tower
from bench.findings import Findings
from bench.measure import ALLOWED_ERROR, Case
from bench.sizes import DTYPE, FRAMES
from ernie_vit import ErnieVisionConfig, prepare_encoder_metadata
from ernie_vit.model.operators import choose_operators
from ernie_vit.model.tower import VisionTower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small towers are compared, on the CPU")
tower_of = contextmanager(bench_tower.vllm_tower.__wrapped__)  # what the fixture gives
needs_vllm = pytest.mark.skipif(not HAVE_VLLM, reason="needs vLLM: make test-vllm")

TINY = ErnieVisionConfig(hidden_size=64, num_heads=4, intermediate_size=256, depth=2)
TOLERANCE = 1e-5  # float32, two blocks
SIZES = [(1, 4, 6), (1, 8, 4), (1, 2, 2)]


class StandIn:
    """What is called of vLLM's tower; it computes with ours."""

    def __init__(self, ours: VisionTower) -> None:
        self.ours = ours
        self.prepared = 0

    def prepare_encoder_metadata(self, grid_thw: list[list[int]]) -> dict[str, Any]:
        self.prepared += 1
        return {"of ours": prepare_encoder_metadata(grid_thw, device="cpu")}

    def __call__(self, pixel_values: Tensor, *, encoder_metadata: Mapping[str, Any]) -> Tensor:
        out: Tensor = self.ours(pixel_values, encoder_metadata["of ours"], choose_operators("torch"))
        return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A benchmark of one narrow block, without our kernels."""
    monkeypatch.setattr(bench_tower, "ErnieVisionConfig", lambda: ErnieVisionConfig(depth=1, intermediate_size=640))
    monkeypatch.setattr(bench_tower, "choose_operators", lambda _: choose_operators("torch"))
    monkeypatch.setattr(bench_tower, "FRAMES", FRAMES | {40: [(4, 6), (4, 4)]})
    monkeypatch.setattr(ideal, "multiprocessors", lambda _: 132)
    bench_tower.vision_tower.cache_clear()
    with torch.no_grad():
        yield
    bench_tower.vision_tower.cache_clear()


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")  # set back afterwards
    pretend_cpu_build()


def case(tower: Any) -> Case:
    cases: list[Case] = []
    bench_tower.test_tower(40, {}, tower, cases.append)
    return cases[0]


def errors(tower: Any) -> tuple[float, float]:
    """Of the peer as the benchmark checks it, and of plain PyTorch."""
    of_tower = case(tower)
    provider, inputs = of_tower.providers[VLLM], of_tower.make(0)
    exact, plain = provider.reference.exact(inputs), provider.reference.plain(inputs)
    out = provider.run(of_tower.make(0))
    assert out.shape == exact.shape
    assert out.dtype == DTYPE
    return relative_error(out, exact), relative_error(plain, exact)


@pytest.mark.usefixtures("small")
def test_it_is_a_provider_where_it_is_there() -> None:
    assert list(case(None).providers) == ["ours"]
    stand_in = StandIn(bench_tower.vision_tower(DTYPE))
    assert list(case(stand_in).providers) == ["ours", VLLM]
    error, plain = errors(stand_in)
    assert error == plain > 0


@pytest.mark.usefixtures("small")
def test_what_follows_from_the_sizes_is_made_by_the_first_call_alone() -> None:
    stand_in = StandIn(bench_tower.vision_tower(DTYPE))
    of_tower = case(stand_in)
    assert stand_in.prepared == 0  # what it raises is a failure of this peer, not of the case
    run = of_tower.providers[VLLM].run
    first, other, again = (run(of_tower.make(seed)) for seed in (0, 1, 0))
    assert stand_in.prepared == 1
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("when", ["opening", "building"])
def test_what_keeps_it_away_is_noted_and_no_more(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    @contextmanager
    def broken(_: VisionTower) -> Iterator[None]:
        if when == "opening":
            raise ModuleNotFoundError("No module named 'vllm'")
        try:
            raise RuntimeError("no such layer\nand more")
        finally:
            closed.append(True)
        yield

    monkeypatch.setattr(bench_tower, "open_tower", broken)
    findings = Findings()
    with tower_of(findings) as tower:
        assert tower is None
    reasons = {"opening": "ModuleNotFoundError: No module named 'vllm'", "building": "RuntimeError: no such layer"}
    assert [(entry.provider, entry.reason) for entry in findings.missing] == [(VLLM, reasons[when])]
    assert closed == [True] * (when == "building")


@pytest.mark.usefixtures("small")
def test_it_is_opened_neither_in_a_quick_run_nor_where_kernels_are_only_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def opened(_: VisionTower) -> Iterator[str]:
        yield "opened"

    monkeypatch.setattr(bench_tower, "open_tower", opened)
    with tower_of(Findings()) as tower:
        assert tower == "opened"
    for findings in (Findings(only_compile=True), Findings(quick=True)):
        with tower_of(findings) as tower:
            assert tower is None
        assert findings.missing == []


@needs_vllm
@torch.no_grad()
@pytest.mark.usefixtures("cpu_build")
def test_the_real_one_computes_what_ours_does() -> None:
    """Opened twice: in a run of the benchmark vLLM's encoder was open before."""
    torch.manual_seed(0)
    ours = VisionTower(TINY).requires_grad_(False)
    for parameter in ours.parameters():  # what stays 0 or 1 could be left out unseen
        parameter.normal_(float(parameter.mean()), 0.1)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    pixel_values = torch.randn(60, TINY.patch_width)
    metadata = prepare_encoder_metadata(SIZES, device="cpu")
    exact = VisionTower(TINY).double()
    exact.load_state_dict(ours.state_dict())
    expected = exact(pixel_values.double(), metadata, choose_operators("torch"))
    for _ in range(2):
        with open_tower(ours) as tower:
            assert shared(tower, ours)
            run = fixed_sizes(tower, SIZES)
            assert all(relative_error(run(pixel_values), expected) < TOLERANCE for _ in range(2))
        assert torch.get_default_dtype() == torch.float32
        assert not torch.distributed.is_initialized()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def shared(tower: nn.Module, ours: nn.Module) -> bool:
    """All parameters that are left: on a CPU vLLM packs the weights of its linear layers."""
    theirs = {name: tensor.data_ptr() for name, tensor in tower.state_dict().items() if tensor.numel()}
    assert len(theirs) > TINY.depth
    return theirs.items() <= {name: tensor.data_ptr() for name, tensor in ours.state_dict().items()}.items()


@needs_vllm
@pytest.mark.usefixtures("cpu_build", "small")
def test_the_real_one_passes_the_check_of_the_benchmark() -> None:
    findings = Findings()
    with tower_of(findings) as tower:
        assert findings.missing == []
        error, plain = errors(tower)
    assert 0 < error <= ALLOWED_ERROR * plain
