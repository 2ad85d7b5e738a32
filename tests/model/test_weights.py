"""Checkpoints in every spelling, and what must not pass as one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor
from transformers import Ernie4_5_VLMoeForConditionalGeneration

from ernie_vit import ErnieVisionEncoder
from ernie_vit.model import weights
from ernie_vit.model.weights import canonical_name, read_config, read_vision_weights

Tensors = dict[str, Tensor]

RESAMPLER = {
    "original": {"_linear.fc1": "_linear.0", "_linear.fc2": "_linear.2", "_linear.ln": "_linear.3"},
    "transformers": {},
    "vllm": {"_linear.fc1": "_linear1", "_linear.fc2": "_linear2", "_linear.ln": "_norm"},
}
# spelling: prefix of the tower, prefix of the resampler, names inside the resampler
SPELLINGS = {
    "original": ("vision_model.", "model.resampler_model.", RESAMPLER["original"]),
    "original, saved by transformers": ("model.vision_model.", "model.resampler_model.", RESAMPLER["original"]),
    "transformers": ("model.vision_tower.", "model.resampler_model.", RESAMPLER["transformers"]),
    "transformers, base model": ("vision_tower.", "resampler_model.", RESAMPLER["transformers"]),
    "vllm": ("vision_model.", "resampler_model.", RESAMPLER["vllm"]),
}
# What else such checkpoints hold, and must neither disturb nor be read.
OTHERS = {
    "lm_head.weight": torch.zeros(3, dtype=torch.int8),
    "model.layers.0.mlp.vision_moe.gate.weight": torch.zeros(3),
    "model.language_model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(3),
    "language_model.model.embed_tokens.weight": torch.zeros(3),
}


@pytest.fixture(scope="module")
def tensors(model: Ernie4_5_VLMoeForConditionalGeneration) -> Tensors:
    """Vision tensors under our names."""
    state = model.model.state_dict()
    return {name: tensor for name, tensor in state.items() if not name.startswith("language_model")}


def spelled(tensors: Tensors, spelling: str) -> Tensors:
    tower, resampler, inside = SPELLINGS[spelling]
    renamed = {}
    for name, tensor in tensors.items():
        for ours, theirs in inside.items():
            name = name.replace(ours, theirs)
        name = name.replace("vision_tower.", tower).replace("resampler_model.", resampler)
        renamed[name] = tensor
    return renamed


def save(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint in ``folder``: one file, or shards over which the tensors are dealt, and another of the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(reference.small_config().to_dict()))
    if shards == 1:
        save_file({**tensors, **OTHERS}, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        dealt = dict(list(tensors.items())[shard::shards])
        save_file(dealt, folder / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(dealt, f"model-{shard}.safetensors")
    save_file(OTHERS, folder / "model-others.safetensors")
    weight_map |= dict.fromkeys(OTHERS, "model-others.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(source: str | Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return read_vision_weights(source, read_config(source), dtype=dtype, device="cpu")


def assert_same(read: Tensors, tensors: Tensors) -> None:
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_round_trips(tmp_path: Path, tensors: Tensors, spelling: str, shards: int) -> None:
    folder = save(tmp_path, spelled(tensors, spelling), shards)
    assert_same(read(folder), tensors)
    encoder = ErnieVisionEncoder.from_pretrained(str(folder), device="cpu", dtype=torch.float32)
    assert_same(encoder.state_dict(), tensors)
    assert encoder.config == reference.SMALL


def test_what_transformers_saves_is_read(
    tmp_path: Path, model: Ernie4_5_VLMoeForConditionalGeneration, tensors: Tensors
) -> None:
    model.save_pretrained(tmp_path, max_shard_size="2MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same(read(tmp_path), tensors)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32], ids=str)
def test_dtype_is_cast(tmp_path: Path, tensors: Tensors, kept: torch.dtype, wanted: torch.dtype) -> None:
    stored = {name: tensor.to(kept) for name, tensor in tensors.items()}
    folder = save(tmp_path, spelled(stored, "original"))
    assert_same(read(folder, wanted), {name: tensor.to(wanted) for name, tensor in stored.items()})


def test_tensors_outlive_their_file(tmp_path: Path, tensors: Tensors) -> None:
    """They are no views of the mapped file, which may change or lie unaligned."""
    folder = save(tmp_path, spelled(tensors, "original"))
    loaded = read(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert_same(loaded, tensors)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in loaded.values())


def test_folder_with_a_dot_and_file_by_name(tmp_path: Path, tensors: Tensors) -> None:
    folder = save(tmp_path / "ERNIE-4.5-VL", spelled(tensors, "original"))
    assert_same(read(folder), tensors)
    file = (folder / "model.safetensors").rename(folder / "x.safetensors")
    assert_same(read(file), tensors)
    assert_same(read(str(file)), tensors)


class TestRefusals:
    """One error names every vision tensor that does not fit."""

    @pytest.mark.parametrize("shards", [1, 2])
    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_missing(self, tmp_path: Path, tensors: Tensors, spelling: str, shards: int) -> None:
        missing = ["vision_tower.blocks.1.attn.qkv.bias", "resampler_model.temporal_linear.ln.weight"]
        rest = {name: tensor for name, tensor in tensors.items() if name not in missing}
        with pytest.raises(ValueError, match=f"missing: {missing[1]}, {missing[0]}$"):
            read(save(tmp_path, spelled(rest, spelling), shards))

    @pytest.mark.parametrize("shards", [1, 2])
    @pytest.mark.parametrize(
        "name",
        [
            "vision_model.blocks.2.norm1.weight",  # a block more than the config has
            "model.vision_tower.blocks.0.attn.k_proj.weight",
            "vision_model.rotary_pos_emb.inv_freq",
            "model.resampler_model.spatial_linear.1.weight",
            "resampler_model.spatial_linear3.weight",
            "model.resampler_model.after_norm.bias",
        ],
    )
    def test_unknown(self, tmp_path: Path, tensors: Tensors, name: str, shards: int) -> None:
        added = {**spelled(tensors, "original"), name: torch.zeros(2)}
        with pytest.raises(ValueError, match=f"unknown: {name}$"):
            read(save(tmp_path, added, shards))

    @pytest.mark.parametrize("shards", [1, 2])
    def test_misshapen(self, tmp_path: Path, tensors: Tensors, shards: int) -> None:
        changed = spelled(tensors, "original")
        changed["vision_model.ln.weight"] = torch.zeros(161)
        changed["model.resampler_model.mlp.weight"] = changed["model.resampler_model.mlp.weight"].T.contiguous()
        with pytest.raises(ValueError, match="misshapen") as caught:
            read(save(tmp_path, changed, shards))
        assert "model.resampler_model.mlp.weight (expected [128, 640], got [640, 128])" in str(caught.value)
        assert "vision_model.ln.weight (expected [160], got [161])" in str(caught.value)

    def test_twice(self, tmp_path: Path, tensors: Tensors) -> None:
        both = spelled(tensors, "original")
        both["model.vision_tower.ln.weight"] = torch.zeros(160)
        with pytest.raises(ValueError, match=r"twice: model\.vision_tower\.ln\.weight, vision_model\.ln\.weight$"):
            read(save(tmp_path, both))

    def test_quantized(self, tmp_path: Path, tensors: Tensors) -> None:
        changed = spelled(tensors, "original")
        changed["vision_model.ln.weight"] = torch.zeros(160, dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match=r"not floating: vision_model\.ln\.weight \(F8_E4M3\)"):
            read(save(tmp_path, changed))

    def test_another_model(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"missing: resampler_model\.after_norm\.weight, .* and 22 more"):
            read(save(tmp_path, {}))

    @pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1", b"", None])
    def test_damaged_file(self, tmp_path: Path, tensors: Tensors, content: bytes | None) -> None:
        folder = save(tmp_path, spelled(tensors, "original"), shards=2)
        file = folder / "model-1.safetensors"
        file.write_bytes(file.read_bytes()[:-100] if content is None else content)
        with pytest.raises(ValueError, match=r"model-1\.safetensors: damaged"):
            read(folder)

    def test_shard_without_its_tensor(self, tmp_path: Path, tensors: Tensors) -> None:
        folder = save(tmp_path, spelled(tensors, "original"), shards=2)
        save_file({"other": torch.zeros(1)}, folder / "model-1.safetensors")
        with pytest.raises(ValueError, match=r"model-1\.safetensors: damaged"):
            read(folder)

    @pytest.mark.parametrize("lost", ["config.json", "model-1.safetensors"])
    def test_lost_file(self, tmp_path: Path, tensors: Tensors, lost: str) -> None:
        folder = save(tmp_path, spelled(tensors, "original"), shards=2)
        (folder / lost).unlink()
        with pytest.raises(FileNotFoundError, match=f"no {lost} in this folder"):
            read(folder)

    def test_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(reference.small_config().to_dict()))
        with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in this folder"):
            read(tmp_path)

    @pytest.mark.parametrize("source", ["/no/such/folder", "./no/folder", "folder", Path("owner/name"), "a/b/c"])
    def test_no_such_source(self, source: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights, "hf_hub_download", lambda *_: pytest.fail("asked the hub"))
        with pytest.raises(FileNotFoundError, match="no such folder or file"):
            read(source)

    @pytest.mark.parametrize("content", ["{", "[]", "\x00"])
    def test_config_that_is_none(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            read_config(tmp_path)


class TestHub:
    @pytest.fixture
    def fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the files that were fetched from a hub whose repositories lie in ``tmp_path``."""
        names: list[str] = []

        def download(repository: str, name: str) -> str:
            if not (tmp_path / repository / name).exists():
                raise EntryNotFoundError(f"404: {name}")
            names.append(name)
            return str(tmp_path / repository / name)

        monkeypatch.setattr(weights, "hf_hub_download", download)
        return names

    def test_only_shards_with_vision_tensors_are_fetched(
        self, tmp_path: Path, tensors: Tensors, fetched: list[str]
    ) -> None:
        save(tmp_path / "owner/ERNIE-4.5-VL", spelled(tensors, "original"), shards=2)
        assert_same(read("owner/ERNIE-4.5-VL"), tensors)
        assert sorted(fetched) == [
            "config.json",
            "model-0.safetensors",
            "model-1.safetensors",
            "model.safetensors.index.json",
        ]

    def test_a_wrong_checkpoint_is_refused_before_a_shard_is_fetched(
        self, tmp_path: Path, tensors: Tensors, fetched: list[str]
    ) -> None:
        rest = {name: tensor for name, tensor in tensors.items() if name != "vision_tower.ln.bias"}
        save(tmp_path / "owner/name", spelled(rest, "original"), shards=2)
        with pytest.raises(ValueError, match=r"missing: vision_tower\.ln\.bias"):
            read("owner/name")
        assert sorted(fetched) == ["config.json", "model.safetensors.index.json"]

    def test_single_file(self, tmp_path: Path, tensors: Tensors, fetched: list[str]) -> None:
        save(tmp_path / "owner/name", spelled(tensors, "original"))
        assert_same(read("owner/name"), tensors)
        assert set(fetched) == {"config.json", "model.safetensors"}

    @pytest.mark.usefixtures("fetched")
    def test_missing_file(self) -> None:
        with pytest.raises(FileNotFoundError, match=r"owner/name: no config\.json in this repository"):
            read_config("owner/name")


@pytest.mark.parametrize(
    "flatten",
    [
        lambda config: config,
        lambda config: {**config["text_config"], "vision_config": config["vision_config"]},
    ],
    ids=["nested", "flat"],
)
def test_config_forms(tmp_path: Path, flatten: Callable[[dict], dict]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flatten(reference.small_config().to_dict())))
    assert read_config(tmp_path) == reference.SMALL


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.vision_model.weight",
        "language_model.model.vision_model.ln.weight",
        "model.resampler_models.mlp.weight",
        "vision_towers.ln.weight",
    ],
)
def test_names_that_only_resemble_vision_tensors(name: str) -> None:
    assert canonical_name(name) == name
