"""How vLLM finds the plugin, what switches it off, and what makes it leave vLLM alone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_host import ARCHITECTURE, log_lines

from ernie_vit import vllm_plugin

ROOT = Path(__file__).resolve().parents[2]
ENTRY = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "tests")!r})
from vllm_host import ARCHITECTURE, pretend_cpu_build
pretend_cpu_build()
from vllm.engine import arg_utils  # what vLLM has imported when it loads its plugins
from vllm.plugins import load_general_plugins
start = time.perf_counter()
load_general_plugins()
seconds = time.perf_counter() - start
from vllm.model_executor.models.registry import ModelRegistry
entry = ModelRegistry.models[ARCHITECTURE]
"""
REPORT = """
import torch
heavy = {"ernie_vit.encoder", "ernie_vit.vllm_model", "vllm.model_executor.models.ernie45_vl"} & set(sys.modules)
print(type(entry).__module__, sorted(heavy), torch.cuda.is_initialized(), seconds)
"""


def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def models() -> Iterator[dict[str, Any]]:
    """vLLM's registry, left as it was."""
    from vllm.model_executor.models.registry import ModelRegistry

    before = ModelRegistry.models[ARCHITECTURE]
    assert type(before).__name__ == "_LazyRegisteredModel"
    yield ModelRegistry.models
    ModelRegistry.models[ARCHITECTURE] = before


def test_the_entry_point_is_installed() -> None:
    (entry,) = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "ernie_vit"]
    assert entry.load() is vllm_plugin.register


def test_vllm_loads_the_plugin_quickly_and_lightly() -> None:
    owner, heavy, cuda, seconds = run(ENTRY + REPORT).stdout.splitlines()[-1].split()
    assert (owner, heavy, cuda) == ("ernie_vit.vllm_plugin", "[]", "False")
    assert float(seconds) < 0.5


@pytest.mark.parametrize("environment", [{"ERNIE_VIT_DISABLE": "1"}, {"VLLM_PLUGINS": "another"}], ids=str)
def test_the_kill_switches(environment: dict[str, str]) -> None:
    owner = run(ENTRY + REPORT, **environment).stdout.splitlines()[-1].split()[0]
    assert owner.startswith("vllm.")


def test_a_renamed_method_leaves_vllm_alone(tmp_path: Path) -> None:
    """A tree of links to the real vLLM in which ``_vision_forward`` has another name."""
    import vllm

    real, copy = Path(vllm.__file__).parent, tmp_path / "vllm"
    folder = Path(vllm_plugin.SOURCE).parent
    for part in (Path(), *reversed(folder.parents[:-1]), folder):
        (copy / part).mkdir()
        for child in (real / part).iterdir():
            if child.name not in (*folder.parts, Path(vllm_plugin.SOURCE).name):
                (copy / part / child.name).symlink_to(child)
    source = (real / vllm_plugin.SOURCE).read_text()
    (copy / vllm_plugin.SOURCE).write_text(source.replace("_vision_forward", "_encode_patches"))
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(ENTRY + REPORT, PYTHONPATH=paths)
    assert done.stdout.splitlines()[-1].split()[0].startswith("vllm.")
    line = f"ernie-vit leaves vLLM {vllm.__version__} as it is: looked for 'def _vision_forward('"
    assert line in done.stdout + done.stderr


def test_without_triton_vllm_loads_the_model_class_all_the_same() -> None:
    blocker = "import sys; sys.modules['triton'] = None\n"
    code = blocker + ENTRY + "print(entry.load_model_cls().__mro__[1].__module__)"
    assert run(code).stdout.splitlines()[-1] == "ernie_vit.vllm_model"


def test_registering_twice_and_unpatching(models: dict[str, Any]) -> None:
    stock = models[ARCHITECTURE]
    vllm_plugin.register()
    first = models[ARCHITECTURE]
    vllm_plugin.register()
    assert models[ARCHITECTURE] is first
    assert first.stock is stock
    vllm_plugin.unpatch()
    vllm_plugin.unpatch()
    assert models[ARCHITECTURE] is stock
    with vllm_plugin.patch():
        assert models[ARCHITECTURE] is not stock
    assert models[ARCHITECTURE] is stock


def test_a_process_that_has_loaded_the_model_looks_its_class_up_again(models: dict[str, Any]) -> None:  # noqa: ARG001
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader.utils import get_model_cls

    config = SimpleNamespace(
        **{"model": "folder", "convert_type": "none", "runner_type": "generate", "trust_remote_code": True},
        **{"model_impl": "vllm", "registry": ModelRegistry, "_get_transformers_backend_cls": lambda: "another"},
        hf_config=SimpleNamespace(architectures=[ARCHITECTURE]),
    )
    stock = get_model_cls(config)
    with vllm_plugin.patch():
        assert getattr(get_model_cls(config), "stock", None) is stock
    assert get_model_cls(config) is stock


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "1.0", "dev"])
def test_an_unknown_version_leaves_vllm_alone(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    stock = models[ARCHITECTURE]
    monkeypatch.setattr("vllm.__version__", version)
    with log_lines() as lines:
        vllm_plugin.register()
    assert models[ARCHITECTURE] is stock
    assert lines == [f"WARNING ernie-vit leaves vLLM {version} as it is: looked for a version from 0.24 to 0.33"]


@pytest.mark.parametrize("version", ["0.33.0", "0.34.0"])
def test_a_registry_that_is_elsewhere_does_not_keep_vllm_from_starting(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", None)
    with log_lines() as lines:
        vllm_plugin.register()
        vllm_plugin.unpatch()
    looked_for = {"0.33.0": f"{ARCHITECTURE} of .* in its model registry", "0.34.0": "a version from 0.24 to 0.33"}
    assert len(lines) == 1
    assert re.match(f"WARNING ernie-vit leaves vLLM {version} as it is: looked for {looked_for[version]}", lines[0])


def test_another_plugins_model_is_left_alone(models: dict[str, Any]) -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "another_plugin:Model")
    theirs = models[ARCHITECTURE]
    with log_lines() as lines:
        vllm_plugin.register()
    assert models[ARCHITECTURE] is theirs
    assert len(lines) == 1
    assert "found another_plugin" in lines[0]


def test_a_class_that_lacks_a_hook_is_served_as_it_is(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import ernie45_vl

    vllm_plugin.patch()
    stock = ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration
    monkeypatch.delattr(stock, "_vision_forward")
    with log_lines() as lines:
        assert models[ARCHITECTURE].load_model_cls() is stock
    assert len(lines) == 1
    assert "looked for _vision_forward in vllm.model_executor.models.ernie45_vl" in lines[0]


def test_a_hook_with_other_arguments_is_served_as_it_is(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import ernie45_vl

    vllm_plugin.patch()
    stock = ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration
    monkeypatch.setattr(stock, "_vision_forward", lambda self, grid_thw, pixel_values: None)  # noqa: ARG005
    with log_lines() as lines:
        assert models[ARCHITECTURE].load_model_cls() is stock
    assert len(lines) == 1
    assert "looked for _vision_forward(self, pixel_values, grid_thw) in vllm." in lines[0]
    assert lines[0].endswith("found (self, grid_thw, pixel_values)")


def test_vllm_gets_its_own_answers_about_the_class() -> None:
    @dataclass(frozen=True)
    class Info:
        architecture: str
        supports_multimodal_encoder_tp_data: bool

    @dataclass(frozen=True)
    class Stock:
        def inspect_model_cls(self) -> Info:
            return Info(ARCHITECTURE, False)

    assert vllm_plugin._Entry(Stock()).inspect_model_cls() == Info(ARCHITECTURE, True)


def test_the_derived_class_is_vllms_in_front_of_the_tower(models: dict[str, Any]) -> None:
    from vllm.model_executor.models import ernie45_vl

    stock = ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration
    before = dict(vars(stock))
    vllm_plugin.patch()
    ours = models[ARCHITECTURE].load_model_cls()
    assert issubclass(ours, stock)
    assert ours.__name__ == ARCHITECTURE
    assert ours._processor_factory is stock._processor_factory
    assert ours.load_weights is stock.load_weights
    assert ours.forward is stock.forward
    assert dict(vars(stock)) == before
