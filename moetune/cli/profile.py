"""`moetune profile`: measure this machine."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from moetune import config
from moetune.app import wiring
from moetune.app.profile_quality import not_measured
from moetune.cli.completers import profile_names
from moetune.cli.options import Texts, with_fields
from moetune.cli.progress import ScreenProgress, clock
from moetune.cli.session import Json, Oversubscribe, Session, command_again, example, session_of
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.samples import Point
from moetune.domain.spelling import about, parsed, read_flag
from moetune.domain.units import dtype_bytes, full_dtype, parse_count, parse_seconds
from moetune.measure.grid import Preset
from moetune.report.section import Cell, Table

if TYPE_CHECKING:
    from moetune.app.profile_request import MeasurementSetting, ProfileOutcome, ProfileRequest
    from moetune.domain.profile import Profile


EPILOG = example("moetune profile --nproc 2 --preset quick --model bert-l --tokens 2k")
_TOKENS = 4096
_INTERRUPTED = 130
_BUDGET = "80s"
"""Of a run that names neither a budget nor a preset, and then is quick: two minutes with its start
and its fit."""


_MEASURED = (
    "model", "d_model", "d_hidden", "num_experts", "top_k", "activation", "num_layers",
    "num_heads", "vocab", "moe_every", "seq",
)  # fmt: skip
"""Fields of the question that say what is measured: a layer, or a whole model."""


@with_fields(*_MEASURED)
def profile(
    context: typer.Context,
    asked: Texts,
    *,
    name: Annotated[
        str | None, typer.Option(help="Of the profile. Default: the device and number of ranks.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start. Default: 1. Not under torchrun.")
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="How much to measure.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest time: 90s, 30m. Default: 80s, quick; with --preset no limit.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Element types, such as float32,bfloat16.")
    ] = None,
    group_sizes: Annotated[
        str | None,
        typer.Option(help="Group sizes, such as 2,4. Default: divisors and powers of two."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens per rank and step, such as 8k.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            autocompletion=profile_names,
            help="A profile of the same device, such as h100-x8: where nothing is measured here, "
            "its times count, scaled by what both know.",
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Estimate points and time, measure nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Measure only the points that an earlier run lacks.")
    ] = False,
    oversubscribe: Oversubscribe = False,
    json: Json = False,
) -> None:
    """Measure this machine and fit its profile.

    GEMMs, collectives, copies and their interference are measured. Under torchrun every rank runs
    this command, and rank 0 stores the samples.
    """
    from moetune.app.models import find_decoder_model
    from moetune.app.profile import take_part
    from moetune.app.profile_request import ProfileRequest, measured_models
    from moetune.app.requests import ask, model_name
    from moetune.domain.question import read_texts

    session = session_of(context)
    settings, setting = session.settings, _setting(nproc, oversubscribe=oversubscribe)
    limit = budget or settings.budget
    if limit is None and preset is None:
        limit, preset = _BUDGET, "quick"
    budget_seconds = parsed(limit, parse_seconds, "budget")
    num_ranks = setting.launch.world_size if setting.launch else nproc or 1
    question = ask(read_texts(asked))
    layer, named = question.layer, model_name(question)
    found = find_decoder_model(named, world_size=num_ranks) if named else None
    wanted = () if found is None else measured_models(found, question.seq)
    if found is not None and found.paper is not None:
        layer = found.layer
    default_tokens = found.paper.tokens_per_rank if found and found.paper else _TOKENS
    request = ProfileRequest(
        name=name,
        num_ranks=num_ranks,
        preset=preset or settings.preset,
        dtypes=tuple(read_flag(one, _dtype, "dtype") for one in _words(dtype)),
        group_sizes=tuple(
            read_flag(one, parse_count, "group_sizes") for one in _words(group_sizes)
        ),
        layers=() if layer is None or wanted else (layer,),
        models=wanted,
        max_tokens=parsed(tokens, parse_count, "tokens") or default_tokens,
        budget_seconds=budget_seconds,
        base=_base(session, base) if setting.is_writer else None,
    )
    if not setting.is_writer:
        take_part(request, setting)
    elif plan_only:
        _plan(session, request, setting, resume=resume, as_json=json)
    else:
        _measure(session, request, setting, resume=resume, as_json=json)


def _base(session: Session, wanted: str | None) -> "Profile | None":
    """Return the profile of that name or file; None where none is named."""
    if wanted is None:
        return None
    from moetune.app.profiles import find_profile

    with about("base"):
        return find_profile(wanted, stores=session.find_store).profile


def _setting(nproc: int | None, *, oversubscribe: bool) -> "MeasurementSetting":
    """Return this process's environment, and its launch where torchrun started it."""
    from moetune.app.profile_request import MeasurementSetting

    environ = config.environment()
    launch = config.launch(environ)
    if launch is not None and nproc is not None:
        raise InputError("--nproc does not apply under a launcher, which sets the ranks", "omit it")
    return MeasurementSetting(environment=environ, launch=launch, oversubscribe=oversubscribe)


def _plan(
    session: Session,
    request: "ProfileRequest",
    setting: "MeasurementSetting",
    *,
    resume: bool,
    as_json: bool,
) -> None:
    from moetune.app.profile import estimate_profile
    from moetune.app.profile_quality import group_of
    from moetune.app.profile_request import detect_cluster

    machine = detect_cluster(request, setting).machine
    with wiring.find_store(session.settings) as store:
        seconds = estimate_profile(request, setting, store=store if resume else None)
    if as_json:
        session.screen.document(_plan_document(seconds))
        return
    groups: dict[str, list[float]] = {}
    for point, estimate in seconds.items():
        groups.setdefault(group_of(point, machine), []).append(estimate)
    session.screen.say(f"{len(seconds)} points, about {clock(sum(seconds.values()))}")
    rows = tuple(
        (Cell.words(group), Cell.count(len(times)), Cell(text=clock(sum(times)), value=sum(times)))
        for group, times in groups.items()
    )
    session.screen.table(Table(name="groups", header=("group", "points", "time"), rows=rows))


def _plan_document(seconds: Mapping[Point, float]) -> dict[str, object]:
    points = [{"point": encode(point), "seconds": one} for point, one in seconds.items()]
    return {
        "schema": "moetune.profile-plan/1",
        "num_points": len(points),
        "seconds": sum(seconds.values()),
        "points": points,
    }


def _measure(
    session: Session,
    request: "ProfileRequest",
    setting: "MeasurementSetting",
    *,
    resume: bool,
    as_json: bool,
) -> None:
    from moetune.app.profile import profile_machine
    from moetune.app.profile_request import detect_cluster

    screen = session.screen
    cluster = detect_cluster(request, setting)
    machine, backend = cluster.machine, cluster.fingerprint.software["backend"]
    ranks = "1 rank" if machine.num_devices == 1 else f"{backend}, {machine.num_devices} ranks"
    cores = cluster.fingerprint.hardware["cores"]
    screen.note(f"{machine.kind.upper()} · {machine.device}, {cores} cores · {ranks}")
    for note in cluster.notes:
        screen.detail(note)
    longer = command_again(
        session, "--preset=full", "--budget=30m", "--resume", without=("--preset", "--budget")
    )
    progress = ScreenProgress(
        screen,
        resume=command_again(session, "--budget=30m", "--resume", without=("--budget",)),
        longer=longer if request.preset == "quick" else "",
    )
    with wiring.open_store(session.settings) as store:
        try:
            outcome = profile_machine(
                request, setting, store=store, progress=progress, resume=resume
            )
        except KeyboardInterrupt:
            progress.finish(())
            screen.note(
                f"interrupted: {progress.num_done} of {progress.num_points} points are stored\n"
                f"  measure the rest:  {command_again(session, '--resume')}"
            )
            raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        screen.document(outcome.document)
    else:
        _show(session, request, outcome)


def _show(session: Session, request: "ProfileRequest", outcome: "ProfileOutcome") -> None:
    screen, name = session.screen, outcome.profile.name
    reused = f", {outcome.num_reused} of them from an earlier run" if outcome.num_reused else ""
    screen.say(f'Profile "{name}" has {len(outcome.profile.samples)} samples{reused}.')
    screen.line(f"It is stored in {outcome.location}")
    if outcome.has_drifted:
        screen.say(
            "The machine's speed changed meanwhile by more than 3 %: measure again when nothing "
            "else runs on it."
        )
    for sample in outcome.failed[:3]:
        screen.say(f"Not measured: {not_measured(sample, outcome.profile.machine)}")
    quoted = shlex.quote(name)
    screen.line(f"See it:        moetune profiles show {quoted}")
    screen.line(f"Plan with it:  moetune plan --profile {quoted} {_planned(request)}")


def _planned(request: "ProfileRequest") -> str:
    """Return the flags that plan what was measured: a layer of the request, else a small one."""
    if not request.layers:
        return f"--d-model 512 --d-hidden 2048 --num-experts {4 * request.num_ranks} --tokens 2k"
    layer = request.layers[0]
    return (
        f"--d-model {layer.d_model} --d-hidden {layer.d_hidden} --num-experts {layer.num_experts} "
        f"--top-k {layer.top_k} --activation {layer.activation} --tokens {request.max_tokens}"
    )


def _dtype(text: str) -> str:
    dtype_bytes(full_dtype(text))
    return full_dtype(text)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()
