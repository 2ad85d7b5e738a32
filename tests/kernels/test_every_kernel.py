"""What holds for every public kernel: wrong tensors are named before a launch; streams, graphs, devices, compilers."""

from typing import Any

import pytest
import torch
from every_kernel import Call, every_kernel
from torch import Tensor

ON_THE_CPU = every_kernel("cpu")
TENSORS = [
    pytest.param(call, name, id=f"{kernel}-{name}") for kernel, call in ON_THE_CPU.items() for name in call.tensors()
]


def another_dtype(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def apart(tensor: Tensor) -> Tensor:
    """The same numbers, of which neighbours in the last dimension do not touch."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]


@pytest.mark.parametrize(("call", "name"), TENSORS)
def test_another_dtype_is_named(call: Call, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected torch"):
        call(**{name: another_dtype(call.arguments[name])})


@pytest.mark.parametrize(
    ("device", "other"), [("cpu", "meta"), pytest.param("cuda", "cpu", marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
@pytest.mark.parametrize("kernel", ON_THE_CPU)
def test_another_device_is_named(kernel: str, device: str, other: str) -> None:
    call = every_kernel(device)[kernel]
    first, *others = call.tensors().items()
    for name, tensor in others:
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor on {device}.*, got one on {other}"):
            call(**{name: tensor.to(other)})
    if others:  # then the first one decides where the others should be
        with pytest.raises(ValueError, match=rf"^\w+: expected a tensor on {other}, got one on {device}"):
            call(**{first[0]: first[1].to(other)})


@pytest.mark.parametrize(("call", "name"), [case for case in TENSORS if case.values[1] != "num_rows"])
def test_neighbours_that_do_not_touch_are_named(call: Call, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a contiguous last dimension"):
        call(**{name: apart(call.arguments[name])})


@pytest.mark.parametrize("kernel", ON_THE_CPU)
def test_a_gradient_of_any_tensor_is_refused(kernel: str) -> None:
    call = ON_THE_CPU[kernel]
    for name, tensor in call.tensors().items():
        if tensor.is_floating_point():
            with pytest.raises(RuntimeError, match=r'^\w+: .*compute no gradients; use backend="torch"'):
                call(**{name: tensor.detach().requires_grad_()})


def run(calls: dict[str, Call], arguments: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    return {kernel: call.function(**arguments[kernel]) for kernel, call in calls.items()}


def results(calls: dict[str, Call]) -> dict[str, Tensor]:
    return run(calls, {kernel: call.arguments for kernel, call in calls.items()})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for kernel, out in expected.items():
        assert torch.equal(found[kernel], out), kernel


@pytest.mark.parametrize(
    ("device", "options"),
    [
        pytest.param("cpu", {"backend": "aot_eager"}, marks=pytest.mark.interpreter, id="interpreter"),
        *(
            pytest.param("cuda", {"mode": mode}, marks=pytest.mark.gpu, id=mode)
            for mode in ("default", "reduce-overhead", "max-autotune")
        ),
    ],
)
def test_compiled_as_one_graph_they_have_the_same_bits(device: str, options: dict[str, str]) -> None:
    calls = every_kernel(device)
    arguments = {kernel: call.arguments for kernel, call in calls.items()}
    compiled = torch.compile(lambda arguments: run(calls, arguments), fullgraph=True, **options)
    with torch.no_grad():
        for _ in range(3 if device == "cuda" else 1):  # reduce-overhead records at the second call
            found = {kernel: out.clone() for kernel, out in compiled(arguments).items()}
            assert_same(found, results(calls))


@pytest.mark.gpu
def test_a_graph_holds_them_all() -> None:
    """On whatever stream is the current one: a launch on another one would not be captured."""
    calls = every_kernel("cuda")
    expected = results(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        found = results(calls)
    for out in found.values():
        out.fill_(-1)
    graph.replay()
    assert_same(found, expected)


@pytest.mark.gpu
def test_none_waits_for_the_gpu() -> None:
    calls = every_kernel("cuda")
    expected = results(calls)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = results(calls)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(found, expected)


@pytest.mark.gpu
def test_the_second_gpu_while_the_first_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    found = results(every_kernel("cuda:1"))
    assert {out.device.index for out in found.values()} == {1}
    assert torch.cuda.current_device() == 0
    assert_same({kernel: out.to("cuda:0") for kernel, out in found.items()}, results(every_kernel("cuda:0")))
