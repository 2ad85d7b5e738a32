"""One random model for all tests that only read it; a test that changes parameters makes its own."""

import pytest
import reference
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionEncoder


@pytest.fixture(scope="session")
def model() -> Ernie4_5_VLMoeForConditionalGeneration:
    return reference.small_model()


@pytest.fixture(scope="session")
def encoder(model: Ernie4_5_VLMoeForConditionalGeneration) -> ErnieVisionEncoder:
    """Ours on the same parameters."""
    return ErnieVisionEncoder.from_transformers(model, backend="torch")
