"""Parts of the run: each a process of its own, so that one's failure leaves the others.

tests    the correctness tests that need a GPU
profile  GEMM, row operations, copies, interference, and the loopback that stands for a wire
layers   steps at each degree over that loopback, predicted and measured
reuse    strategies S1 to S4: peak, time, what is hidden, and what each rule would choose
published layers on this GPU alone, planned from others' tables
uneven   one kernel for all experts under uneven loads, and what is predicted
chunks   models near 40 GB with states in chunks, FSDP2's offload, and plain PyTorch
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale

_LONGEST = 2.0
"""Times its estimate a part may take before it is ended."""


def run_tests(scale: Scale, folder: Path) -> None:
    """Run the tests, and write a row with the outcome."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    # A machine that is only lent may lack the plug-ins that the project's options name.
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    command += ["-o", "pythonpath=.", "--import-mode=importlib", *scale.tests]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout, file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    Rows(folder, "tests").add(passed=not done.returncode, words=lines[-1] if lines else "no word")


def _profile(scale: Scale, folder: Path) -> None:
    from benchmarks.gpu.profiled import run_profile

    run_profile(scale, folder)


def _layers(scale: Scale, folder: Path) -> None:
    from benchmarks.gpu.layers import run_layers

    run_layers(scale, folder)


def _reuse(scale: Scale, folder: Path) -> None:
    from benchmarks.gpu.reuse import run_reuse

    run_reuse(scale, folder)


def _published(scale: Scale, folder: Path) -> None:
    from benchmarks.gpu.published import run_published

    run_published(scale, folder)


def _uneven(scale: Scale, folder: Path) -> None:
    from benchmarks.gpu.uneven import run_uneven

    run_uneven(scale, folder)


def _chunks(scale: Scale, folder: Path) -> None:
    from benchmarks.gpu.chunks import run_chunks

    run_chunks(scale, folder)


PARTS: Mapping[str, Callable[[Scale, Path], None]] = MappingProxyType(
    {
        "tests": run_tests, "profile": _profile, "layers": _layers, "reuse": _reuse,
        "published": _published, "uneven": _uneven, "chunks": _chunks,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended; `failure` is empty for a good end."""

    part: str
    seconds: float
    estimated_seconds: float
    failure: str = ""


def run_part(part: str, scale: Scale, folder: Path) -> Outcome:
    """Run a part in this process."""
    start = time.perf_counter()
    failure = ""
    try:
        PARTS[part](scale, folder)
    except Exception as error:  # noqa: BLE001 - the other parts go on
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return Outcome(
        part=part, seconds=time.perf_counter() - start,
        estimated_seconds=scale.estimates()[part], failure=failure,
    )  # fmt: skip


def run_process(part: str, command: Sequence[str], estimated_seconds: float) -> Outcome:
    """Run a part as a process, and end it at twice its estimate."""
    start = time.perf_counter()
    failure = ""
    try:
        code = subprocess.run(command, check=False, timeout=_LONGEST * estimated_seconds).returncode
        failure = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        failure = f"ended after {_LONGEST:g} times its estimate"
    seconds = time.perf_counter() - start
    return Outcome(part=part, seconds=seconds, estimated_seconds=estimated_seconds, failure=failure)
