"""Two real photographs that installed packages ship, for the demo and for tests; none is kept here.

``python -m ernie_vit.samples`` prints their paths. Needs the extra ``demo`` (scikit-learn, matplotlib).
"""

from importlib.util import find_spec
from pathlib import Path

# package -> its photograph: a temple (640x427), the portrait of Grace Hopper (512x600)
_PHOTOGRAPHS = {
    "sklearn": "datasets/images/china.jpg",
    "matplotlib": "mpl-data/sample_data/grace_hopper.jpg",
}


def sample_photographs() -> list[Path]:
    """The photographs' paths, found without importing the packages.

    Raises:
        FileNotFoundError: a package is not installed, or ships its photograph no longer.
    """
    paths = []
    for package, photograph in _PHOTOGRAPHS.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"{package} is not installed; the samples need: pip install 'ernie-vit[demo]'")
        path = Path(spec.origin).parent / photograph
        if not path.is_file():
            raise FileNotFoundError(f"{package} ships no {photograph}: expected it at {path}")
        paths.append(path)
    return paths


if __name__ == "__main__":
    here = Path.cwd()
    for path in sample_photographs():
        print(path.relative_to(here) if path.is_relative_to(here) else path)
