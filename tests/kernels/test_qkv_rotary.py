"""The qkv projection with its rotation: against float64, against the two kernels one after the other, and its bits."""

import pytest
import torch
from accuracy import assert_within_budget, relative_error
from torch import Tensor

from ernie_vit.kernels.linear import linear
from ernie_vit.kernels.qkv_rotary import leaves_paired, natural_order, qkv_rotary, qkv_rotary_ref
from ernie_vit.kernels.rotary import apply_rotary
from ernie_vit.kernels.tiles.linear import HOPPER_BOUNDS, HOPPER_TILES, rotary_fits

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS, HEAD_DIM, K = 2, 80, 160
TOWER = {"heads": 16, "k": 1280}
POISON = -777.0


class Case:
    """Random arguments of one call."""

    def __init__(
        self,
        rows: int,
        dtype: torch.dtype,
        device: str,
        *,
        heads: int = HEADS,
        head_dim: int = HEAD_DIM,
        k: int = K,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        n = 3 * heads * head_dim
        self.heads = heads
        self.x = random(rows, k).to(dtype)
        self.weight = (random(n, k) / k**0.5).to(dtype)
        self.bias: Tensor | None = random(n).to(dtype)
        angles = 300 * random(rows, head_dim // 2)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=1)

    def arguments(self, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> tuple[Tensor | None, ...]:
        arguments = (self.x[rows], self.weight, self.bias, self.table[rows])
        return arguments if dtype is None else tuple(None if t is None else t.to(dtype) for t in arguments)

    def run(self, rows: slice = slice(None), num_rows: Tensor | None = None) -> Tensor:
        return qkv_rotary(*self.arguments(rows=rows), num_heads=self.heads, num_rows=num_rows)

    def natural(self, qkv: Tensor) -> Tensor:
        """With the channels of q and k in natural order."""
        return natural_order(qkv) if leaves_paired(self.x, self.weight, self.heads) else qkv

    def check(self, qkv: Tensor, rows: slice = slice(None)) -> None:
        """Each of q, k and v, and the scores, whose heads need no natural order."""
        out = self.natural(qkv[rows])
        plain = qkv_rotary_ref(*self.arguments(rows=rows), num_heads=self.heads)
        exact = qkv_rotary_ref(*self.arguments(torch.float64, rows), num_heads=self.heads)
        for part in range(3):
            assert_within_budget(out[:, part], plain[:, part], exact[:, part])
        scores = [torch.einsum("rhd,shd->hrs", *x[:, :2].double().unbind(1)) for x in (qkv[rows], plain, exact)]
        floor = 4 * torch.finfo(torch.float32).eps  # as of assert_within_budget
        assert relative_error(scores[0], scores[2]) <= max(1.02 * relative_error(scores[1], scores[2]), floor)


def count(rows: int, device: str) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_float64_within_the_error_of_torch(device: str, dtype: torch.dtype) -> None:
    case = Case(37, dtype, device)
    case.check(case.run())


@pytest.mark.parametrize("head_dim", [16, 36])
def test_other_heads_are_the_two_kernels(device: str, head_dim: int) -> None:
    case = Case(9, torch.bfloat16, device, heads=3, head_dim=head_dim)
    assert not leaves_paired(case.x, case.weight, case.heads)
    separate = linear(case.x, case.weight, case.bias).unflatten(1, (3, 3, head_dim))
    assert torch.equal(case.run(), apply_rotary(separate, case.table))


@pytest.mark.parametrize("pad", [1, 8], ids=["odd", "aligned"])
@pytest.mark.parametrize("name", ["x", "weight"])
def test_strides_between_rows_are_free(device: str, name: str, pad: int) -> None:
    """Also those that the epilogue's kernel cannot read: then it is the two kernels."""
    case = Case(37, torch.bfloat16, device, **(TOWER if device == "cuda" else {}))
    tensor = getattr(case, name)
    wide = torch.full((tensor.shape[0], tensor.shape[1] + pad), float("nan"), dtype=tensor.dtype, device=device)
    wide[:, :-pad] = tensor
    setattr(case, name, wide[:, :-pad])
    case.check(case.run())


def test_dead_rows_reach_no_live_one(device: str) -> None:
    case = Case(70, torch.bfloat16, device)
    full = case.run()
    case.x[41:] = float("nan")
    case.table[41:] = float("nan")
    assert torch.equal(case.run(num_rows=count(41, device))[:41], full[:41])


def test_no_rows_and_no_bias(device: str) -> None:
    case = Case(0, torch.bfloat16, device)
    assert case.run().shape == (0, 3, HEADS, HEAD_DIM)
    case = Case(5, torch.bfloat16, device)
    case.bias = None
    case.check(case.run())


def test_operator_registration(device: str) -> None:
    case = Case(5, torch.bfloat16, device)
    for num_rows in (None, count(5, device)):
        torch.library.opcheck(torch.ops.ernie_vit.qkv_rotary.default, (*case.arguments(), HEADS, num_rows))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 8).double()}, TypeError, "x: expected"),
        ({"weight": torch.zeros(48, 8).half()}, TypeError, "weight: expected torch.float32"),
        ({"weight": torch.zeros(44, 8)}, ValueError, r"weight: expected 3 \* 2 heads of an even width, got 44"),
        ({"weight": torch.zeros(0, 8)}, ValueError, "weight: expected 3"),
        ({"bias": torch.zeros(47)}, ValueError, r"bias: expected shape \[48\]"),
        ({"table": torch.zeros(4, 2, 3)}, ValueError, r"table: expected shape \[4, 2, 4\]"),
        ({"table": torch.zeros(2, 4, 4).transpose(0, 1)}, ValueError, "table: expected a contiguous tensor"),
        ({"num_rows": torch.zeros(1)}, TypeError, "num_rows: expected torch.int32"),
    ],
)
def test_refuses_bad_arguments(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {"x": torch.zeros(4, 8), "weight": torch.zeros(48, 8), "bias": None, "table": torch.zeros(4, 2, 4)}
    with pytest.raises(error, match=message):
        qkv_rotary(**(arguments | change), num_heads=2)


def test_the_reference_is_differentiable() -> None:
    case = Case(2, torch.float64, "cpu", heads=1, head_dim=8, k=3)
    arguments = case.arguments(torch.float64)
    arguments[1].requires_grad_()
    assert torch.autograd.gradcheck(lambda *tensors: qkv_rotary_ref(*tensors, num_heads=1), arguments)


def test_paired_order_is_the_documented_one() -> None:
    channels = torch.arange(80)
    group, i = channels // 16, channels % 16
    stands_for = torch.where(i < 8, 8 * group + i, 40 + 8 * group + i - 8)  # as the docstring of qkv_rotary says
    natural = torch.randn(4, 3, 2, 80)
    paired = torch.cat((natural[:, :2, :, stands_for], natural[:, 2:]), dim=1)
    assert torch.equal(natural_order(paired), natural)


def test_which_weights_are_rotated_in_the_epilogue() -> None:
    assert rotary_fits(3840, 1280, 80)
    assert not rotary_fits(3840, 1280, 120)  # 16 does not divide it
    assert not rotary_fits(480, 160, 80)  # a tile of the default lies half in v


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [(torch.bfloat16, HOPPER_BOUNDS), (torch.float16, HOPPER_BOUNDS[-1:])],  # each tile is a compilation of seconds
    ids=["bf16", "fp16"],
)
def test_the_tower(dtype: torch.dtype, bounds: tuple[int, ...]) -> None:
    """Right by value and the same bits at every capacity, with v as the plain linear has it."""
    rows = bounds[-1] + 100
    case = Case(rows, dtype, "cuda", **TOWER)
    full = case.run(num_rows=count(rows, "cuda"))
    for part in (slice(300), slice(rows - 300, rows)):
        case.check(full, part)
    separate = linear(case.x, case.weight, case.bias, num_rows=count(rows, "cuda")).unflatten(1, (3, 16, HEAD_DIM))
    assert torch.equal(full[:, 2], separate[:, 2])
    # the two kernels round twice
    both = case.natural(full)[:, :2], apply_rotary(separate, case.table)[:, :2]
    assert relative_error(both[0], both[1].double()) < 4 * torch.finfo(dtype).eps
    for bound in bounds:
        few = bound - 7
        assert torch.equal(case.run(slice(few), count(few, "cuda")), full[:few]), bound


@pytest.mark.gpu
def test_every_tile_leaves_dead_rows_alone() -> None:
    case = Case(700, torch.bfloat16, "cuda", **TOWER)
    if not leaves_paired(case.x, case.weight, case.heads):
        pytest.skip("q and k are rotated by a kernel of their own on this GPU")
    from ernie_vit.kernels.hopper.linear import launch_linear

    live = 611
    full = case.run(num_rows=count(700, "cuda")).flatten(1)
    case.x[live:], case.table[live:] = float("nan"), float("nan")
    for tile in dict.fromkeys(HOPPER_TILES[3840, 1280].tiles):
        out = torch.full_like(full, POISON)
        arguments = (case.x, case.weight, case.bias, None, count(live, "cuda"), out)
        launch_linear(*arguments, activation=None, tile=tile, table=case.table)
        assert torch.equal(out[:live], full[:live]), tile
        assert (out[live:] == out.new_tensor(POISON)).all(), tile


@pytest.mark.gpu
def test_replay_follows_the_count_and_the_table() -> None:
    case = Case(1300, torch.bfloat16, "cuda", **TOWER)
    num_rows, every = count(1300, "cuda"), count(1300, "cuda")
    case.run(num_rows=num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(num_rows=num_rows)
    for live, seed in ((1300, 1), (1, 2), (0, 3), (577, 4)):
        fresh = Case(1300, torch.bfloat16, "cuda", seed=seed, **TOWER)
        case.x.copy_(fresh.x)
        case.table.copy_(fresh.table)
        num_rows.fill_(live)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out[:live], case.run(num_rows=every)[:live])
        assert (out[live:] == out.new_tensor(POISON)).all()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    rows, tail = 560_000, 300
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    case = Case(rows, torch.bfloat16, "cuda", **TOWER)
    out = case.run()
    last = slice(rows - tail, rows)
    assert torch.equal(out[last], case.run(last))
    assert not out.isnan().any()
    case.check(out, last)


@pytest.mark.gpu
def test_compiles_as_one_graph() -> None:
    case = Case(70, torch.bfloat16, "cuda", **TOWER)
    compiled = torch.compile(lambda *tensors: qkv_rotary(*tensors, num_heads=16) * 2, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*case.arguments()), case.run() * 2)
