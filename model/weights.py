"""The vision tensors of a checkpoint, from a folder, a file or a hub, under transformers' names.

Only what the encoder needs is touched: of a sharded checkpoint the shards that hold vision tensors (ERNIE-4.5-VL's
are 1.5 of 56 GB), of a file the tensors themselves. Three spellings are known, each with or without a leading
``model.``:

=======================  ===============================  ======================  ================================
ours (transformers 5)    original                         transformers 5          vLLM
=======================  ===============================  ======================  ================================
``vision_tower.*``       ``vision_model.*``               ``vision_tower.*``      ``vision_model.*``
``*_linear.fc1``         ``*_linear.0``                   ``*_linear.fc1``        ``*_linear1``
``*_linear.fc2``         ``*_linear.2``                   ``*_linear.fc2``        ``*_linear2``
``*_linear.ln``          ``*_linear.3``                   ``*_linear.ln``         ``*_norm``
=======================  ===============================  ======================  ================================

where the last three lines are the resampler's, ``*`` being ``resampler_model.spatial`` and
``resampler_model.temporal``. Its ``mlp`` and ``after_norm`` are called so everywhere.

Needs the extra ``weights`` (safetensors, huggingface_hub).
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower
