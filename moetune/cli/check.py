"""`moetune check` and `moetune observe`: what a launch runs, and whether it ran as predicted."""

from collections.abc import Sequence
from pathlib import Path

from moetune.cli.commands import argument, command, option
from moetune.cli.completion import model_names, plan_ids
from moetune.cli.options import OF_STORES, PROFILE, fields, pair, texts_of
from moetune.cli.session import Session
from moetune.domain.errors import QualityError
from moetune.domain.question import BUDGET_FIELDS
from moetune.domain.units import parse_bytes, parse_count, parse_startup

EXTRA = argument("extra", "Words behind --: those that the script gets.", form="EXTRA",
                 required=False, multiple=True)  # fmt: skip
WORLD_SIZE = option("--world-size", "Ranks. Default: the launcher's.", parse_count, form="N")
TARGET = option(
    "--target", "The runtime's version, such as megatron@0.17. Default: the newest.", form="TARGET"
)
VALUES = option("--set values", "A variable that the script takes from its environment.", pair,
                form="NAME=VALUE", multiple=True)  # fmt: skip


@command(
    "moetune check train.sh --profile h100-x8 --world-size 64",
    argument("file", "What starts the run: a shell script with Megatron's arguments.", Path,
             form="FILE"),
    EXTRA,
    option("--model", "A name, or a Hugging Face config.json. Default: by the file's sizes.",
           form="PATH|NAME", names=model_names),
    PROFILE, WORLD_SIZE, TARGET, VALUES, *fields(*BUDGET_FIELDS),
    option("--write", "Write a copy of the file with a change to this file.", Path),
    option("--take", "The change to write: a number of the list, or best. Default: 1.",
           form="N|best", default="1"),
)  # fmt: skip
def check(
    session: Session, file: Path, extra: Sequence[str], *, model: str | None, profile: str | None,
    world_size: int | None, target: str | None, values: Sequence[tuple[str, str]],
    write: Path | None, take: str, **run: str | None,
) -> int:  # fmt: skip
    """Say what a launch file runs, what stops it, and what would be better.

    The file is read and never run. Exit code 6: it cannot start as it is, or does not fit.
    """
    from moetune.app.check import check_file, written_change
    from moetune.app.files import write_text
    from moetune.app.views.check import check_document, check_sections
    from moetune.domain.question import read_question, read_texts
    from moetune.launches.files import launch_text
    from moetune.launches.reading import Asked

    asked = Asked(
        extra=tuple(extra), values=dict(values), model=model, world_size=world_size, target=target,
        folder=file.parent,
    )  # fmt: skip
    budget = read_question(read_texts(texts_of(run))).budget
    text = launch_text(file)  # a missing file is named before a missing profile
    with session.planner(profile) as planner:
        checked = check_file(planner, file, text, asked, budget=budget)
    copy = None if write is None else written_change(checked, text, asked, take)
    if copy is not None and write is not None:
        write_text(write, copy.text)
    session.screen.answer(check_sections(checked), check_document(checked))
    if copy is not None:
        needed = f" Its command needs {' '.join(copy.words)}." if copy.words else ""
        session.screen.note(f"Written to {write}, with change {take}.{needed}")
    return 0 if checked.starts else QualityError.exit_code


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
    from moetune.app.observe import keep
    from moetune.app.observe import observe as observed_of
    from moetune.app.predicted_runs import predicted_run
    from moetune.app.views.observe import observe_document, observe_sections
    from moetune.launches.reading import Asked

    asked = Asked(
        extra=tuple(extra), values=dict(values), model=model, world_size=world_size, target=target,
        folder=Path(run).parent,
    )  # fmt: skip
    with session.planner(profile) as planner:
        prediction = predicted_run(planner, run, asked)
    observed = observed_of(prediction, step_seconds=step, log=log, trace=trace, memory_bytes=memory)
    if not no_save and observed.is_kept:
        try:
            with session.open_store() as store:
                observed = keep(store, observed)
        except OF_STORES as problem:
            session.screen.note(f"warning: the run is not kept in the store: {problem}")
    session.screen.answer(observe_sections(observed), observe_document(observed))
