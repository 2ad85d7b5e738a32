"""Whole engines of the real vLLM on a CPU, with the plugin and without: vLLM finds it by itself, in spawned processes.

They load a checkpoint, process pictures, schedule, sample, and reload weights. What a worker is asked is asked in its
own process.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_host import HAVE_VLLM

if HAVE_VLLM:
    from vllm_engine.checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINT = "[vllm.general_plugins]\ncpu_operators = vllm_engine.cpu_operators:register\n"
LINE = r"\(Worker pid=(\d+)\) INFO .*\[vllm_tower.py:\d+\] ernie-vit [\d.]+ computes the vision tower: (.*)"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """Answers of an engine, and all that its processes say: "ours" with the plugin, "theirs" without."""
    import vllm

    if vllm.__version__ != "0.33.0":
        pytest.skip("the operators stand in for those of vLLM 0.33.0's CPU build")
    folder = tmp_path_factory.mktemp("engine")
    write_checkpoint(folder / "checkpoint")
    write_checkpoint(folder / "checkpoint.other", seed=1)
    site = folder / "site" / "cpu_operators-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-operators\nVersion: 1\n")
    (site / "entry_points.txt").write_text(ENTRY_POINT)
    paths = [ROOT, ROOT / "tests", site.parent, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = ROOT / "tests/vllm_engine/run.py"
    running = {}
    for name, switch in (("ours", {}), ("theirs", {"ERNIE_VIT_DISABLE": "1"})):
        command = [sys.executable, str(script), str(folder / "checkpoint"), str(folder / name)]
        with (folder / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(command, env={**environment, **switch}, stdout=log, stderr=log, cwd=folder)
    results = {}
    for name, process in running.items():
        status, said = process.wait(timeout=300), (folder / f"{name}.log").read_text()
        assert status == 0, said[-5000:]
        results[name] = json.loads((folder / name).read_text()), said
    return results


def test_the_texts_are_vllms(engines: Any) -> None:
    (ours, _), (theirs, _) = engines.values()
    assert ours["texts"] == theirs["texts"]
    pictures = ours["texts"][:3]
    assert len({tuple(text) for text in pictures}) == len(pictures), "the text does not depend on the pixels"


def test_the_worker_says_once_that_our_tower_computes(engines: Any) -> None:
    (ours, said), (theirs, other) = engines.values()
    lines = re.findall(LINE, said)
    assert lines[0][1].startswith("torch, cpu, float32; graphs: none (capture: expected an encoder on a CUDA GPU")
    assert len({process for process, _ in lines}) == 1
    assert len(lines) == 1 + ours["attached again"]
    assert said.index(" computes the vision tower") < said.index("KV cache size"), "not while the worker warms up"
    assert not theirs["plugin"]
    assert not re.search(LINE, other)


def test_the_worker_counts_our_calls(engines: Any) -> None:
    ours, _ = engines["ours"]
    (before,), (after,) = ours["stats before"], ours["stats"]
    assert after["calls"] > before["calls"]
    assert after["fallbacks"] == before["fallbacks"]


def test_the_graphs_memory_is_taken_off_the_kv_cache(engines: Any) -> None:
    ours, _ = engines["ours"]
    without, with_graphs = ours["memory"]
    assert without[0] - with_graphs[0] == ours["graph bytes"]


def test_reloaded_weights_reach_the_graphs(engines: Any) -> None:
    (ours, _), (theirs, _) = engines.values()
    assert ours["texts of graphs"] == ours["texts"]
    assert ours["texts after a reload"] == theirs["texts after a reload"]
    assert ours["texts after a reload"] != ours["texts"]
    (graphs,), (reloaded,) = ours["stats of graphs"], ours["stats after a reload"]
    assert reloaded["replays"] > graphs["replays"] > 0
    assert (reloaded["fallbacks"], reloaded["graph_fallbacks"]) == ({}, {})
