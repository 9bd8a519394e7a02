"""`make quickstart`: profile this machine, plan for a small model, train it with the plan.

python -m examples.quickstart          three minutes
python -m examples.quickstart --lab    and a minute on two ranks with a limited wire, as root
"""

import argparse
import statistics
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moetune import config
from moetune.app import wiring
from moetune.cli.progress import ScreenProgress
from moetune.cli.render import Screen
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.records import prediction_error
from moetune.domain.units import format_seconds, format_share
from moetune.report.section import Cell, Table, plural

if TYPE_CHECKING:
    from examples.train_twice import TrainingResult
    from moetune.domain.plan import Plan

_NAME = "quickstart"
_NUM_RANKS = 2
_BATCH, _LENGTH = 8, 128
_NUM_STEPS = 40
_BUDGET_SECONDS = 60.0
_LAYER = LayerShape(d_model=192, d_hidden=768, num_experts=8, top_k=2)
_SAME_LOSS = 1e-4
_REPORT = Path("quickstart.html")
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_RESUME = (
    f".venv/bin/moetune profile --name {_NAME} --nproc {_NUM_RANKS} --dtype float32 "
    f"--d-model {_LAYER.d_model} --d-hidden {_LAYER.d_hidden} --num-experts {_LAYER.num_experts} "
    f"--top-k {_LAYER.top_k} --tokens {_BATCH * _LENGTH} --budget 30m --resume"
)


def quickstart(*, with_lab: bool) -> int:
    """Measure, plan and train twice; return the exit code, 1 if chunks changed the losses.

    Args:
        with_lab: also show chunks on a limited wire.

    Raises:
        MoetuneError: a step failed, or the machine cannot build the lab.
    """
    screen = Screen()
    if with_lab:
        from benchmarks.netlab.lab import check_supported

        check_supported()  # before anything is measured
    code = _train_here(screen)
    _show_cluster(screen)
    if with_lab:
        _show_slow_wire(screen)
    screen.say()
    screen.say("To type moetune without its folder:  . .venv/bin/activate")
    return code


def _train_here(screen: Screen) -> int:
    plan, results = measure_plan_train(screen)
    return _report(screen, plan, results)


def measure_plan_train(screen: Screen) -> "tuple[Plan, Sequence[TrainingResult]]":
    """Measure this machine, plan the layer and train; return the plan and a result per way.

    Returns:
        The plan, and the results of the plan and, where it has more chunks, of one chunk.
    """
    from examples.train_twice import TrainingConfig, train_twice
    from moetune.app.launch import run_on_ranks

    environ = config.environment()
    screen.say(f"1. Measure this machine with {_NUM_RANKS} ranks, for a minute at most.")
    _profile(screen)
    plan = _plan()
    screen.say(
        f"2. Plan for a layer of {_LAYER.num_experts} experts, {_LAYER.d_model} wide, "
        f"{_BATCH * _LENGTH:,} tokens per rank: {plural(plan.pipeline.forward_degree, 'chunk')} "
        f"forward, {plan.pipeline.backward_degree} backward. {plan.decision.why}"
    )
    if plan.is_suspect:
        screen.say(
            "Times vary too much: the profile is suspect, and so is the plan. Run this again on an "
            "idle machine."
        )
    training = TrainingConfig(
        plan=plan, batch=_BATCH, length=_LENGTH, num_blocks=2, num_heads=4, num_steps=_NUM_STEPS
    )
    ways = "the plan" if plan.pipeline.forward_degree == 1 else "the plan and with one chunk"
    screen.say(
        f"3. Train a byte-level language model on Python's sources for {_NUM_STEPS} steps, with "
        f"{ways}."
    )
    results = run_on_ranks(
        train_twice, training, num_ranks=_NUM_RANKS, launch=None, environ=environ,
        oversubscribe=True,
    )  # fmt: skip
    return plan, results


def _show_cluster(screen: Screen) -> None:
    from examples.on_a_cluster import MODELS, RANKS, show_cluster

    screen.say()
    screen.say(
        f"4. On a cluster the layout and its chunks decide: {len(MODELS)} models on {RANKS} H100."
    )
    show_cluster(screen)


def _show_slow_wire(screen: Screen) -> None:
    from examples.on_a_slow_wire import RATE_MBIT, show_slow_wire

    screen.say()
    screen.say(
        f"5. Where the wire is slow, chunks pay: two ranks joined by {RATE_MBIT:g} Mbit/s, about a "
        "minute."
    )
    show_slow_wire(screen)


def _profile(screen: Screen) -> None:
    from moetune.app.profile import profile_machine
    from moetune.app.profile_request import ProfileRequest

    request = ProfileRequest(
        name=_NAME,
        num_ranks=_NUM_RANKS,
        dtypes=("float32",),
        layers=(_LAYER,),
        max_tokens=_BATCH * _LENGTH,
        budget_seconds=_BUDGET_SECONDS,
        environment=config.environment(),
        oversubscribe=True,
    )
    with wiring.open_store(wiring.configure().settings) as store:
        profile_machine(
            request, store=store, progress=ScreenProgress(screen, resume=_RESUME), resume=False
        )


def _plan(routing: str | None = None, degree: int | None = None) -> "Plan":
    """Plan the layer, or predict it with so many chunks for the routing in a file."""
    from moetune.app.planner import plan_question
    from moetune.domain.question import Question

    question = Question(
        d_model=_LAYER.d_model, d_hidden=_LAYER.d_hidden, num_experts=_LAYER.num_experts,
        top_k=_LAYER.top_k, world_size=_NUM_RANKS, tokens=_BATCH * _LENGTH, dtype="float32",
        routing=routing, expert_placement="natural" if routing else None, forward_degree=degree,
    )  # fmt: skip
    settings = wiring.configure().settings
    saves = routing is None
    return plan_question(question, settings, profile=_NAME, save=saves).plan.as_layer()


def predict_routed(plan: "Plan", trained: "TrainingResult") -> "Plan":
    """Return the plan's prediction for the routing that the timed steps had."""
    with tempfile.TemporaryDirectory() as folder:
        routing = Path(folder) / "routing.json"
        routing.write_text(trained.routing.text, encoding="utf-8")
        return _plan(str(routing), plan.pipeline.forward_degree)


def _report(screen: Screen, plan: "Plan", results: Sequence["TrainingResult"]) -> int:
    """Say what was measured and learned; return 1 where chunks changed the losses."""
    routed, planned = predict_routed(plan, results[0]), results[0]
    predicted = routed.predicted
    seconds = (predicted.step_seconds, predicted.sequential_step_seconds)
    names = ("plan", "one chunk")
    screen.say()
    screen.table(
        Table(
            name="training",
            header=("", "chunks", "loss before", "after", "predicted step", "measured", "error"),
            rows=tuple(map(_row, names[: len(results)], results, seconds)),
        )
    )
    screen.say()
    screen.say(
        "A step is the forward and backward pass of one MoE layer on the trained model's own "
        f"tokens. The plan is for even routing: {format_seconds(plan.predicted.step_seconds)}. "
        f"The busiest rank had {planned.steps.imbalance:.2f} × the mean rows, which the predicted "
        "steps above allow for."
    )
    difference = abs(planned.loss_after - results[-1].loss_after)
    if len(results) > 1:
        screen.say(f"The losses after training differ by {difference:.1e}.")
    screen.say(" ".join(_learned(routed, [median_seconds(result) for result in results])))
    location = wiring.configure().settings.db
    screen.line(f"Plan {plan.id[:6]} is in {config.without_password(location)}")
    screen.line(f"Explain it: .venv/bin/moetune explain {plan.id[:6]}")
    _draw(screen, plan)
    return 0 if difference <= _SAME_LOSS else 1


def _learned(plan: "Plan", seconds: Sequence[float]) -> Iterator[str]:
    """Yield what the run says of a prediction: whether chunks paid, and whether its range held."""
    measured, low, high = seconds[0], *plan.range_seconds
    span = f"{format_seconds(low)} to {format_seconds(high)}"
    if len(seconds) == 1:
        yield "Learned: on this machine one chunk is best, as exchanges take little of a step."
    else:
        gain = seconds[1] / measured - 1
        how = "shorter" if gain > 0 else "longer"
        chunks = plural(plan.pipeline.forward_degree, "chunk")
        yield f"Learned: on this machine {chunks} make a step {format_share(abs(gain))} {how}."
    inside = "inside" if low <= measured <= high else "outside"
    yield f"The step of {format_seconds(measured)} is {inside} the predicted range of {span}."
    if len(seconds) == 1:
        yield "Chunks pay where the wire is slow: make quickstart LAB=1 shows it."


def median_seconds(trained: "TrainingResult") -> float:
    """Return the median of the timed steps, in seconds."""
    return statistics.median(trained.steps.step_seconds)


def _draw(screen: Screen, plan: "Plan") -> None:
    """Write the report of the profile and the plan, and open it where there is a display."""
    from moetune.app.report import write_report

    write_report(
        _REPORT, profile=_NAME, plans=[plan.id],
        stores=partial(wiring.find_store, wiring.configure().settings),
    )  # fmt: skip
    screen.line(f"See it in a browser: {_REPORT.resolve()}")
    if sys.platform == "darwin" or any(map(config.environment().get, _DISPLAYS)):
        webbrowser.open(_REPORT.resolve().as_uri())


def _row(name: str, trained: "TrainingResult", predicted_seconds: float) -> tuple[Cell, ...]:
    measured = median_seconds(trained)
    decision = trained.decision
    losses = (trained.loss_before, trained.loss_after)
    return (
        Cell.words(name),
        Cell.words(f"{decision.forward_degree}/{decision.backward_degree}"),
        *(Cell(text=f"{loss:.4f}", value=loss) for loss in losses),
        Cell.seconds(predicted_seconds),
        Cell.seconds(measured),
        Cell.share(prediction_error(predicted_seconds, measured), digits=0, sign=True),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--lab", action="store_true", help="also two ranks on a limited wire")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(quickstart(with_lab=_arguments().lab))
    except MoetuneError as problem:
        Screen().error(problem)
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
