"""The peers compute what ours does, with the same weights; what is wrong is found by value and by bits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from accuracy import relative_error
from torch import Tensor
from torch._dynamo.utils import counters

from bench.accuracy import Blocks, check_tokens
from bench.bits import AGAIN, IN_A_GRAPH, PACKED, PADDED, compare_bits
from bench.encoders import ours
from bench.encoders.compiled import open_compiled
from bench.encoders.encoder import Encoder, random_encoder, sharing
from bench.encoders.ours import open_ours
from bench.encoders.transformers import open_transformers
from bench.plan import Plan, choose_plan, pixels
from ernie_vit import ErnieVisionEncoder
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny encoder is compared, on the CPU"),
    pytest.mark.usefixtures("no_gradients"),
]


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    return choose_plan(quick=True)


@pytest.fixture(scope="module")
def weights(plan: Plan) -> ErnieVisionEncoder:
    return random_encoder(plan)


@pytest.fixture(scope="module")
def exact(weights: ErnieVisionEncoder) -> ErnieVisionEncoder:
    return sharing(weights, backend="torch", dtype=torch.float64)


def plain(weights: ErnieVisionEncoder) -> Encoder:
    return Encoder("plain PyTorch", "plain PyTorch", weights, tower=weights.vision_tower)


def test_all_weights_are_random(weights: ErnieVisionEncoder) -> None:
    """What stays 0 or 1 could be left out unseen."""
    for name, parameter in weights.named_parameters():
        assert parameter.std() > 0.01, name
        assert abs(float(parameter.mean()) - (name.endswith("norm.weight") or ".ln.weight" in name)) < 1.01, name


def test_sharing_copies_nothing(weights: ErnieVisionEncoder) -> None:
    other = sharing(weights, backend="torch")
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in weights.parameters()]
    assert {p.dtype for p in sharing(weights, backend="torch", dtype=torch.float64).parameters()} == {torch.float64}


def test_peers_pass_the_check(weights: ErnieVisionEncoder, exact: ErnieVisionEncoder, plan: Plan) -> None:
    with open_ours(weights, plan) as eager, open_transformers(weights) as transformers:
        errors, missing = check_tokens([eager, transformers], exact, plain(weights), plan)
        assert missing == []
        assert {(entry.input, entry.provider) for entry in errors} == {
            (name, provider) for name in plan.checked for provider in ("plain PyTorch", "ours eager", "transformers")
        }
        assert all(0 < entry.error < 1e-5 for entry in errors)
        blocks = Blocks("2 x 64", exact, plan)
        for encoder in (eager, transformers):
            found = list(blocks.errors(encoder))
            assert [entry.block for entry in found] == [0, 1, 2]
            assert all(0 < entry.error < 1e-5 for entry in found)


def test_compiled_blocks_serve_every_size(weights: ErnieVisionEncoder, exact: ErnieVisionEncoder) -> None:
    """And are compiled once for all of them, whatever the number of blocks."""
    counters.clear()
    with open_compiled(weights, backend="eager") as compiled:
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0
        for sizes in ([(1, 4, 4)], [(1, 8, 8)] * 2, [(1, 6, 4)], [(4, 4, 4)], [(1, 10, 10), (1, 2, 2)], [(1, 4, 12)]):
            rows, grid = pixels(sizes, device="cpu", dtype=torch.float32), torch.tensor(sizes)
            assert relative_error(compiled(rows, grid), exact(rows.double(), grid)) < 1e-5
        assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.interpreter
@pytest.mark.parametrize("part", ["tower", "resampler"])
def test_one_row_regime_is_warmed_up_alone(part: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    watched = VisionTower if part == "tower" else Resampler
    monkeypatch.setattr(watched, "forward", lambda _module, rows, *_: met.append(len(rows)))
    ours.compile_rows(plan.config, plan.dtype, plan.device, part, 384)
    assert set(met) == {384 if part == "tower" else 4 * 384}  # a resampler's are merge windows


def test_a_quick_run_compiles_the_tower_alone_and_for_its_own_graphs(plan: Plan) -> None:
    jobs = ours.compilations(replace(plan, quick=True, graphs=((384, 8), (8448, 33))))
    assert [job.args[-2:] for job in jobs] == [("tower", 384), ("tower", 8448)]


def test_a_wrong_peer_is_not_timed(weights: ErnieVisionEncoder, exact: ErnieVisionEncoder, plan: Plan) -> None:
    def raising(*_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    peers = [
        Encoder("off", "off", lambda rows, grid: weights(rows, grid) * (1 + 2**-12)),
        Encoder("not finite", "not finite", lambda rows, grid: weights(rows, grid) * float("nan")),
        Encoder("short", "short", lambda rows, grid: weights(rows, grid)[1:]),
        Encoder("raising", "raising", raising),
        Encoder("in parts", "in parts", lambda rows, grid: weights(rows, grid).split(3)),
    ]
    _, missing = check_tokens(peers, exact, plain(weights), plan)
    reasons = {entry.provider: entry.reason for entry in missing}
    assert reasons.keys() == {"off", "not finite", "short", "raising"}
    assert reasons["off"].startswith("wrong by value: 16: error 2.44e-04")
    assert reasons["not finite"].startswith("wrong by value: 16: error nan")
    assert "expected shape [4, 128], got [3, 128]" in reasons["short"]
    assert reasons["raising"] == "RuntimeError: no such kernel"


def test_errors_start_at_the_block_that_makes_them(
    weights: ErnieVisionEncoder, exact: ErnieVisionEncoder, plan: Plan
) -> None:
    blocks = Blocks("2 x 64", exact, plan)
    wrong = sharing(weights, backend="torch")
    bias = weights.vision_tower.blocks[1].mlp.fc2.bias
    wrong.vision_tower.blocks[1].mlp.fc2.bias = torch.nn.Parameter(bias + 1e-3, requires_grad=False)
    errors = [entry.error for entry in blocks.errors(Encoder("wrong", "wrong", wrong, tower=wrong.vision_tower))]
    assert max(errors[:2]) < 1e-5 < 1e-4 < errors[2]
    assert list(blocks.errors(Encoder("in a graph", "wrong", wrong))) == []
    # nothing stays behind on the modules
    assert all(not module._forward_hooks for module in wrong.modules())


def test_bits_are_counted_by_image(weights: ErnieVisionEncoder, plan: Plan) -> None:
    """A call as it is; one that changes an image in company; graphs that change every image, or when padded."""
    # matrix products of a CPU round by their size: image by image they do not know of the others
    eager = Encoder("eager", "a", lambda rows, grid: one_by_one(weights, rows, grid))
    in_company = Encoder("company", "a", lambda rows, grid: eager(rows, grid) * (1 + 0.1 * (len(grid) > 1)))
    other = Encoder("graph", "a", lambda rows, grid: eager(rows, grid) * (1 + 0.1 * (len(rows) > 16)))

    @contextmanager
    def padded(capacities: Sequence[tuple[int, int]] | None) -> Iterator[Encoder]:
        assert capacities == [plan.capacity]
        yield replace(eager, provider="graph")

    found = {
        (entry.provider, entry.situation): (entry.equal, entry.of)
        for entry in compare_bits(eager, [other], {"graph": padded}, plan)
    }
    assert found == {
        ("eager", AGAIN): (2, 2),
        ("eager", PACKED): (2, 2),
        ("graph", IN_A_GRAPH): (1, 2),
        ("graph", PACKED): (0, 2),
        ("graph", PADDED): (2, 2),
    }
    again = {(e.provider, e.situation): e.equal for e in compare_bits(in_company, [], {}, plan)}
    assert again == {("company", AGAIN): 2, ("company", PACKED): 0}


def one_by_one(encoder: ErnieVisionEncoder, rows: Tensor, grid: Tensor) -> Tensor:
    parts = rows.split(grid.prod(1).tolist())
    return torch.cat([encoder(part, size[None]) for part, size in zip(parts, grid, strict=True)])
