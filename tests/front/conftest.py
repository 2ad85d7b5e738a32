"""A small checkpoint, and the command line in a process of its own or in this one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from click.testing import Result

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json and one safetensors file: 1 block, width 160, text width 128."""
    from safetensors.torch import save_file

    from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder

    sizes = {"depth": 1, "hidden_size": 160, "num_heads": 2, "intermediate_size": 640}
    encoder = ErnieVisionEncoder.from_config(ErnieVisionConfig(**sizes, text_hidden_size=128), seed=3, device="cpu")
    folder = tmp_path_factory.mktemp("ernie-4.5-vl.small")
    config = {"vision_config": sizes, "text_config": {"hidden_size": 128}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"model.{name}": tensor for name, tensor in encoder.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def ernie_vit() -> Run:
    """Runs ``ernie-vit`` with the arguments given."""

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "ernie_vit", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def invoke() -> "Callable[..., Result]":
    """Runs ``ernie-vit`` in this process, which has loaded torch and transformers already."""
    from click.testing import CliRunner

    from ernie_vit.cli import cli

    return lambda *arguments: CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
