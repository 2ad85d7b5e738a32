"""Linear with its epilogue against float64, with the error of plain PyTorch as the budget; and its bits."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from accuracy import relative_error
from linear_cases import POISON, Case, K, N
from torch import Tensor

from ernie_vit.kernels.compilation import compilations
from ernie_vit.kernels.dispatch import why_not_hopper
from ernie_vit.kernels.linear import linear, linear_ref
from ernie_vit.kernels.tiles.linear import (
    HOPPER_DEFAULT,
    HOPPER_TILES,
    TRITON_DEFAULT,
    TRITON_FLOAT32,
    TRITON_TILES,
    HopperTile,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPILOGUES = ["", "bias", "bias quick_gelu", "bias gelu", "bias residual", "bias quick_gelu residual"]
# As in the tower, so that what one GPU test compiles serves the others.
TOWER = {
    (3840, 1280): "bias",
    (1280, 1280): "bias residual",
    (5120, 1280): "bias quick_gelu",
    (1280, 5120): "bias residual",
}
ROWS = [1, 3, 63, 64, 65, 129]
SHAPES = [
    pytest.param(37, 53, id="odd"),
    pytest.param(1, 1, id="one"),
    pytest.param(96, 588, id="pixels"),
    pytest.param(640, 160, id="small-mlp"),
]


def count(rows: int, device: str) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("device", "dtype", "epilogue"),
    [
        *(pytest.param("cpu", *case, marks=pytest.mark.interpreter) for case in product(DTYPES, EPILOGUES)),
        # on a GPU each case is a compilation of seconds
        *(pytest.param("cuda", torch.bfloat16, epilogue, marks=pytest.mark.gpu) for epilogue in EPILOGUES),
        *(pytest.param("cuda", dtype, EPILOGUES[-1], marks=pytest.mark.gpu) for dtype in DTYPES[1:]),
    ],
    ids=lambda value: str(value).replace(" ", "-") or "bare",
)
def test_equals_float64_within_the_error_of_torch(device: str, dtype: torch.dtype, epilogue: str) -> None:
    case = Case(65, dtype, device, epilogue)
    case.check(case.run())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(device: str, dtype: torch.dtype, rows: int) -> None:
    case = Case(rows, dtype, device, "bias quick_gelu residual", seed=rows)
    case.check(case.run())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_any_number_of_columns(device: str, n: int, k: int) -> None:
    case = Case(33, torch.bfloat16, device, "bias residual", n=n, k=k)
    case.check(case.run())


def test_no_rows(device: str) -> None:
    assert Case(0, torch.bfloat16, device, "bias residual").run().shape == (0, N)


@pytest.mark.parametrize("live", [0, 1, 64, 65, 100])
def test_rows_past_the_live_ones_are_neither_read_nor_written(device: str, live: int) -> None:
    case = Case(100, torch.bfloat16, device, "bias quick_gelu residual")
    tile = TRITON_DEFAULT.at(100)
    full, full_by_tile = case.run(), case.run_tile(tile)
    case.x[live:] = float("nan")
    case.residual[live:] = float("nan")
    out = case.run(num_rows=count(live, device))
    assert torch.equal(out[:live], full[:live])
    poisoned = case.run_tile(tile, count(live, device))
    assert torch.equal(poisoned[:live], full_by_tile[:live])
    assert (poisoned[live:] == poisoned.new_tensor(POISON)).all()


def test_count_past_the_capacity_stops_at_the_capacity(device: str) -> None:
    case = Case(5, torch.bfloat16, device, "bias residual")
    assert torch.equal(case.run(num_rows=count(9, device)), case.run())


def test_a_row_has_the_same_bits_alone_and_among_others(device: str) -> None:
    case = Case(130, torch.bfloat16, device, "bias quick_gelu residual")
    full = case.run()
    for first, end in ((0, 1), (64, 130), (77, 78), (1, 66)):
        positional, named = case.arguments(rows=slice(first, end))
        assert torch.equal(linear(*positional, **named), full[first:end])


def test_strides_between_rows_are_free(device: str) -> None:
    case = Case(40, torch.bfloat16, device, "bias residual")
    for pad in (1, 8):  # rows that are and are not multiples of 16 bytes
        for name in ("x", "weight", "residual"):
            original = getattr(case, name)
            wide = torch.full((original.shape[0], original.shape[1] + pad), float("nan")).to(original)
            wide[:, :-pad] = original
            setattr(case, name, wide[:, :-pad])
            case.check(case.run())
            setattr(case, name, original)
    case.x = case.x[:1].expand(40, K)
    case.check(case.run())


def test_quick_gelu_is_not_gelu(device: str) -> None:
    case = Case(64, torch.float32, device, "bias quick_gelu")
    out = case.run().double()
    before = F.linear(case.x.double(), case.weight.double(), case.bias.double())
    assert relative_error(out, before / (1 + torch.exp(-1.702 * before))) < 1e-6
    assert relative_error(out, F.gelu(before)) > 1e-3


def test_gelu_is_the_exact_one(device: str) -> None:
    case = Case(64, torch.float32, device, "bias gelu")
    out = case.run().double()
    before = F.linear(case.x.double(), case.weight.double(), case.bias.double())
    assert relative_error(out, before / 2 * (1 + torch.erf(before / 2**0.5))) < 1e-6
    assert relative_error(out, F.gelu(before, approximate="tanh")) > 1e-5


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_far_from_zero(device: str, dtype: torch.dtype, activation: str) -> None:
    values = torch.tensor([-6e4, -1e3, -90.0, -20.0, 0.0, 20.0, 90.0, 1e3, 6e4], device=device).to(dtype)
    x = torch.zeros(3, 16, dtype=dtype, device=device)
    weight = torch.zeros(len(values), 16, dtype=dtype, device=device)
    out = linear(x, weight, values, activation=activation)
    exact = linear_ref(x.double(), weight.double(), values.double(), activation=activation)
    torch.testing.assert_close(out.double(), exact, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6)


def test_half_precision_overflows_as_torch_does(device: str) -> None:
    x = torch.full((2, 16), 66.25, dtype=torch.float16, device=device)
    weight = torch.full((8, 16), 66.25, dtype=torch.float16, device=device)
    weight[1] *= -1
    weight[2] /= 2
    sums = linear(x, weight)  # 70225, -70225, 35112.5, 70225 ...
    assert torch.equal(sums, F.linear(x, weight))
    assert sums[0, :3].tolist() == [float("inf"), float("-inf"), 35104.0]
    # the hidden value never leaves float32, so the activation of -70225 is 0 and not NaN
    assert linear(x, weight, activation="quick_gelu")[0, :3].tolist() == [float("inf"), 0.0, 35104.0]
    # and a residual brings a sum above 65504 back before the only rounding
    residual = torch.zeros(2, 8, dtype=torch.float16, device=device)
    residual[:, 0], residual[:, 1] = -6e4, 6e4
    assert linear(x, weight, residual=residual)[0, :3].tolist() == [10224.0, -10224.0, 35104.0]


def test_wrong_arguments_are_named(device: str) -> None:
    case = Case(4, torch.bfloat16, device, "bias residual")
    x, weight, bias, residual = case.x, case.weight, case.bias, case.residual
    wrong = [
        (TypeError, "weight", (x, weight.float()), {}),
        (TypeError, "bias", (x, weight, bias.half()), {}),
        (TypeError, "x", (x.double(), weight.double()), {}),
        (TypeError, "residual", (x, weight, bias), {"residual": residual.float()}),
        (TypeError, "num_rows", (x, weight), {"num_rows": count(4, device).long()}),
        (ValueError, "x", (x[0], weight), {}),
        (ValueError, "x", (x.t().contiguous().t(), weight), {}),
        (ValueError, "weight", (x, weight[:, :-1]), {}),
        (ValueError, "weight", (x, weight[:0]), {}),
        (ValueError, "bias", (x, weight, bias[1:]), {}),
        (ValueError, "bias", (x, weight, bias.to("meta")), {}),
        (ValueError, "residual", (x, weight, bias), {"residual": residual[:3]}),
        (ValueError, "num_rows", (x, weight), {"num_rows": count(4, device).expand(2)}),
        (ValueError, "activation", (x, weight), {"activation": "relu"}),
    ]
    for error, name, positional, named in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            linear(*positional, **named)


def test_a_gradient_is_refused(device: str) -> None:
    case = Case(4, torch.float32, device, "bias residual")
    for name in ("x", "weight", "bias", "residual"):
        tensor = getattr(case, name)
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match='backend="torch"'):
            case.run()
        with torch.no_grad():
            case.run()
        tensor.requires_grad_(False)


def test_the_reference_is_differentiable() -> None:
    case = Case(3, torch.float64, "cpu", "bias quick_gelu residual", n=4, k=5)
    positional, named = case.arguments()
    assert torch.autograd.gradcheck(
        lambda x, weight: linear_ref(x, weight, positional[2], **named),
        (positional[0].requires_grad_(), positional[1].requires_grad_()),
    )


def test_operator_registration(device: str) -> None:
    case = Case(5, torch.bfloat16, device, "bias quick_gelu residual")
    arguments = (case.x, case.weight, case.bias, "quick_gelu", case.residual)
    for num_rows in (None, count(5, device)):  # all rows live: rows past it would be compared uninitialised
        torch.library.opcheck(torch.ops.ernie_vit.linear.default, (*arguments, num_rows))


HOPPER_ALL = list(dict.fromkeys(tile for regimes in [*HOPPER_TILES.values(), HOPPER_DEFAULT] for tile in regimes.tiles))
TRITON_ALL = list(dict.fromkeys(tile for regimes in [*TRITON_TILES.values(), TRITON_DEFAULT] for tile in regimes.tiles))
# N and K that are no multiples of a tile, on one tile of each kind: with two parts, ping-pong, with doubled groups.
ODD_TILES = [
    *HOPPER_DEFAULT.tiles,
    next(tile for tile in HOPPER_ALL if tile.ping_pong and tile.columns == 160),
    next(tile for tile in HOPPER_ALL if tile.rows == 320),
]


def check_tiles(tiles: list, dtype: torch.dtype, epilogue: str, n: int, k: int) -> None:
    """Each tile is right by value, has the bits of the others, and leaves the dead rows alone."""
    rows, live = 700, 611
    case = Case(rows, dtype, "cuda", epilogue, n=n, k=k)
    case.x[live:] = float("nan")
    if case.residual is not None:
        case.residual[live:] = float("nan")
    first = None
    for tile in tiles:
        out = case.run_tile(tile, count(live, "cuda"))
        assert (out[live:] == out.new_tensor(POISON)).all(), tile
        case.check(out, slice(live))
        first = out if first is None else first
        assert torch.equal(out[:live], first[:live]), f"{tile} has other bits than {tiles[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tiles", "dtype", "epilogue", "n", "k"),
    [
        *(
            pytest.param(list(dict.fromkeys(HOPPER_TILES[n, k].tiles)), torch.bfloat16, epilogue, n, k, id=f"{n}x{k}")
            for (n, k), epilogue in TOWER.items()
        ),
        pytest.param(ODD_TILES, torch.bfloat16, EPILOGUES[-1], 168, 72, id="odd"),
        pytest.param(ODD_TILES[-2:], torch.float16, EPILOGUES[-1], 640, 160, id="half-precision"),
        pytest.param(list(HOPPER_DEFAULT.tiles), torch.bfloat16, "bias gelu", 5120, 5120, id="resampler"),
    ],
)
def test_hopper_tiles(tiles: list[HopperTile], dtype: torch.dtype, epilogue: str, n: int, k: int) -> None:
    reason = why_not_hopper(torch.device("cuda", torch.cuda.current_device()), dtype)
    if reason is not None:
        pytest.skip(reason)
    check_tiles(tiles, dtype, epilogue, n, k)


@pytest.mark.gpu
def test_every_triton_tile() -> None:
    from triton.runtime.errors import OutOfResources

    case = Case(1, torch.bfloat16, "cuda", EPILOGUES[-1], n=1280, k=1280)
    fitting = []
    for tile in TRITON_ALL:
        try:
            case.run_tile(tile, count(1, "cuda"))
        except OutOfResources:  # the tile of a GPU with more shared memory than this one
            continue
        fitting.append(tile)
    assert fitting
    check_tiles(fitting, torch.bfloat16, EPILOGUES[-1], 1280, 1280)


@pytest.mark.gpu
def test_the_float32_tile() -> None:
    check_tiles(list(TRITON_FLOAT32.tiles), torch.float32, "bias quick_gelu residual", 320, 320)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1280, 1280), (5120, 1280), (37, 53)])
def test_a_row_has_the_same_bits_at_every_capacity(n: int, k: int) -> None:
    case = Case(9000, torch.bfloat16, "cuda", TOWER.get((n, k), EPILOGUES[-1]), n=n, k=k)
    full = case.run(num_rows=count(9000, "cuda"))
    for rows in (1, 200, 500, 1000, 2000, 4000, 6000):  # one in each regime
        positional, named = case.arguments(rows=slice(rows))
        live = count(rows, "cuda")
        assert torch.equal(linear(*positional, **named, num_rows=live), full[:rows])
        assert torch.equal(case.run(num_rows=live)[:rows], full[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 576, 1296, 2000])
def test_the_count_may_be_written_by_the_kernel_before(rows: int) -> None:
    # an early launch must not act on the count that was there before it
    case = Case(rows, torch.bfloat16, "cuda", TOWER[1280, 1280], n=1280, k=1280)
    full = case.run(num_rows=count(rows, "cuda"))
    num_rows = count(0, "cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(200):
        live = (step * 389) % (rows + 1)
        num_rows.fill_(live)
        wrong += (case.run(num_rows=num_rows)[:live] != full[:live]).sum()
    assert wrong.item() == 0


@pytest.mark.gpu
def test_rows_and_addresses_compile_nothing_new() -> None:
    counts = torch.full((8,), 11, dtype=torch.int32, device="cuda")
    biases = torch.randn(1280 + 8, device="cuda").bfloat16()
    case = Case(300, torch.bfloat16, "cuda", "bias residual", n=1280, k=1280)
    case.run(num_rows=counts[:1])
    before = compilations()
    for first in range(8):
        case.bias = biases[first : first + 1280]
        positional, named = case.arguments(rows=slice(first, 300 - first))
        linear(*positional, **named, num_rows=counts[first : first + 1])
    assert compilations() == before


@pytest.mark.gpu
def test_replay_follows_the_count() -> None:
    case = Case(600, torch.bfloat16, "cuda", TOWER[5120, 1280], n=5120, k=1280)
    num_rows = count(600, "cuda")
    full = case.run(num_rows=num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(num_rows=num_rows)
    for live in (600, 1, 0, 321, 64, 599):
        num_rows.fill_(live)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out[:live], full[:live])
        assert (out[live:] == out.new_tensor(POISON)).all()


@pytest.mark.gpu
def test_compiles_as_one_graph() -> None:
    case = Case(70, torch.bfloat16, "cuda", "bias quick_gelu residual")
    positional, named = case.arguments()
    compiled = torch.compile(lambda *tensors: linear(*tensors, **named) * 2, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*positional), case.run() * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["hopper", "triton"])
def test_offsets_past_two_to_the_31(kernel: str) -> None:
    rows, tail = 560_000, 300
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    case = Case(rows, torch.bfloat16, "cuda", "bias", n=3840, k=1280)
    out = case.run() if kernel == "hopper" else case.run_tile(TRITON_TILES["sm_90"].at(rows))
    case.check(out, slice(rows - tail, rows))
    assert not out.isnan().any()
