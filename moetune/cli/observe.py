"""`moetune observe`: a run's step and memory against the plan or the launch that it is of."""

from collections.abc import Sequence
from pathlib import Path

from moetune.cli.check import EXTRA, TARGET, VALUES, WORLD_SIZE
from moetune.cli.commands import argument, command, option
from moetune.cli.completion import model_names, plan_ids
from moetune.cli.options import PROFILE
from moetune.cli.plan import OF_STORES
from moetune.cli.session import Session
from moetune.domain.units import parse_bytes, parse_startup


@command(
    "moetune observe training.json --log train.log",
    argument("run", "A plan's JSON file, the beginning of its id in the store, or what starts the "
             "run, as of `moetune check`.", form="PLAN|FILE", names=plan_ids),
    EXTRA,
    option("--step", "A step's time: 19.7s, 850ms.", parse_startup, form="TIME"),
    option("--log", "The log of a rank that prints steps.", Path),
    option("--trace", "A rank's trace of torch.profiler: .json or .json.gz.", Path),
    option("--memory", "Peak of a device, all of it: 71GB. Default: the log's.", parse_bytes),
    option("--no-save", "Do not keep the run in the store.", bool),
    option("--model", "A name, or a Hugging Face config.json. Default: the plan's, or by the "
           "file's sizes.", form="PATH|NAME", names=model_names),
    PROFILE, WORLD_SIZE, TARGET, VALUES,
)  # fmt: skip
def observe(
    session: Session, run: str, extra: Sequence[str], *, step: float | None, log: Path | None,
    trace: Path | None, memory: int | None, no_save: bool, model: str | None, profile: str | None,
    world_size: int | None, target: str | None, values: Sequence[tuple[str, str]],
) -> None:  # fmt: skip
    """Say whether a run is what was predicted, and if not, where the difference is.

    Logs of Megatron, Megatron-Bridge, torchtitan, DeepSpeed and the Trainer of transformers are
    read. The run is kept, and calibrates plans of the same machine and runtime; that of a trace is
    not, as profiling takes time.
    """
    from moetune.app.observe import kept
    from moetune.app.observe import observe as observed_of
    from moetune.app.predicted_runs import predicted_run
    from moetune.app.views.observe import observe_document, observe_sections
    from moetune.launches.reading import Asked

    asked = Asked(
        target=target, model=model, world_size=world_size, extra=tuple(extra or ()),
        values=dict(values or ()), folder=Path(run).parent,
    )  # fmt: skip
    with session.planner(profile) as planner:
        prediction = predicted_run(planner, run, asked)
    observed = observed_of(prediction, step_seconds=step, log=log, trace=trace, memory_bytes=memory)
    if not no_save and observed.is_kept:
        try:
            with session.open_store() as store:
                observed = kept(store, observed)
        except OF_STORES as problem:
            session.screen.note(f"warning: the run is not kept in the store: {problem}")
    session.screen.answer(observe_sections(observed), observe_document(observed))
