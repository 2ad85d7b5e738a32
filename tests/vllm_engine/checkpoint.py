"""A checkpoint that vLLM serves as ERNIE-4.5-VL: config, tokenizer, processor and random weights of a small model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from reference import SMALL
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from vllm_host import ARCHITECTURE, BLOCK_EPS, checkpoint

SPECIAL = ["<s>", "</s>", "<|image@placeholder|>", "<|video@placeholder|>", "<|IMAGE_PLACEHOLDER|>"]
SPECIAL += ["<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>"]
LAYERS, HEADS, HEAD_DIM, MLP = 2, 2, 64, 256
WIDTH = SMALL.text_hidden_size


def write_checkpoint(folder: Path, *, seed: int = 0) -> None:
    """Checkpoints of two seeds differ in their vision weights."""
    shutil.copytree(Path(__file__).with_name("remote_code"), folder, ignore=shutil.ignore_patterns("__pycache__"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {"auto_map": {"AutoProcessor": "processing_small.SmallProcessor"}}
    files = {
        "config.json": config(tokenizer),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
        "processor_config.json": processor,
        "preprocessor_config.json": processor,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    vocabulary = tokenizer.get_vocab_size()
    save_file({**dict(vision_weights(seed)), **dict(text_weights(vocabulary))}, folder / "model.safetensors")


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The original checkpoint's fields; a dense language model, whose layers need no extension."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "ernie4_5_vl_small",
        "auto_map": {"AutoConfig": "configuration_small.SmallConfig"},
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": BLOCK_EPS,
        "rope_theta": 500000.0,
        "max_position_embeddings": 2048,
        "use_moe": False,
        "moe_num_experts": [1, 1],
        "moe_layer_start_index": [0, 0],
        "im_patch_id": tokenizer.token_to_id("<|IMAGE_PLACEHOLDER|>"),
        "pixel_hidden_size": SMALL.hidden_size,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "vision_config": {
            "depth": SMALL.depth,
            "hidden_size": SMALL.hidden_size,
            "embed_dim": SMALL.hidden_size,
            "num_heads": SMALL.num_heads,
            "mlp_ratio": SMALL.intermediate_size // SMALL.hidden_size,
            "patch_size": SMALL.patch_size,
            "in_channels": SMALL.in_channels,
            "spatial_merge_size": 2,
            "hidden_act": "quick_gelu",
        },
    }


def vision_weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in checkpoint():
        yield name, tensor * (1 + 0.5 * seed * torch.rand(tensor.shape, generator=generator))


def text_weights(vocabulary: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (vocabulary, WIDTH),
    }
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        shapes |= {f"{layer}.{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HEADS * HEAD_DIM, WIDTH) for name in "qkv"}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (MLP, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (WIDTH, MLP)}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        yield name, 1 + 0.1 * drawn if len(shape) == 1 else drawn * 2 / shape[1] ** 0.5
