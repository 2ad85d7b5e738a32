"""Build file. The import name is ``ernie_vit``; its subpackages are the top-level folders beside this file."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent

# import name -> folder
FOLDERS = {
    "ernie_vit": "ernie_vit",
    "ernie_vit.kernels": "kernels",
    "ernie_vit.kernels.triton": "kernels/triton",
    "ernie_vit.kernels.hopper": "kernels/hopper",
    "ernie_vit.kernels.tiles": "kernels/tiles",
    "ernie_vit.model": "model",
    "ernie_vit.graph": "graph",
}

# What reading images, weights files and hubs needs; the encoder itself runs without.
IMAGES = ["transformers>=5.17,<6", "pillow>=11"]
WEIGHTS = ["safetensors>=0.5", "huggingface_hub>=1.0,<2"]
CLI = [*IMAGES, *WEIGHTS, "click>=8.1", "rich>=13", "matplotlib>=3.9"]
TEST = [
    *CLI,
    "pytest>=8",
    "accelerate>=1.8",
    "pytest-benchmark>=5",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "scikit-learn>=1.5",
    "setuptools>=77",  # tests build a wheel without isolation
]

version = re.search(r'__version__ = "(.+)"', (HERE / "ernie_vit/__init__.py").read_text())
assert version is not None, "ernie_vit/__init__.py states no __version__"

setup(
    name="ernie-vit",
    version=version[1],
    description="ERNIE-4.5-VL's vision encoder with fused Triton kernels and CUDA graphs",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"ernie_vit": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "triton>=3.6,<3.10", "numpy>=1.26", "einops>=0.8", "tqdm>=4.66"],
    extras_require={
        "images": IMAGES,
        "weights": WEIGHTS,
        "cli": CLI,
        "demo": [*CLI, "scikit-learn>=1.5"],
        "test": TEST,
        "dev": [*TEST, "ruff>=0.12", "mypy>=1.15", "pre-commit>=4"],
    },
    entry_points={
        "console_scripts": ["ernie-vit = ernie_vit.__main__:main"],
        "vllm.general_plugins": ["ernie_vit = ernie_vit.vllm_plugin:register"],
    },
)
