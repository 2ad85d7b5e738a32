"""These tests run inside the real vLLM; `make test-vllm` sets its environment up."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_host import HAVE_VLLM, pretend_cpu_build, vllm_world

if HAVE_VLLM:
    pretend_cpu_build()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAVE_VLLM:
        for item in items:
            if "vllm_plugin" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with vllm_world(tmp_path_factory.mktemp("world")) as config:
        yield config
