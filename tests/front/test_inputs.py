"""Which files the command line takes for its arguments, and in which order."""

from pathlib import Path

import pytest

from ernie_vit.inputs import Source, find_images, find_sources, images_in


def make(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [str(folder / name) for name in names]


def names(files: list[Path], folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in files]


def test_a_folder_stands_for_its_images_in_order_of_names_and_numbers(tmp_path: Path) -> None:
    make(tmp_path, "f10.png", "f9.PNG", "f1.jpeg", "a2b3.tif", "a2b20.tif", ".f0.png", "notes.txt", "sub/deep.png")
    assert names(images_in(tmp_path), tmp_path) == ["a2b3.tif", "a2b20.tif", "f1.jpeg", "f9.PNG", "f10.png"]


def test_files_come_once_in_the_order_of_the_arguments(tmp_path: Path) -> None:
    b, a, odd = make(tmp_path, "b.png", "a.png", "scan")
    files, problems = find_images([b, odd, str(tmp_path), a])
    assert names(files, tmp_path) == ["b.png", "scan", "a.png"]
    assert problems == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("*.png", ["a.png", "b.png"]), ("**/*.png", ["a.png", "b.png", "sub/c.png"]), ("s?b", ["sub/c.png"])],
)
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    make(tmp_path, "b.png", "a.png", "sub/c.png")
    files, _ = find_images([str(tmp_path / pattern)])
    assert names(files, tmp_path) == expected


def test_a_file_whose_name_reads_as_a_pattern_stands_for_itself(tmp_path: Path) -> None:
    (odd, _) = make(tmp_path, "photo[1].png", "photo1.png")
    files, _ = find_images([odd])
    assert names(files, tmp_path) == ["photo[1].png"]


def test_what_stands_for_nothing_is_named(tmp_path: Path) -> None:
    make(tmp_path, "empty/notes.txt", "clip/f2.png", "clip/f1.png")
    sources, problems = find_sources(
        [f"{tmp_path}/nothing.png", f"{tmp_path}/empty", f"{tmp_path}/*.bmp"], [f"{tmp_path}/clip", f"{tmp_path}/empty"]
    )
    assert sources == [Source(tmp_path / "clip", (tmp_path / "clip/f1.png", tmp_path / "clip/f2.png"))]
    assert [problem.split(": ")[0].removeprefix(f"{tmp_path}/") for problem in problems] == [
        "nothing.png",
        "empty",
        "*.bmp",
        "empty",
    ]
