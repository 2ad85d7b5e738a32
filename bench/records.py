"""What one run of the benchmark found: plain records, written as one JSON file and read again by every report.

Times of whole calls are milliseconds, of kernels microseconds; errors are ``||out - exact|| / ||exact||`` to float64.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NO_GPU = "no GPU"
LEFT_OUT = "left out of a quick run"  # the reason of what is missing on purpose


@dataclass(frozen=True)
class Machine:
    """Where and with what the figures were taken.

    Attributes:
        date: ISO day.
        gpu: the name, ``NO_GPU`` without one.
        versions: of what was imported, by distribution name.
        commit: of the checkout; ``-dirty`` if it had changes.
        copy: bytes a second, read and written, of a device copy in this run.
        product: FLOP a second of an 8192-cubed bf16 product in this run.
        conditions: driver, clocks, power limit and the like, as the GPU's own tool names them.
    """

    date: str
    gpu: str
    versions: dict[str, str]
    commit: str
    copy: float = 0.0
    product: float = 0.0
    conditions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Clocks:
    """The GPU while something was measured: SM clock in MHz, power in watts, temperature in degrees Celsius."""

    sm: float
    power: float
    temperature: float


@dataclass(frozen=True)
class Call:
    """Whole calls of one encoder on one input.

    Attributes:
        input: its name, ``"mix"`` for the mix of 60 calls.
        patches, images: of a call; of all calls of the mix together. A video counts as one image.
        provider: whose encoder, and how it runs: ``"ours graph"``, ``"vLLM eager"``.
        median, mean, p99: of the time from a synchronised start to a synchronised end.
        host: median until the call returns.
        device: median of the work on the GPU, by events; None for the mix and without a GPU.
        spread: how far the medians of two halves of the samples are apart, as a share.
    """

    input: str
    patches: int
    images: int
    provider: str
    median: float
    mean: float
    p99: float
    host: float
    device: float | None
    images_per_second: float
    spread: float
    clocks: Clocks | None = None


@dataclass(frozen=True)
class Host:
    """Microseconds until a call returns, by whether its sizes were met before; median."""

    provider: str
    met_before: bool
    microseconds: float


@dataclass(frozen=True)
class Kernel:
    """One kernel at one size; ``of_ceiling`` and ``of_ideal``: the least time that the ceilings of this run, or the
    tiles' whole rounds on this GPU, allow, over the time taken."""

    kernel: str
    case: str
    rows: int
    provider: str
    microseconds: float
    tflops: float
    gigabytes_per_second: float
    of_ceiling: float
    of_ideal: float | None
    error: float
    plain_error: float
    noise: float
    clocks: Clocks | None = None


@dataclass(frozen=True)
class Padding:
    """One call in a graph that may be larger: ``rows`` live of ``capacity``."""

    rows: int
    capacity: int
    provider: str
    milliseconds: float
    clocks: Clocks | None = None


@dataclass(frozen=True)
class Accuracy:
    """The error after ``block`` blocks (0: patch embedding), or of the tokens (None)."""

    input: str
    provider: str
    block: int | None
    error: float


@dataclass(frozen=True)
class Bits:
    """Whether an image has the same bits as alone and eager in a situation: packed, padded, in a graph, again."""

    provider: str
    situation: str
    equal: int
    of: int


@dataclass(frozen=True)
class Capture:
    """What a provider's graphs cost; ``estimate``: the mebibytes that were foretold, None where nothing foretells."""

    provider: str
    graphs: int
    seconds: float
    mebibytes: float
    estimate: float | None = None


@dataclass(frozen=True)
class Missing:
    """A peer that was not measured, and why: not importable, or wrong by value."""

    provider: str
    reason: str

    @classmethod
    def of(cls, provider: str, error: BaseException) -> "Missing":
        """With the error's kind and first line."""
        line = next(iter(str(error).strip().splitlines()), "")
        return cls(provider, f"{type(error).__name__}: {line}")


@dataclass
class Run:
    """Everything of one run; lists grow while it goes on."""

    machine: Machine
    quick: bool
    seconds: float = 0.0
    calls: list[Call] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    bits: list[Bits] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a run back.

        Raises:
            ValueError: the file holds no run of this version of the benchmark.
        """
        kinds = {
            "calls": Call,
            "kernels": Kernel,
            "padding": Padding,
            "accuracy": Accuracy,
            "bits": Bits,
            "captures": Capture,
            "missing": Missing,
            "hosts": Host,
        }
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            rows = {name: [kind(**_with_clocks(row)) for row in found.pop(name)] for name, kind in kinds.items()}
            return cls(Machine(**found.pop("machine")), **rows, **found)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: expected a run of the benchmark, got {type(error).__name__}: {error}") from error


def _with_clocks(row: dict[str, Any]) -> dict[str, Any]:
    found = {**row}
    if found.get("clocks"):
        found["clocks"] = Clocks(**found["clocks"])
    return found
