"""The house's rules: rooms without ``__init__.py``, one way of importing, a light start, and what a wheel holds."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "model", "graph")
# Whose modules each room may import.
BELOW = {"kernels": {"kernels"}, "model": {"kernels", "model"}, "graph": {"kernels", "model", "graph"}}
# What the command line, images and weights files need, and the encoder itself does not.
EXTRAS = ("PIL", "click", "huggingface_hub", "matplotlib", "rich", "safetensors", "transformers")
# `import ernie_vit` reads one file; this leaves room for a busy machine.
IMPORT_SECONDS = 0.05

BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python(code: str, *options: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run ``code`` in a process of its own and return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_init_file(room: str) -> None:
    # With one, the folder shadows a distribution of its name: transformers imports Hugging Face's `kernels`.
    assert not list((ROOT / room).rglob("__init__.py"))


def test_no_conftest_at_the_root() -> None:
    assert not (ROOT / "conftest.py").exists()


def test_rooms_are_imported_by_the_front_door() -> None:
    for path in python_files("ernie_vit", *ROOMS, "tests", "bench"):
        direct = [name for name in imported_modules(path) if name.split(".")[0] in ROOMS]
        assert not direct, f"{path}: imports {direct}, expected ernie_vit.*"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_itself_and_those_below(room: str) -> None:
    for path in python_files(room):
        for name in imported_modules(path):
            package, _, rest = name.partition(".")
            if package == "ernie_vit":
                assert rest.split(".")[0] in BELOW[room], f"{path}: {room}/ may not import {name}"


def test_kernels_need_nothing_but_torch_and_triton() -> None:
    for path in python_files("kernels"):
        packages = {name.split(".")[0] for name in imported_modules(path)}
        foreign = packages - set(sys.stdlib_module_names) - {"torch", "triton", "ernie_vit"}
        assert not foreign, f"{path}: imports {foreign}"


def test_names_that_triton_removed_are_not_used() -> None:
    for path in python_files("ernie_vit", *ROOMS, "bench"):
        removed = re.findall(r"make_block_ptr|tl\.advance", path.read_text())
        assert not removed, f"{path}: {removed}"


def test_transformers_can_be_imported_in_the_checkout() -> None:
    assert python("import ernie_vit, transformers.modeling_utils; print('ok')") == "ok"


def test_the_front_door_is_light() -> None:
    measure = """
import sys, time
start = time.perf_counter()
import ernie_vit
print(time.perf_counter() - start, *({"torch", "triton", "numpy", "transformers"} & set(sys.modules)))
"""
    runs = [python(measure).split() for _ in range(3)]
    assert all(len(run) == 1 for run in runs), f"import ernie_vit loads {runs[0][1:]}"
    assert min(float(run[0]) for run in runs) < IMPORT_SECONDS


def test_the_public_names_are_there_and_start_no_cuda() -> None:
    code = """
import ernie_vit, torch
names = [getattr(ernie_vit, name) for name in ernie_vit.__all__]
print(len(names) > 0, torch.cuda.is_initialized())
"""
    assert python(code) == "True False"


def test_kernel_modules_can_be_imported_without_triton_and_gpu() -> None:
    modules = [
        ".".join(("ernie_vit", *path.relative_to(ROOT).with_suffix("").parts))
        for path in python_files("kernels")
        if path.relative_to(ROOT).parts[1] not in ("triton", "hopper")
    ]
    assert "ernie_vit.kernels.linear" in modules
    blocker = BLOCKER.format(names={"triton"})
    code = f"""{blocker}
from importlib import import_module
for name in {modules!r}:
    import_module(name)
print("triton" in sys.modules)
"""
    assert python(code, CUDA_VISIBLE_DEVICES="") == "False"


def test_the_encoder_needs_no_extras() -> None:
    code = f"""{BLOCKER.format(names=set(EXTRAS))}
import torch
from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder
config = ErnieVisionConfig(depth=1, hidden_size=160, num_heads=2, intermediate_size=64, text_hidden_size=32)
encoder = ErnieVisionEncoder.from_config(config, device="cpu")
print(*encoder(torch.randn(16, 588), torch.tensor([[1, 4, 4]])).shape)
"""
    assert python(code) == "4 32"


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a distribution is built from: a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in ("ernie_vit", *ROOMS):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


def pip(*arguments: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-build-isolation", "--no-deps"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def modules() -> set[Path]:
    """The rooms' and the front door's modules, as paths below the import name's folder."""
    rooms = {path.relative_to(ROOT) for path in python_files(*ROOMS)}
    return rooms | {path.relative_to(ROOT / "ernie_vit") for path in python_files("ernie_vit")}


def test_a_wheel_holds_every_module_and_works(sources: Path, tmp_path: Path) -> None:
    pip("wheel", str(sources), "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    pip("install", str(wheel), "--target", str(tmp_path / "site"))
    package = tmp_path / "site" / "ernie_vit"
    assert {path.relative_to(package) for path in package.rglob("*.py")} == modules()
    assert (package / "py.typed").exists()
    code = """
import ernie_vit, ernie_vit.kernels.linear as linear
from importlib.metadata import distribution
(command,) = distribution("ernie-vit").entry_points.select(group="console_scripts")
print(linear.__file__, command.name, ernie_vit.ErnieVisionEncoder.__name__, command.load().__name__)
"""
    printed = python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).split()
    assert printed == [str(package / "kernels" / "linear.py"), "ernie-vit", "ErnieVisionEncoder", "main"]


def test_an_editable_install_works(sources: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--editable", str(sources), "--target", str(site))
    # Without site-packages' own .pth files (-S), of which one may already lead to this checkout.
    code = f"""
import site, sys
site.addsitedir({str(site)!r})
sys.path += {[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]!r}
import ernie_vit, ernie_vit.kernels.linear as linear
print(linear.__file__, ernie_vit.ErnieVisionEncoder.__name__)
"""
    assert python(code, "-S", cwd=tmp_path).split() == [str(sources / "kernels" / "linear.py"), "ErnieVisionEncoder"]
