"""Layer norm against float64, with the error of ``F.layer_norm`` as the budget."""

import pytest
import torch
from accuracy import assert_within_budget, relative_error
from torch import Tensor

from ernie_vit.kernels import dispatch
from ernie_vit.kernels.layer_norm import MAX_WIDTH, layer_norm, layer_norm_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOWER = 1280
WIDTHS = [
    pytest.param(TOWER, id="tower"),
    pytest.param(5120, id="resampler"),
    pytest.param(160, id="small"),
    pytest.param(97, id="odd"),
    pytest.param(1, id="one-column"),
]


def inputs(
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * std + mean
    weight = 1 + 0.2 * torch.randn(width, generator=generator)
    bias = 0.5 * torch.randn(width, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return layer_norm_ref(x.double(), weight.double(), bias.double(), eps=eps)


def check(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-6) -> None:
    out = layer_norm(x, weight, bias, eps=eps)
    assert_within_budget(out, layer_norm_ref(x, weight, bias, eps=eps), exact(x, weight, bias, eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_equals_float64_within_the_error_of_torch(device: str, dtype: torch.dtype, width: int) -> None:
    check(*inputs(37, width, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_columns_do_not_count_in_the_variance(device: str, dtype: torch.dtype) -> None:
    # 1280 columns lie in a block of 2048: with a mean of 4 the padding would make the variance 10.6 times too large
    check(*inputs(16, TOWER, dtype, device, mean=4.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_massive_channel(device: str, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(16, TOWER, dtype, device)
    x[:, 77] *= 1000
    check(x, weight, bias)
    # each other channel by itself, where the massive one does not hide it
    others = [c for c in range(TOWER) if c != 77]
    out, plain = layer_norm(x, weight, bias, eps=1e-6), layer_norm_ref(x, weight, bias, eps=1e-6)
    assert_within_budget(out[:, others], plain[:, others], exact(x, weight, bias, 1e-6)[:, others])


def test_mean_far_from_zero_costs_no_digits_but_its_own(device: str) -> None:
    mean = 1e4
    x, weight, bias = inputs(8, TOWER, torch.float32, device, mean=mean)
    out = layer_norm(x, weight, bias, eps=1e-6)
    # the mean itself has an error of a few roundings; E[x^2] - E[x]^2 would leave nothing of a variance of 1
    bound = 2 * torch.finfo(torch.float32).eps * mean
    assert relative_error(out, exact(x, weight, bias, 1e-6)) <= bound


def test_eps_is_the_callers(device: str) -> None:
    x, weight, bias = inputs(8, TOWER, torch.float32, device, std=3e-3)  # variance 9e-6
    for eps in (1e-6, 1e-5):
        check(x, weight, bias, eps=eps)
    small, large = layer_norm(x, weight, bias, eps=1e-6), layer_norm(x, weight, bias, eps=1e-5)
    assert relative_error(small, large) > 0.2


def test_constant_row_gives_the_bias(device: str) -> None:
    x, weight, bias = inputs(2, TOWER, torch.bfloat16, device)
    out = layer_norm(torch.full_like(x, 3.0), weight, bias, eps=1e-6)
    torch.testing.assert_close(out, bias.expand_as(out), rtol=0, atol=1e-2)


@pytest.mark.parametrize("live", [0, 1, 5, 8, 13])
def test_rows_past_the_live_ones_do_not_count_and_are_not_written(device: str, live: int) -> None:
    x, weight, bias = inputs(13, TOWER, torch.bfloat16, device)
    alone = layer_norm(x[:live].clone(), weight, bias, eps=1e-6)
    x[live:] = float("nan")
    num_rows = torch.tensor([live], dtype=torch.int32, device=device)
    assert torch.equal(layer_norm(x, weight, bias, eps=1e-6, num_rows=num_rows)[:live], alone)

    launch = pytest.importorskip("ernie_vit.kernels.triton.layer_norm").launch
    out = torch.full_like(x, -7.0)
    launch(x, weight, bias, out, num_rows, 1e-6)
    assert torch.equal(out[:live], alone)
    assert (out[live:] == -7.0).all()


def test_count_past_the_capacity_stops_at_the_capacity(device: str) -> None:
    x, weight, bias = inputs(6, 160, torch.bfloat16, device)
    num_rows = torch.tensor([6], dtype=torch.int32, device=device)
    out = torch.full_like(x, -7.0)
    launch = pytest.importorskip("ernie_vit.kernels.triton.layer_norm").launch
    launch(x[:5], weight, bias, out[:5], num_rows, 1e-6)
    assert (out[5] == -7.0).all()


def test_empty_input(device: str) -> None:
    x, weight, bias = inputs(0, TOWER, torch.bfloat16, device)
    assert layer_norm(x, weight, bias, eps=1e-6).shape == (0, TOWER)


@pytest.mark.parametrize("stride", [2 * TOWER, TOWER + 16, TOWER + 1], ids=["double", "aligned", "odd"])
def test_strided_rows(device: str, stride: int) -> None:
    x, weight, bias = inputs(9, stride, torch.bfloat16, device)
    x, weight, bias = x[:, :TOWER], weight[:TOWER], bias[:TOWER]
    assert x.stride(0) == stride
    check(x, weight, bias)


def test_misaligned_input(device: str) -> None:
    x, weight, bias = inputs(1, 9 * TOWER + 1, torch.bfloat16, device)
    check(x[0, 1:].view(9, TOWER), weight[1 : TOWER + 1], bias[3 : TOWER + 3])


def test_a_row_has_the_same_bits_whatever_surrounds_it(device: str) -> None:
    x, weight, bias = inputs(40, TOWER, torch.bfloat16, device)
    out = layer_norm(x, weight, bias, eps=1e-6)
    assert torch.equal(layer_norm(x, weight, bias, eps=1e-6), out)
    assert torch.equal(layer_norm(x[7:8].clone(), weight, bias, eps=1e-6), out[7:8])
    assert torch.equal(layer_norm(x.flip(0), weight, bias, eps=1e-6).flip(0), out)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_started_early_or_not() -> None:
    rows = dispatch.EARLY_ROWS + 1
    x, weight, bias = inputs(rows, TOWER, torch.bfloat16, "cuda")
    late = layer_norm(x, weight, bias, eps=1e-6)
    early = layer_norm(x[: rows - 1], weight, bias, eps=1e-6)
    # behind a kernel that still writes its input
    chained = layer_norm(x[: rows - 1] * 1, weight, bias, eps=1e-6)
    assert torch.equal(early, late[: rows - 1])
    assert torch.equal(chained, early)


@pytest.mark.parametrize("live", [0, 1, 7, 11])
def test_rows_that_an_index_names(device: str, live: int) -> None:
    x, weight, bias = inputs(5, TOWER, torch.bfloat16, device)
    rows = [4, 0, 0, 2, 3, 4, 1, 3, 3, 0, 2]
    index = torch.tensor(rows[:live] + [2**30] * (11 - live), dtype=torch.int32, device=device)
    num_rows = torch.tensor([live], dtype=torch.int32, device=device)
    out = layer_norm(x, weight, bias, eps=1e-6, num_rows=num_rows, index=index)
    assert out.shape == (11, TOWER)
    assert torch.equal(out[:live], layer_norm(x, weight, bias, eps=1e-6)[rows[:live]])
    named = layer_norm_ref(x, weight, bias, eps=1e-6, index=index[:live])
    assert torch.equal(named, layer_norm_ref(x, weight, bias, eps=1e-6)[rows[:live]])


def test_registered_op(device: str) -> None:
    x, weight, bias = inputs(7, 160, torch.bfloat16, device)
    index = torch.tensor([6, 1, 1], dtype=torch.int32, device=device)
    # no rows past the live ones: opcheck compares outputs as a whole
    for count in (None, torch.tensor([7], dtype=torch.int32, device=device)):
        for rows in (None, index):
            torch.library.opcheck(torch.ops.ernie_vit.layer_norm.default, (x, weight, bias, 1e-6, count, rows))


@pytest.mark.gpu
def test_compiles_as_one_graph() -> None:
    x, weight, bias = inputs(33, TOWER, torch.bfloat16, "cuda")

    @torch.compile(fullgraph=True)
    def twice(x: Tensor) -> Tensor:
        return layer_norm(layer_norm(x, weight, bias, eps=1e-6), weight, bias, eps=1e-6)

    expected = layer_norm(layer_norm(x, weight, bias, eps=1e-6), weight, bias, eps=1e-6)
    assert torch.equal(twice(x), expected)


@pytest.mark.gpu
def test_replay_follows_the_count_of_live_rows() -> None:
    x, weight, bias = inputs(1000, TOWER, torch.bfloat16, "cuda")
    num_rows = torch.tensor([1000], dtype=torch.int32, device="cuda")
    layer_norm(x, weight, bias, eps=1e-6, num_rows=num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer_norm(x, weight, bias, eps=1e-6, num_rows=num_rows)
    for live, seed in ((1000, 1), (1, 2), (333, 3)):
        fresh = inputs(1000, TOWER, torch.bfloat16, "cuda", seed=seed)[0]
        fresh[live:] = float("nan")
        x.copy_(fresh)
        num_rows.fill_(live)
        out.fill_(-7.0)
        graph.replay()
        assert torch.equal(out[:live], layer_norm(fresh[:live], weight, bias, eps=1e-6))
        assert (out[live:] == -7.0).all()


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31_elements() -> None:
    x, weight, bias = inputs(1, 5120, torch.bfloat16, "cuda")
    rows = 2**31 // 5120 + 100
    if torch.cuda.get_device_properties(0).total_memory < 3 * rows * 5120 * 2:
        pytest.skip("needs 13 GB of GPU memory")
    many = x.expand(rows, 5120).clone()
    out = layer_norm(many, weight, bias, eps=1e-6)
    assert torch.equal(out[-1:], layer_norm(x, weight, bias, eps=1e-6))


def test_reference_is_differentiable() -> None:
    x, weight, bias = inputs(2, 8, torch.float32, "cpu")
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *args: layer_norm_ref(*args, eps=1e-6), (x, weight, bias))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4)}, ValueError, r"x: expected shape \[\*, \*\], got \[4\]"),
        ({"x": torch.zeros(4, 8).double()}, TypeError, "x: expected .*float32, got torch.float64"),
        ({"x": torch.zeros(8, 4).T}, ValueError, "x: expected a contiguous last dimension"),
        ({"x": torch.zeros(4, 0)}, ValueError, f"x: expected 1 to {MAX_WIDTH} columns, got 0"),
        ({"weight": torch.ones(7)}, ValueError, r"weight: expected shape \[8\], got \[7\]"),
        ({"weight": torch.ones(8).half()}, TypeError, "weight: expected torch.float32, got torch.float16"),
        ({"bias": torch.ones(8, device="meta")}, ValueError, "bias: expected a tensor on cpu, got one on meta"),
        ({"num_rows": torch.tensor([3])}, TypeError, "num_rows: expected torch.int32, got torch.int64"),
        ({"index": torch.tensor([3])}, TypeError, "index: expected torch.int32, got torch.int64"),
        ({"index": torch.zeros(2, 2).int()}, ValueError, r"index: expected shape \[\*\], got \[2, 2\]"),
    ],
)
def test_refuses_bad_arguments(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {"x": torch.zeros(4, 8), "weight": torch.ones(8), "bias": torch.ones(8)} | change
    with pytest.raises(error, match=message):
        layer_norm(**arguments, eps=1e-6)


def test_says_where_triton_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "why_not_triton", lambda _: "the device is a CPU")
    with pytest.raises(RuntimeError, match="layer_norm: the device is a CPU"):
        layer_norm(torch.zeros(4, 8), torch.ones(8), torch.ones(8), eps=1e-6)
