"""ERNIE-4.5-VL's vision encoder with fused Triton kernels and CUDA graphs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a wheel the subpackages lie beside this file; in a checkout they are the top-level folders.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from ernie_vit.encoder import ErnieVisionEncoder
    from ernie_vit.model.config import ErnieVisionConfig
    from ernie_vit.model.metadata import EncoderMetadata, prepare_encoder_metadata

__version__ = "0.1.0"

# Public name -> its module, imported at the first use: `import ernie_vit` alone loads no torch.
_PUBLIC = {
    "EncoderMetadata": "ernie_vit.model.metadata",
    "ErnieVisionConfig": "ernie_vit.model.config",
    "ErnieVisionEncoder": "ernie_vit.encoder",
    "prepare_encoder_metadata": "ernie_vit.model.metadata",
}
__all__ = [
    "EncoderMetadata",
    "ErnieVisionConfig",
    "ErnieVisionEncoder",
    "prepare_encoder_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ernie_vit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
