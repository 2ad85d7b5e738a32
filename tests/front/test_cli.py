"""``ernie-vit`` on good and bad files."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("click")
Image = pytest.importorskip("PIL.Image")
safetensors = pytest.importorskip("safetensors")

if TYPE_CHECKING:
    from click.testing import Result

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Invoke = Callable[..., "Result"]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stored:
    """A tokens file."""

    tokens: dict[str, torch.Tensor]
    items: dict[str, Any]
    encoder: dict[str, Any]

    @classmethod
    def read(cls, file: Path) -> "Stored":
        with safetensors.safe_open(file, framework="pt") as content:
            tokens = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  no mapping
            metadata = content.metadata()
        return cls(tokens, json.loads(metadata["items"]), json.loads(metadata["encoder"]))


def photograph(width: int, height: int, seed: int = 0) -> Any:
    """A smooth picture without symmetry: four random colours at the corners, blended."""
    corners = torch.randint(0, 256, (1, 3, 2, 2), generator=torch.Generator().manual_seed(seed)).float()
    pixels = torch.nn.functional.interpolate(corners, (height, width), mode="bilinear", align_corners=True)
    return Image.fromarray(pixels[0].permute(1, 2, 0).byte().numpy())


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[int, int]]:
    """Images as people have them, in one folder with other things: each file and its upright width and height."""
    folder = tmp_path_factory.mktemp("album")
    picture = photograph(120, 80)
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    grey16 = Image.fromarray((torch.arange(80 * 120).reshape(80, 120) * 6).to(torch.uint16).numpy())
    images: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain.jpg": (picture, {}),
        "turned.jpg": (picture, {"exif": turned}),
        "alpha.png": (picture.convert("RGBA"), {}),
        "palette.gif": (picture.convert("P"), {}),
        "grey.png": (picture.convert("L"), {}),
        "grey16.png": (grey16, {}),
        "print.tif": (picture.convert("CMYK"), {}),
        "line.png": (photograph(90, 1), {}),
        "banner.webp": (photograph(900, 3), {}),
    }
    for name, (image, options) in images.items():
        image.save(folder / name, **options)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.jpg").write_text("no image")
    sizes = {"turned.jpg": (80, 120), "line.png": (90, 1), "banner.webp": (900, 3)}
    return {folder / name: sizes.get(name, (120, 80)) for name in images}


def test_a_folder_of_images_as_people_have_them(
    ernie_vit: Run, checkpoint: Path, album: dict[Path, tuple[int, int]], tmp_path: Path
) -> None:
    from ernie_vit import ErnieVisionEncoder

    folder = next(iter(album)).parent
    out, picture = tmp_path / "new" / "tokens.safetensors", tmp_path / "tokens.png"
    arguments = ("--weights", checkpoint, "--device", "cpu", "--max-pixels", 50176, "--out", out, "--picture", picture)
    run = ernie_vit("encode", folder, *arguments)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""

    stored = Stored.read(out)
    assert stored.encoder["weights"] == str(checkpoint)
    assert stored.encoder["backend"] == "torch"
    assert stored.tokens.keys() == stored.items.keys() == {path.name for path in album}
    encoder = ErnieVisionEncoder.from_pretrained(checkpoint, device="cpu")
    for path, size in album.items():
        item = stored.items[path.name]
        assert item["path"] == str(path)
        assert tuple(item["size"]) == size
        frames, height, width = item["grid_thw"]
        assert frames == 1
        assert height * width * 14 * 14 <= 50176
        tokens = stored.tokens[path.name]
        assert tokens.shape == (height * width // 4, 128)
        (expected,) = encoder.encode([path], max_pixels=50176)
        torch.testing.assert_close(tokens, expected)
        (row,) = [line.split() for line in run.stdout.splitlines() if line.startswith(path.name)]
        assert row[1] == f"{size[0]}x{size[1]}"
        assert row[-3:] == ["cpu", "float32", "torch"]
        assert row[-6:-4] == [str(height * width), str(len(tokens))]
        assert float(row[-4]) > 0
    # as many pixels again lie beside the photographs, of eight panels at most
    width, height = Image.open(picture).size
    assert width > 1000
    assert height > 1000


def test_bad_files_are_named_and_the_others_encoded(ernie_vit: Run, checkpoint: Path, tmp_path: Path) -> None:
    photograph(60, 60).save(tmp_path / "good.png")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:120])
    (tmp_path / "none").mkdir()
    bad = [tmp_path / name for name in ("text.jpg", "empty.jpg", "cut.png", "missing.jpg", "none", "*.bmp")]
    out = tmp_path / "tokens.safetensors"
    arguments = (*bad, tmp_path / "good.png", "--weights", checkpoint, "--device", "cpu", "--out", out)
    run = ernie_vit("encode", *arguments)
    assert run.returncode == 1
    named = [line for line in run.stderr.splitlines() if line.startswith("not encoded: ")]
    assert len(named) == len(bad)
    assert all(any(f"{path}: " in line for line in named) for path in bad), run.stderr
    assert "Traceback" not in run.stderr
    assert Stored.read(out).tokens.keys() == {"good.png"}


def test_only_bad_files_leave_no_output(invoke: Invoke, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    out = tmp_path / "tokens.safetensors"
    run = invoke("encode", tmp_path, "--weights", checkpoint, "--device", "cpu", "--out", out)
    assert run.exit_code == 1
    assert f"not encoded: {tmp_path / 'text.jpg'}: " in run.output
    assert not out.exists()


def test_videos_and_repeated_names(ernie_vit: Run, checkpoint: Path, tmp_path: Path) -> None:
    from ernie_vit.model.images import preprocess_video

    clip, other = tmp_path / "clip", tmp_path / "other"
    clip.mkdir()
    other.mkdir()
    numbers = (1, 2, 10)  # in name order with their numbers by value; an odd number of frames
    for number in numbers:
        photograph(64, 48, seed=number).save(clip / f"frame{number}.png")
    photograph(64, 48, seed=7).save(other / "frame1.png")
    (other / "frame2.png").write_text("no image")
    out = tmp_path / "tokens.safetensors"
    arguments = ("--video", clip, "--video", other, "--weights", checkpoint, "--device", "cpu", "--out", out)
    # the pattern matches clip's and other's frame1.png; the first again, by its name, is the same file
    run = ernie_vit("encode", tmp_path / "*" / "frame1.png", clip / "frame1.png", "--max-pixels", 50176, *arguments)
    assert run.returncode == 1
    assert f"not encoded: {other / 'frame2.png'}: " in run.stderr

    stored = Stored.read(out)
    assert list(stored.items) == ["frame1.png", "frame1.png#2", "clip"]
    assert stored.items["frame1.png#2"]["path"] == str(other / "frame1.png")
    assert stored.items["clip"]["grid_thw"][0] == 4

    from ernie_vit import ErnieVisionEncoder

    encoder = ErnieVisionEncoder.from_pretrained(checkpoint, device="cpu")
    rows, grid = preprocess_video([clip / f"frame{number}.png" for number in numbers], max_pixels=50176)
    torch.testing.assert_close(stored.tokens["clip"], encoder(rows, grid))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((), "no images to encode", id="nothing"),
        pytest.param(("missing.jpg",), "no images to encode", id="missing"),
        pytest.param(("--video", "missing"), "no images to encode", id="missing-video"),
        pytest.param(("setup.py", "--picture", "tokens.txt"), "--picture: expected one of .png", id="picture"),
        pytest.param(("setup.py", "--min-pixels", 9, "--max-pixels", 8), "--min-pixels 9 is more", id="limits"),
        pytest.param(("setup.py", "--weights", "no/such/folder"), "no/such/folder", id="weights"),
        pytest.param(
            ("setup.py", "--device", "abacus"), "device: expected auto, cpu, cuda or cuda:N, got 'abacus'", id="device"
        ),
        pytest.param(
            ("setup.py", "--device", "cpu", "--backend", "triton"), "backend: 'triton' cannot run here", id="backend"
        ),
    ],
)
def test_wrong_calls_say_what_is_wrong(invoke: Invoke, arguments: Sequence[object], message: str) -> None:
    run = invoke("encode", *arguments)
    assert run.exit_code in (1, 2)
    assert f"Error: {message}" in run.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_a_gpu_that_is_not_here(invoke: Invoke) -> None:
    run = invoke("encode", "setup.py", "--device", "cuda")
    assert run.exit_code == 1
    assert "Error: device: cuda cannot be used: torch" in run.output


def test_a_seed_decides_the_tokens(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ernie_vit import ErnieVisionConfig, ErnieVisionEncoder

    # The command's own random weights have the model's full size.
    small = ErnieVisionConfig(depth=1, hidden_size=160, num_heads=2, intermediate_size=640, text_hidden_size=128)
    from_config = ErnieVisionEncoder.from_config
    monkeypatch.setattr(ErnieVisionEncoder, "from_config", lambda **options: from_config(small, **options))
    photograph(56, 56).save(tmp_path / "a.png")

    def tokens(seed: int) -> torch.Tensor:
        out = tmp_path / "tokens.safetensors"
        invoke("encode", tmp_path / "a.png", "--seed", seed, "--device", "cpu", "--out", out)
        return Stored.read(out).tokens["a.png"]

    first = tokens(5)
    assert torch.equal(first, tokens(5))
    assert not torch.equal(first, tokens(6))


def test_info(ernie_vit: Run) -> None:
    run = ernie_vit("info")
    assert run.returncode == 0, run.stderr
    facts = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines() if line.strip()}
    assert facts["torch"] == [torch.__version__]
    assert facts["Python"] == [sys.version.split()[0]]
    assert facts.keys() >= {"ernie-vit", "triton", "transformers", "GPU"}
    assert facts["cpu"][:2] == ["float32", "torch"]
    assert "CPU" in facts["cpu"]


@pytest.mark.gpu
def test_a_gpu_is_taken_where_there_is_one(ernie_vit: Run, checkpoint: Path, tmp_path: Path) -> None:
    photograph(300, 200).save(tmp_path / "a.png")
    run = ernie_vit("encode", tmp_path, "--weights", checkpoint)
    assert run.returncode == 0, run.stderr
    (row,) = [line.split() for line in run.stdout.splitlines() if line.startswith("a.png")]
    assert row[-3:] == ["cuda:0", "bfloat16", "triton"]
    assert "cuda:0 bfloat16 triton" in " ".join(ernie_vit("info").stdout.split())


def test_help_loads_no_torch() -> None:
    code = """
import sys
from ernie_vit.cli import cli
cli(["encode", "--help"], standalone_mode=False)
print(*{"torch", "numpy", "rich", "PIL", "transformers"} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--max-pixels" in run.stdout
    assert run.stdout.splitlines()[-1] == ""


def test_missing_packages_are_named() -> None:
    code = """
import sys
sys.modules["click"] = None
from ernie_vit.__main__ import main
main()
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "not installed: click; pip install 'ernie-vit[cli]'" in run.stderr
