"""Kernel tests run the same bodies in Triton's interpreter (CPU tensors) and on a GPU."""

import pytest


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
