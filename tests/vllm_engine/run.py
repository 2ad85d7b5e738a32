"""One engine of vLLM's: what it answers, and what its worker says, as JSON.

usage: run.py FOLDER OUTPUT

FOLDER is a checkpoint of ``write_checkpoint``, FOLDER.other another one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm_engine import worker

from ernie_vit.vllm_plugin import stats

IMAGE = "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>"
VIDEO = "<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>"
GIB = 1 << 30


def main(folder: str, output: str) -> None:
    llm = LLM(
        folder,
        trust_remote_code=True,
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 2, "video": 1},
        mm_hasher_algorithm="sha256",
    )
    answers: dict[str, Any] = {"plugin": True, "graph bytes": GIB, "attached again": 3}
    try:
        answers["stats before"] = llm.apply_model(stats)
    except Exception as error:  # the worker's ValueError arrives as another one
        answers["plugin"] = "ernie-vit's plugin" not in str(error)
    answers["texts"] = generate(llm)
    if answers["plugin"]:
        answers["stats"] = llm.apply_model(stats)
        answers["memory"] = [llm.collective_rpc(worker.memory_for_kv_cache, args=(taken,)) for taken in (0, GIB)]
        llm.collective_rpc(worker.record_graphs)
        answers["texts of graphs"] = generate(llm)
        answers["stats of graphs"] = llm.apply_model(stats)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{folder}.other"})
    answers["texts after a reload"] = generate(llm)
    if answers["plugin"]:
        answers["stats after a reload"] = llm.apply_model(stats)
    Path(output).write_text(json.dumps(answers))


def generate(llm: Any) -> list[list[int]]:
    """Tokens after three pictures, two at once, a video, and none; every picture is encoded anew."""
    images = [picture(seed, height, width) for seed, height, width in ((0, 112, 56), (1, 112, 56), (2, 56, 84))]
    frames = np.stack([np.asarray(picture(seed, 56, 84)) for seed in range(4)])
    metadata = {"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3], "do_sample_frames": False}
    inputs = [
        *({"prompt": f"{IMAGE} what?", "multi_modal_data": {"image": image}} for image in images),
        {"prompt": f"{IMAGE} or {IMAGE}?", "multi_modal_data": {"image": images[:2]}},
        {"prompt": f"{VIDEO} when?", "multi_modal_data": {"video": [(frames, metadata)]}},
        {"prompt": "no picture"},
    ]
    llm.llm_engine.reset_encoder_cache()
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, greedy, use_tqdm=False)]


def picture(seed: int, height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


if __name__ == "__main__":
    main(*sys.argv[1:])
