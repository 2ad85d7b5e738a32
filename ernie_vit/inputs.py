"""From what is typed on the command line to image files: paths, folders and patterns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

# By these a folder's images are told from its other files. A file named by itself is read whatever its name.
IMAGE_SUFFIXES = {
    *(
        ".avif",
        ".bmp",
        ".gif",
        ".ico",
        ".jfif",
        ".jp2",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
    ),
    *(".tga", ".tif", ".tiff", ".webp"),
}


@dataclass(frozen=True)
class Source:
    """An image file, or a folder with the files of a video's frames in order."""

    path: Path
    frames: tuple[Path, ...] | None = None


def find_sources(paths: Sequence[str], videos: Sequence[str]) -> tuple[list[Source], list[str]]:
    """The images that ``paths`` stand for and then the videos whose frames lie in the folders ``videos``.

    Returns:
        The sources, and a sentence for each argument that stands for none.
    """
    files, problems = find_images(paths)
    sources = [Source(file) for file in files]
    for folder in map(Path, videos):
        frames = images_in(folder) if folder.is_dir() else []
        if frames:
            sources.append(Source(folder, tuple(frames)))
        else:
            problems.append(f"{folder}: no folder with a video's frames")
    return sources, problems


def find_images(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The image files that ``arguments`` stand for, each once, in their order.

    A file stands for itself, a folder for the images directly in it, a pattern (``*``, ``?``, ``[]``, ``**``)
    for the files and folders that match, in name order, numbers in names by their value.

    Returns:
        The files, and a sentence for each argument that stands for none.
    """
    files: dict[Path, None] = {}
    problems = []
    for argument in arguments:
        path = Path(argument)
        matches = [path] if path.exists() else sorted(map(Path, glob(argument, recursive=True)), key=_by_name)
        found = [file for match in matches for file in (images_in(match) if match.is_dir() else [match])]
        files.update(dict.fromkeys(found))
        if not matches:
            problems.append(f"{argument}: no such file or folder")
        elif not found:
            problems.append(f"{argument}: no images in this folder")
    return list(files), problems


def images_in(folder: Path) -> list[Path]:
    """The image files directly in ``folder``, hidden ones apart, in name order."""
    files = [
        file
        for file in folder.iterdir()
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()
    ]
    return sorted(files, key=_by_name)


def _by_name(path: Path) -> list[tuple[str, int]]:
    # "frame2.png" before "frame10.png": text and numbers alternate, each number beside the text before it
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]
