"""A link that changes under a running job: the alarm, and the plan that follows it.

    python -m benchmarks.netlab.drifted      # as root, about 10 minutes on two quiet cores

A job trains with a plan while its link is given another rate. Then the plan is verified on the
link as it is now, as the alarm says, planned again, and every degree is measured beside both plans.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.experiment import (
    DTYPE,
    NUM_RANKS,
    measure_profile,
    measure_steps,
    steps_command,
)
from benchmarks.netlab.lab import Lab, check_supported
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.plan import make_plan
from moetune.workflows.wiring import configure, open_store

_RESULT = Path(__file__).parents[2] / "docs/results/drifted-link.md"
_LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=2, top_k=1, activation="relu")
_TOKENS = 1024
_DEGREES = (1, 2, 4, 8, 16)
_CASES = ((500.0, 200.0), (200.0, 500.0), (1000.0, 400.0))
_CHANGE_AT, _STEPS = 101, 181
_ROUNDS = 9
_OLD, _NEW = "planned", "limited"
"""Names under which `benchmarks.netlab.ranks` runs a folder's plans."""
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One change of a link.

    Args:
        rates_mbit: before and after.
        warnings: of the job's log, with their steps.
        old, new: the plan that the job ran with, and the one after `moetune verify`.
        seconds: measured steps after the change, by variant.
    """

    rates_mbit: tuple[float, float]
    warnings: tuple[tuple[int, str], ...]
    old: Plan
    new: Plan
    seconds: dict[str, float]

    @property
    def best_seconds(self) -> float:
        """The fastest of all the measured variants."""
        return min(self.seconds.values())

    @property
    def alarm(self) -> tuple[int, str] | None:
        """Steps from the change to the first drift alarm, and its first line."""
        for step, text in self.warnings:
            if step >= _CHANGE_AT and "since step" in text:
                return step - _CHANGE_AT + 1, text.splitlines()[0]
        return None


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=len(_CASES), help="only the first so many")
    given = parser.parse_args()
    check_supported()
    report = "\n".join(_lines([_measure(*one) for one in _CASES[: given.cases]])) + "\n"
    print(report)
    write_text(_RESULT, report)


def _measure(before_mbit: float, after_mbit: float) -> Case:
    with (
        Lab(num_ranks=NUM_RANKS, rate_mbit=before_mbit) as lab,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        profile = measure_profile(
            lab, layer=_LAYER, tokens=_TOKENS, budget="45s", folder=folder, echo=sys.stderr
        )
        old = _plan(profile, folder / "old")
        warnings = _run_job(lab, folder, after_mbit)
        _verify(lab, folder, old)
        new = _plan(_stored(folder, profile.name), folder / "new")
        variants = [f"ours:{degree}" for degree in _DEGREES]
        variants += [f"{_OLD}:{folder / 'old'}", f"{_NEW}:{folder / 'new'}"]
        command = steps_command(layer=_LAYER, tokens=[_TOKENS], variants=variants, rounds=_ROUNDS)
        lines = measure_steps(lab, command, peer=None, echo=sys.stderr)
    seconds = {variant: statistics.median(line.seconds) for (_, variant), line in lines.items()}
    return Case(
        rates_mbit=(before_mbit, after_mbit), warnings=warnings, old=old, new=new, seconds=seconds
    )


def _plan(profile: Profile, folder: Path) -> Plan:
    request = PlanRequest(layer=_LAYER, world_size=NUM_RANKS, tokens_per_rank=_TOKENS, dtype=DTYPE)
    plan = make_plan(request, profile=profile)
    folder.mkdir()
    write_text(folder / f"{_TOKENS}.json", plan_to_json(plan))
    return plan


def _run_job(lab: Lab, folder: Path, after_mbit: float) -> tuple[tuple[int, str], ...]:
    """Train, change the link when rank 0 asks for it, and return the job's warnings."""
    touch, is_over = folder / "change", threading.Event()

    def change() -> None:
        while not is_over.wait(0.01):
            if touch.exists():
                lab.change_rate(after_mbit)
                touch.unlink()
                return

    changing = threading.Thread(target=change)
    changing.start()
    command = [
        *(sys.executable, "-m", "benchmarks.netlab.drift_job"),
        *("--plan", str(folder / "old" / f"{_TOKENS}.json"), "--touch", str(touch)),
        *("--steps", str(_STEPS), "--change-at", str(_CHANGE_AT)),
    ]
    try:
        outputs = lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=sys.stderr)
    finally:
        is_over.set()
        changing.join()
    return tuple((step, text) for step, text in json.loads(outputs[0].stdout)["warnings"])


def _verify(lab: Lab, folder: Path, plan: Plan) -> None:
    path = folder / "old" / f"{_TOKENS}.json"
    database = str(folder / "netlab.db")
    with open_store(configure(db=database, no_files=True).settings) as store:
        store.save_plan(plan)
    moetune = [sys.executable, "-m", "moetune", "--db", database, "--no-config"]
    # After the link has changed the plan misses its range, which is exit code 6.
    command = ["sh", "-c", f"{shlex.join([*moetune, 'verify', str(path)])} || test $? -eq 6"]
    lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=sys.stderr)


def _stored(folder: Path, name: str) -> Profile:
    database = str(folder / "netlab.db")
    with open_store(configure(db=database, no_files=True).settings, read_only=True) as store:
        profile = store.profile(name)
    assert profile is not None  # noqa: S101 - it was read from there
    return profile


def _lines(cases: Sequence[Case]) -> Iterator[str]:
    yield from ("# A link that changes under a job", "", describe_machine(peer=False, load=0.0), "")
    yield (
        f"A layer of 512 × 2048, 2 experts, {_TOKENS} tokens a rank, trains in the network lab "
        f"with a plan from a profile of 45 s; before step {_CHANGE_AT} its link gets another rate. "
        "Then `moetune verify` of the plan and a new plan, as the alarm says. Times are medians "
        f"of {_ROUNDS} steps after the change that took turns."
    )
    yield from ("", "| link, Mbit/s | alarm after | old plan | ms | new plan | ms | best |")
    yield "|---|---:|---|---:|---|---:|---:|"
    for case in cases:
        before, after = case.rates_mbit
        alarm = "none" if case.alarm is None else f"{case.alarm[0]} steps"
        old, new = (1e3 * case.seconds[one] for one in (_OLD, _NEW))
        yield (
            f"| {before:g} → {after:g} | {alarm} | {_degrees(case.old)} | {old:.1f} | "
            f"{_degrees(case.new)} | {new:.1f} ({case.seconds[_NEW] / case.best_seconds - 1:+.1%})"
            f" | {1e3 * case.best_seconds:.1f} ms ({_name_of_best(case)}) |"
        )
    yield from ("", "The alarms:", "")
    yield from (f"- {case.alarm[1]}" for case in cases if case.alarm)
    yield from ("", "What the new plans predict, with their 90 % range, and every degree:", "")
    yield f"| link, Mbit/s | predicted ms | {' | '.join(f'{one} ms' for one in _DEGREES)} |"
    yield f"|---|---|{'---:|' * len(_DEGREES)}"
    for case in cases:
        predicted = case.new.predicted
        low, high = (1e3 * one for one in (predicted.p05_step_seconds, predicted.p95_step_seconds))
        measured = " | ".join(f"{1e3 * case.seconds[f'ours:{one}']:.1f}" for one in _DEGREES)
        yield (
            f"| {case.rates_mbit[0]:g} → {case.rates_mbit[1]:g} | "
            f"{1e3 * predicted.step_seconds:.1f} ({low:.1f} to {high:.1f}) | {measured} |"
        )


def _degrees(plan: Plan) -> str:
    return f"{plan.pipeline.forward_degree}, {plan.pipeline.backward_degree}"


def _name_of_best(case: Case) -> str:
    best = min(case.seconds, key=lambda one: case.seconds[one])
    return {_OLD: "the old plan", _NEW: "the new plan"}.get(best, f"degree {best[5:]}")


if __name__ == "__main__":
    main()
