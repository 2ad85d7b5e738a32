"""One run: every peer that is here, checked and then measured, in one process and one report.

What has been measured is on disk after each section. A section that fails is told as missing, and the run goes on.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape

from bench.accuracy import PLAIN, Blocks, check_tokens
from bench.bits import compare_bits
from bench.calls import MIX, measure_host, measure_input, measure_mix
from bench.encoders import ours
from bench.encoders.compiled import open_compiled
from bench.encoders.encoder import Encoder, random_encoder, sharing
from bench.encoders.transformers import open_transformers
from bench.encoders.vllm import open_vllm
from bench.machine import describe
from bench.padding import measure_padding
from bench.plan import Plan, choose_plan
from bench.records import LEFT_OUT, Call, Missing, Run
from ernie_vit import ErnieVisionEncoder
from ernie_vit.machine import why_no_gpu

RESULTS = Path(__file__).parent / "results"
UNFINISHED = "unfinished.json"
STOPPED = 130  # the exit status of a program that Ctrl-C ended

Open = Callable[[ErnieVisionEncoder], AbstractContextManager[Encoder]]
OpenOurs = Callable[[ErnieVisionEncoder, Plan], AbstractContextManager[Encoder]]
OURS: dict[str, OpenOurs] = {"ours": ours.open_ours, "ours with resampler": ours.open_ours_with_resampler}
# torch.compile comes first: importing vLLM changes its settings, and leaves it one process to compile in.
PEERS: dict[str, Open] = {"torch.compile": open_compiled, "transformers": open_transformers, "vLLM": open_vllm}
# Not for a quick look: half a minute before its first call, and a third more kernels to compile.
LENGTHY = ("torch.compile", "ours with resampler")


@click.command("run")
@click.option("--quick", is_flag=True, help="A minute: few inputs, without what compiles for long.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Folder of the report.")
def run(quick: bool, out: Path) -> None:
    """Measure our encoder and kernels beside everything else that is installed; write the report."""
    from bench import report  # needs more than measuring does

    screen, log = Console(), Console(stderr=True)
    lacking = why_no_gpu()
    if lacking is not None:
        screen.print(f"No GPU: {lacking}. Running a tiny encoder on the CPU: its times mean nothing.", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    notebook = Notebook(Run(describe(), quick), out / UNFINISHED, log)
    stopped = False
    try:
        measure(notebook, choose_plan(quick=quick), screen)
    except KeyboardInterrupt:
        stopped = True
        log.print("stopped; what was measured so far follows")
    report.show(notebook.run, screen)
    for path in report.write(notebook.run, out):
        screen.print(f"written: {path}", highlight=False)
    notebook.path.unlink()
    if stopped:
        raise SystemExit(STOPPED)


class Notebook:
    """A growing run, on disk after each section.

    Args:
        run: what grows.
        path: where it is kept meanwhile.
        log: told what goes on.
    """

    def __init__(self, run: Run, path: Path, log: Console) -> None:
        self.run, self.path, self.log = run, path, log
        self._started = time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Keep what the block adds to the run, even if it raises; a failure is recorded under ``name``."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:  # of whatever kind: the rest is measured all the same
            self.run.missing.append(Missing.of(name, error))
            self.log.print(f"missing: {name}: {escape(self.run.missing[-1].reason)}", highlight=False, soft_wrap=True)
        finally:
            self.run.seconds = time.perf_counter() - self._started
            beside = self.path.with_suffix(".writing")
            self.run.write(beside)
            os.replace(beside, self.path)
        self.log.print(f"{self.run.seconds:6.1f} s  {name}: {time.perf_counter() - started:.1f} s", highlight=False)

    def add_calls(self, calls: list[Call], missing: list[Missing]) -> None:
        self.run.calls.extend(calls)
        self.run.missing.extend(missing)


@torch.no_grad()
def measure(notebook: Notebook, plan: Plan, screen: Console) -> None:
    """All sections in order: correctness, then whole calls, then what graphs cost, then kernels."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        weights = random_encoder(plan)
        eager, graphs = open_encoders(notebook, stack, plan, weights)
        encoders = check(notebook, plan, weights, [*graphs, *eager], screen)
        eager = [encoder for encoder in eager if encoder in encoders]
        for encoder in eager:
            with notebook.section(f"bits of {encoder.library}"):
                replayed = [other for other in graphs if other.library == encoder.library and other in encoders]
                able = {other.provider: encoder.graphs[other.provider] for other in replayed}
                notebook.run.bits.extend(compare_bits(encoder, replayed, able, plan))
        measure_calls(notebook, plan, encoders)
        for encoder in encoders:
            with notebook.section(f"host of {encoder.provider}"):
                notebook.run.hosts.extend(measure_host(encoder, plan))
        captured = {encoder.provider for encoder in graphs if encoder in encoders}
        for provider, open_graphs in [item for encoder in eager for item in encoder.graphs.items()]:
            if provider in captured:
                with notebook.section(f"padding of {provider}"):
                    notebook.run.padding.extend(measure_padding(provider, open_graphs, plan))
    with notebook.section("kernels"):
        from bench.kernels import measure_kernels

        kernels, missing = measure_kernels(plan.quick)
        notebook.run.kernels.extend(kernels)
        notebook.run.missing.extend(missing)


def open_encoders(
    notebook: Notebook, stack: ExitStack, plan: Plan, weights: ErnieVisionEncoder
) -> tuple[list[Encoder], list[Encoder]]:
    """The eager encoders and those that replay graphs, ours first; ``stack`` closes them."""
    peers, ours_here = PEERS, OURS
    if plan.quick:
        peers, ours_here = ({name: way for name, way in ways.items() if name not in LENGTHY} for ways in (PEERS, OURS))
        notebook.run.missing.extend(Missing(name, LEFT_OUT) for name in LENGTHY)
    eager, graphs = [], []
    with ThreadPoolExecutor(1) as beside:  # other processes compile our kernels while this one imports the peers
        compiling = beside.submit(compile_kernels, plan) if weights.backend == "triton" else None
        for name, peer in peers.items():
            with notebook.section(name):
                eager.append(stack.enter_context(peer(weights)))
        if compiling is not None:
            with notebook.section("compiling our kernels"):
                compiling.result()
    for place, (name, ours_of_a_kind) in enumerate(ours_here.items()):
        with notebook.section(name):
            eager.insert(place, stack.enter_context(ours_of_a_kind(weights, plan)))
    for encoder in eager:
        for provider, open_graphs in encoder.graphs.items():
            with notebook.section(provider):
                graphs.append(stack.enter_context(open_graphs(None)))
                if graphs[-1].capture is not None:
                    notebook.run.captures.append(graphs[-1].capture)
    if weights.backend != "triton":
        notebook.run.missing.append(Missing(ours.GRAPH, weights.backend_reason))
    return eager, graphs


def compile_kernels(plan: Plan) -> None:
    """Compile all of our kernels in as many processes as there are cores; they are then in Triton's cache on disk."""
    from bench import kernels
    from bench.compile_ahead import compile_ahead

    jobs = [*ours.compilations(plan), *kernels.compilations(quick=plan.quick)]
    compile_ahead(methodcaller("__call__"), jobs)


def check(
    notebook: Notebook, plan: Plan, weights: ErnieVisionEncoder, encoders: list[Encoder], screen: Console
) -> list[Encoder]:
    """Compare everybody with float64 and print it.

    Returns:
        Those that may be timed.
    """
    kept: list[Encoder] = []
    with notebook.section("accuracy"):
        exact = sharing(weights, backend="torch", dtype=torch.float64)
        module = sharing(weights, backend="torch")
        plain = Encoder(PLAIN, PLAIN, module, tower=module.vision_tower)
        errors, missing = check_tokens(encoders, exact, plain, plan)
        notebook.run.accuracy.extend(errors)
        notebook.run.missing.extend(missing)
        wrong = {entry.provider for entry in missing}
        kept = [encoder for encoder in encoders if encoder.provider not in wrong]
        screen.print("Error of the tokens against float64, before anything is timed:")
        for name in plan.checked:
            of = [f"{entry.provider} {entry.error:.2e}" for entry in errors if entry.input == name]
            screen.print(f"  {name}: {', '.join(of)}", highlight=False, soft_wrap=True)
        for entry in missing:
            screen.print(f"  [red]not timed[/]: {entry.provider}, {escape(entry.reason)}", soft_wrap=True)
        for name in plan.by_block:
            blocks = Blocks(name, exact, plan)
            for encoder in (plain, *kept):
                with notebook.section(f"blocks of {encoder.provider}"):
                    notebook.run.accuracy.extend(blocks.errors(encoder))
    return kept


def measure_calls(notebook: Notebook, plan: Plan, encoders: list[Encoder]) -> None:
    """Whole calls of each input and of the mix; the first encoder is measured twice, which shows the noise."""
    if not encoders:
        return
    first = encoders[0]
    everybody = [first, replace(first, provider=f"{first.provider} again"), *encoders[1:]]
    for name, sizes in plan.inputs.items():
        with notebook.section(f"calls of {name}"):
            notebook.add_calls(*measure_input(name, sizes, everybody, plan))
    if plan.mix:
        with notebook.section(f"calls of the {MIX}"):
            notebook.add_calls(*measure_mix(everybody, plan))
