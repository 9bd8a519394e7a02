"""How long moetune itself takes: start-up, solving, planning, look-ups. Part of `make bench`.

Whole processes are timed from outside, the rest in this one; a figure is the median.
"""

import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moetune.app.files import load_profile_file, write_text
from moetune.app.plan import make_plan
from moetune.app.profile import profile_machine
from moetune.app.profile_request import ProfileRequest
from moetune.app.recording import Progress
from moetune.domain.constraints import Strategy
from moetune.domain.document import encode
from moetune.domain.layer import LayerKey, LayerShape
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.units import format_seconds
from moetune.runtime.plans.book import PlanBook
from moetune.store import open_store

_RESULT = Path(__file__).parents[1] / "docs/results/speed.md"
_LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=4)
_REFERENCE = Path(__file__).parents[1] / "profiles/rtx2080ti-x64.toml"


def main() -> None:
    """Measure, print and write the table."""
    profile = _measured_profile()
    rows = [
        ("`import moetune`, beyond Python's start", "50 ms", _import_seconds()),
        ("`moetune --help`", "300 ms", _process_seconds("-m", "moetune", "--help")),
        (
            f"plan from a stored profile of {len(profile.samples)} samples",
            "300 ms",
            _plan_seconds(profile),
        ),
        ("the same with strategy S1 pinned", "300 ms", _plan_seconds(profile, strategy="S1")),
        ("the same with strategy S4 pinned", "300 ms", _plan_seconds(profile, strategy="S4")),
        ("plan-book hit", "1 µs", _hit_seconds()),
        ("range-table look-up", "10 µs", _range_seconds()),
    ]
    lines = [
        "# Speed of moetune itself",
        "",
        f"Python {platform.python_version()}, medians on one core of this kind: {_cpu()}.",
        "",
        "| what | target | measured |",
        "|---|---:|---:|",
        *(f"| {what} | {target} | {format_seconds(seconds)} |" for what, target, seconds in rows),
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    write_text(_RESULT, report)


def _measured_profile() -> Profile:
    """Measure this machine for a few seconds: a plan then has real curves to work with."""
    request = ProfileRequest(
        name="speed", num_ranks=2, layers=(_LAYER,), dtypes=("float32",), max_tokens=1024,
        budget_seconds=90.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/m.db") as store:
        return profile_machine(request, store=store, progress=Progress(), resume=False).profile


def _process_seconds(*arguments: str, repeat: int = 9) -> float:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    return _median(run, repeat=repeat)


def _import_seconds() -> float:
    return _process_seconds("-c", "import moetune") - _process_seconds("-c", "pass")


def _plan_seconds(profile: Profile, strategy: Strategy | None = None) -> float:
    request = Question(**encode(_LAYER), world_size=2, tokens=1024, strategy=strategy)
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/m.db") as store:
        store.save_profile(profile)

        def plan() -> None:
            stored = store.profile(profile.name)
            assert stored is not None  # noqa: S101 - just saved
            store.save_plan(make_plan(request, profile=stored))

        return _median(plan, repeat=7)


def _book() -> PlanBook:
    reference = load_profile_file(_REFERENCE)
    request = Question(**encode(_LAYER), world_size=2, tokens=8192, allow_modelled=True)
    return PlanBook([make_plan(request, profile=reference)])


def _hit_seconds() -> float:
    plans = _book().layer_plans(LayerKey(layer=_LAYER, num_ranks=2, dtype="float32"))
    plans.decide(8192)
    return _median(lambda: plans.decide(8192), repeat=201, inner=1000)


def _range_seconds() -> float:
    plan = _book().plans[0]
    return _median(lambda: plan.decide(5000), repeat=201, inner=1000)


def _median(run: Callable[[], object], *, repeat: int, inner: int = 1) -> float:
    seconds: list[float] = []
    run()
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        seconds.append((time.perf_counter() - start) / inner)
    return statistics.median(seconds)


def _cpu() -> str:
    lines: Sequence[str] = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
