"""What is shown and kept of a run: every figure, in order, whatever the run lacks."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from synthetic_run import INPUTS, run_without_gpu, synthetic_run

from bench import derived
from bench.charts import PICTURES
from bench.drawing import palette, spread
from bench.markdown import render, render_rows
from bench.records import Call, Run
from bench.report import show, slug, write
from bench.tables import tables

LISTS = [field.name for field in fields(Run) if isinstance(getattr(synthetic_run(), field.name), list)]


def shown(run: Run) -> str:
    text = StringIO()
    show(run, Console(width=180, file=text))
    return text.getvalue()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a full run."""
    return write(synthetic_run(), tmp_path_factory.mktemp("bench") / "results")


def calls(graph: dict[int, float], eager: dict[int, float]) -> Run:
    """A run of calls of one image alone: milliseconds by patches."""
    run = synthetic_run()
    run.calls = [
        Call(str(patches), patches, 1, provider, ms, ms, ms, 0.1, ms, 1e3 / ms, 0.0)
        for provider, times in (("ours graph", graph), ("ours eager", eager))
        for patches, ms in times.items()
    ]
    return run


@pytest.mark.parametrize("empty", [*LISTS, "all"])
def test_any_list_may_be_empty(empty: str, tmp_path: Path) -> None:
    run = replace(synthetic_run(), **{name: [] for name in LISTS if empty in (name, "all")})
    assert run.machine.commit in render(run, {})
    shown(run)
    if empty == "all":
        assert [path.suffix for path in write(run, tmp_path)] == [".json", ".md"]
        assert not tables(run)


def test_what_is_written_is_the_run(written: list[Path]) -> None:
    data, text, *pictures = written
    assert [path.name for path in (data, text)] == ["2031-02-03-h200.json", "2031-02-03-h200.md"]
    assert Run.read(data) == synthetic_run()
    assert len(pictures) == len(PICTURES)
    for picture in pictures:
        assert f"({picture.name})" in text.read_text(encoding="utf-8")


def test_run_without_a_gpu(tmp_path: Path) -> None:
    run = run_without_gpu()
    data, text, *pictures = write(run, tmp_path)
    assert data.name == "2031-02-04-no-gpu-quick.json"
    assert Run.read(data) == run
    assert [picture.name for picture in pictures] == ["2031-02-04-no-gpu-quick-error.png"]
    assert text.read_text().startswith("# no GPU, 2031-02-04 (quick run)")


def test_pictures_are_opaque_and_large(written: list[Path]) -> None:
    for picture in written[2:]:
        with Image.open(picture) as image:
            assert image.width > 1200
            rgba = image.convert("RGBA")
        assert rgba.getpixel((0, 0)) == (255, 255, 255, 255)
        assert rgba.getextrema()[3] == (255, 255)
        assert len(rgba.getcolors()) > 10


def test_errors_stand_before_times() -> None:
    for text in (shown(synthetic_run()), render(synthetic_run(), {})):
        places = [text.index(title) for title in ("Error of the tokens", "Not measured", "Whole calls", "Kernel")]
        assert places == sorted(places)


def test_terminal_and_markdown_hold_every_call_and_kernel() -> None:
    run = synthetic_run()
    for text in (shown(run), render(run, {})):
        for call in run.calls:
            assert f"{call.p99:.2f}" in text or f"{call.p99:.1f}" in text
        for kernel in run.kernels:
            assert f"{kernel.microseconds:,.1f}" in text
        assert "[not installed]" in text  # brackets are text, not the terminal's markup
        assert "700.00 W" in text


def test_conditions_stand_under_every_table() -> None:
    run = synthetic_run()
    for text in (shown(run), render(run, {})):
        assert " ".join(text.split()).count("commit 0123abc; 2031-02-03") >= len(tables(run))


def test_clocks_stand_under_every_table_of_times() -> None:
    run = synthetic_run()
    timed = [table for table in tables(run) if table.title.startswith(("Whole calls, ms", "Padding", "Kernel "))]
    assert len(timed) == 2 + len({kernel.kernel for kernel in run.kernels})
    for table in timed:
        assert re.search(r"Meanwhile [\d,to ]+ MHz \(SM\), [\dto ]+ W, [\dto ]+ °C\.", table.note), table.title


def test_markdown_columns_line_up() -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", render(synthetic_run(), {}), flags=re.MULTILINE)
    assert len(blocks) == len(tables(synthetic_run()))
    for block in blocks:
        pipes = {tuple(at.start() for at in re.finditer(r"\|", line)) for line in block.splitlines()}
        assert len(pipes) == 1


def test_numbers_are_on_the_right_and_signs_of_markdown_escaped() -> None:
    assert "&lt;class 'int'>" in render_rows(("why",), "l", [("<class 'int'>",)])
    assert render_rows(("name", "ms"), "lr", [("a|b", "1.5")]).splitlines() == [
        "| name |  ms |",
        "| ---- | --: |",
        "| a\\|b | 1.5 |",
    ]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("no GPU", "no-gpu"),
    ],
)
def test_name_of_a_gpu_in_files(gpu: str, name: str) -> None:
    assert slug(gpu) == name


def test_no_run_is_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "2031-02-03-h200.md").write_text("an earlier report")
    run = Run(synthetic_run().machine, quick=False)
    first, second = (write(run, tmp_path)[0].name for _ in range(2))
    assert (first, second) == ("2031-02-03-h200-2.json", "2031-02-03-h200-3.json")
    assert (tmp_path / "2031-02-03-h200.md").read_text() == "an earlier report"
    assert write(replace(run, quick=True), tmp_path)[0].name == "2031-02-03-h200-quick.json"


def test_speed_up_is_the_peers_time_over_that_of_our_graph() -> None:
    run = synthetic_run()
    found = derived.speed_ups(run)
    assert list(found) == list(INPUTS)
    time = {(call.input, call.provider): call for call in run.calls}
    assert found["576"]["vLLM graph"] == time["576", "vLLM graph"].median / time["576", "ours graph"].median
    assert found["mix"]["vLLM eager"] == time["mix", "vLLM eager"].mean / time["mix", "ours graph"].mean
    assert "vLLM graph" not in found["video 16 x 816"]


def test_noise_is_not_a_provider() -> None:
    run = synthetic_run()
    assert "ours graph again" not in derived.providers(run.calls)
    assert "ours graph again" not in derived.single_images(run)
    time = {(call.input, call.provider): call for call in run.calls}
    again = time["576", "ours graph again"].median / time["576", "ours graph"].median
    assert derived.noise(run)["576"] == abs(again - 1)


def test_crossover_where_the_lines_meet() -> None:
    # 1 ms a 1,000 patches against a constant 2 ms: they meet at 2,000
    meet = calls({1000: 1.0, 16000: 16.0}, {1000: 2.0, 16000: 2.0})
    assert derived.crossovers(meet) == {"ours": "graph up to about 2,000 patches, eager from there"}
    twice = calls({1000: 1.0, 2000: 4.0, 4000: 1.0}, {1000: 2.0, 2000: 2.0, 4000: 2.0})
    twice.calls = [replace(call, provider=f"{call.provider} with resampler") for call in twice.calls]
    assert derived.crossovers(twice) == {
        "ours with resampler": "graph up to about 1,400 patches, eager up to about 2,800 patches, graph from there"
    }


def test_no_crossover() -> None:
    always = calls({256: 1.0, 16060: 90.0}, {256: 9.0, 16060: 91.0})
    assert derived.crossovers(always) == {"ours": "graph everywhere, 256 to 16,060 patches"}
    never = calls({256: 9.0, 16060: 91.0}, {256: 1.0, 16060: 90.0})
    assert derived.crossovers(never) == {"ours": "eager everywhere, 256 to 16,060 patches"}
    assert derived.crossovers(calls({256: 1.0}, {576: 2.0})) == {}


def test_no_crossover_within_the_noise() -> None:
    meet = calls({1000: 1.0, 2000: 2.02, 4000: 2.0}, {1000: 2.0, 2000: 2.0, 4000: 3.0})
    assert derived.crossovers(meet)["ours"].count("up to") == 2
    again = Call("2000", 2000, 1, "ours graph again", 2.06, 2.06, 2.06, 0.1, 2.06, 500.0, 0.0)
    assert derived.crossovers(replace(meet, calls=[*meet.calls, again])) == {
        "ours": "graph everywhere, 1,000 to 4,000 patches"
    }
    spread_out = [replace(call, spread=0.02) if call.patches == 2000 else call for call in meet.calls]
    assert "everywhere" in derived.crossovers(replace(meet, calls=spread_out))["ours"]


def test_packed_calls_and_videos_are_not_on_the_line_of_images() -> None:
    for line in derived.single_images(synthetic_run()).values():
        assert [call.input for call in line] == [name for name in INPUTS if name.replace(",", "").isdigit()]


def test_an_encoder_has_one_color() -> None:
    colors = palette(
        ["vLLM eager", "transformers", "vLLM graph", "ours eager", "ours graph", "ours graph with resampler"]
    )
    assert colors["vLLM eager"] == colors["vLLM graph"]
    assert colors["ours eager"] == colors["ours graph"]
    assert len(set(colors.values())) == 4


@given(st.lists(st.floats(-1e3, 1e3), max_size=9), st.floats(1, 50))
def test_labels_do_not_touch(places: list[float], gap: float) -> None:
    found = spread(sorted(places), gap)
    assert all(above - below >= gap - 1e-6 for below, above in pairwise(found))
    assert sum(found) == pytest.approx(sum(places), abs=1e-6)


def test_labels_with_room_stay() -> None:
    assert spread([0.0, 10.0, 30.0], 5.0) == [0.0, 10.0, 30.0]


def test_reports_need_no_torch() -> None:
    code = "import sys, bench.compare, bench.readme; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
