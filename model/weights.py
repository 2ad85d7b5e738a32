"""The vision tensors of a checkpoint, from a folder, a file or a hub, under transformers' names.

Only what the encoder needs is touched: of a sharded checkpoint the shards that hold vision tensors (1.5 of
ERNIE-4.5-VL's 56 GB are theirs), of a shard the vision tensors. Three spellings are known, each with or
without a leading ``model.``:

================================  ===================  ====================  ===================
parameters                        original             transformers 5, ours  vLLM
================================  ===================  ====================  ===================
the tower's                       ``vision_model.*``   ``vision_tower.*``    ``vision_model.*``
``resampler_model.spatial_*``     ``*linear.0``        ``*linear.fc1``       ``*linear1``
and ``temporal_*``                ``*linear.2``        ``*linear.fc2``       ``*linear2``
(the same three layers each)      ``*linear.3``        ``*linear.ln``        ``*norm``
``resampler_model.mlp``           the same             the same              the same
``resampler_model.after_norm``    the same             the same              the same
================================  ===================  ====================  ===================

Needs the extra ``weights`` (safetensors, huggingface_hub).
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ernie_vit.model.config import ErnieVisionConfig
from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Applied one after the other; what then starts with a prefix of ours is a vision tensor.
SPELLINGS = (
    (r"^(model\.)?(vision_model|vision_tower)\.", "vision_tower."),
    (r"^model\.resampler_model\.", "resampler_model."),
    (r"^(resampler_model\.(?:spatial|temporal)_linear)(\.0|1)\.", r"\1.fc1."),
    (r"^(resampler_model\.(?:spatial|temporal)_linear)(\.2|2)\.", r"\1.fc2."),
    (r"^(resampler_model\.(?:spatial|temporal))_(linear\.3|norm)\.", r"\1_linear.ln."),
)
PREFIXES = ("vision_tower.", "resampler_model.")

# Any other number format belongs to a scheme of scales, which a cast would ignore.
FLOATS = ("BF16", "F16", "F32", "F64")

# A hub's repository: a name that a path on this machine can bear too, so paths are tried first.
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

# How many names an error message lists of each kind.
NAMES_SHOWN = 20

# Finds a file of a checkpoint by its name; FileNotFoundError if the checkpoint has none.
FileFinder: TypeAlias = Callable[[str], Path]


def read_config(source: str | os.PathLike[str]) -> ErnieVisionConfig:
    """Read the ``config.json`` in a folder, beside a safetensors file, or in a hub's repository.

    Raises:
        FileNotFoundError: no such folder, file or repository, or no ``config.json`` there.
        ValueError: it is no JSON, or no config of this model.
    """
    return ErnieVisionConfig.from_dict(_read_json(_file_finder(source)(CONFIG)))


def read_vision_weights(
    source: str | os.PathLike[str],
    config: ErnieVisionConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Read the encoder's parameters; a checkpoint's other tensors are neither downloaded nor read.

    Args:
        source: a folder with ``model.safetensors.index.json`` or ``model.safetensors``, a safetensors file of
            any name, or a hub's repository, ``owner/name``.
        config: says which tensors of which shapes there must be.
        dtype: floating dtype of the result.
        device: where the tensors go.

    Returns:
        The tensors, each in memory of its own, by names ``vision_tower.*`` and ``resampler_model.*``.

    Raises:
        FileNotFoundError: no such folder, file or repository, or a file of the checkpoint is not there.
        ValueError: vision tensors are missing, unknown, there twice, misshapen or no floats, and the message
            lists them; or a file is damaged, and the message names it.
    """
    find = _file_finder(source)
    expected = _expected_shapes(config)
    shards = _vision_names(find)
    _check_names(source, [name for names in shards.values() for name in names], expected)
    paths = {find(shard): names for shard, names in shards.items()}
    _check_shapes(source, paths, expected)
    tensors: dict[str, Tensor] = {}
    for path, names in paths.items():
        with _open(path) as file:
            for name in names:
                # A copy always: what safetensors gives lies in the mapped file, aligned as it is there.
                tensors[canonical_name(name)] = file.get_tensor(name).to(device, dtype, copy=True)
    return tensors


def canonical_name(name: str) -> str:
    """A tensor's name in our spelling; names of tensors that are not the vision encoder's start otherwise."""
    for pattern, replacement in SPELLINGS:
        name = re.sub(pattern, replacement, name)
    return name


def _expected_shapes(config: ErnieVisionConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        modules = {"vision_tower": VisionTower(config), "resampler_model": Resampler(config)}
    return {
        f"{prefix}.{name}": list(parameter.shape)
        for prefix, module in modules.items()
        for name, parameter in module.state_dict().items()
    }


def _vision_names(find: FileFinder) -> dict[str, list[str]]:
    """The checkpoint's vision tensors, in its own spelling, by the file that holds them."""
    try:
        index = find(INDEX)
    except FileNotFoundError:
        with _open(find(SINGLE)) as file:
            shard_of = dict.fromkeys(file.keys(), SINGLE)
    else:
        shard_of = _read_json(index).get("weight_map", {})
    shards: dict[str, list[str]] = defaultdict(list)
    for name, shard in shard_of.items():
        if canonical_name(name).startswith(PREFIXES):
            shards[shard].append(name)
    return shards


def _check_names(source: object, names: Iterable[str], expected: Mapping[str, object]) -> None:
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in names:
        spellings[canonical_name(name)].append(name)
    wrong = {
        "missing": [name for name in expected if name not in spellings],
        "unknown": [name for ours in spellings.keys() - expected for name in spellings[ours]],
        "there twice": [name for twice in spellings.values() if len(twice) > 1 for name in twice],
    }
    _refuse(source, wrong)


def _check_shapes(source: object, paths: Mapping[Path, list[str]], expected: Mapping[str, list[int]]) -> None:
    misshapen, no_floats = [], []
    for path, names in paths.items():
        with _open(path) as file:
            for name in names:
                tensor, shape = file.get_slice(name), expected[canonical_name(name)]
                if tensor.get_shape() != shape:
                    misshapen.append(f"{name} (expected {shape}, got {tensor.get_shape()})")
                if tensor.get_dtype() not in FLOATS:
                    no_floats.append(f"{name} ({tensor.get_dtype()})")
    _refuse(source, {"misshapen": misshapen, "not floating": no_floats})


def _refuse(source: object, wrong: Mapping[str, list[str]]) -> None:
    parts = []
    for what, names in wrong.items():
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            parts.append(f"{what}: {', '.join(sorted(names)[:NAMES_SHOWN])}{more}")
    if parts:
        raise ValueError(f"{source}: the vision tensors do not fit the config; {'; '.join(parts)}")


def _file_finder(source: str | os.PathLike[str]) -> FileFinder:
    path = Path(source)
    if path.is_dir():
        return partial(_find_in_folder, path)
    if path.is_file():
        return partial(_find_beside, path)
    if isinstance(source, str) and HUB_ID.fullmatch(source):
        return partial(_find_in_hub, source)
    raise FileNotFoundError(f"{source}: no such folder or file, and no name of a hub's repository (owner/name)")


def _find_in_folder(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder}: no {name} in this folder")
    return folder / name


def _find_beside(file: Path, name: str) -> Path:
    """The file is the whole checkpoint, whatever it is called; the config lies beside it."""
    if name == INDEX:
        raise FileNotFoundError(f"{file}: a single file has no index")
    return file if name == SINGLE else _find_in_folder(file.parent, name)


def _find_in_hub(repository: str, name: str) -> Path:
    try:
        return Path(hf_hub_download(repository, name))
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{repository}: neither here nor in the hub ({error})") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{repository}: no {name} in this repository ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dictionary, got {type(content).__name__}")
    return content


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged, or no safetensors file: {error}") from error
