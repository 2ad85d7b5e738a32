"""The programs that choose tiles and soak them, where they cannot."""

from importlib import import_module

import pytest
import torch
from click.testing import CliRunner


@pytest.mark.parametrize("name", ["soak_attention", "soak_linear", "tune_attention", "tune_linear"])
def test_without_a_gpu_it_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(import_module(f"bench.{name}").main)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert f"torch {torch.__version__} " in result.output
