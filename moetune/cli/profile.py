"""`moetune profile`: measure this machine."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moetune import config
from moetune.cli.commands import AT_LEAST_1, command, option
from moetune.cli.completion import profile_names
from moetune.cli.options import OVERSUBSCRIBE, fields, texts_of, words_in
from moetune.cli.progress import ScreenProgress
from moetune.cli.session import Session
from moetune.domain.errors import InputError
from moetune.domain.spelling import about
from moetune.domain.units import dtype_bytes, full_dtype, parse_count, parse_seconds
from moetune.measure.grid import Preset

if TYPE_CHECKING:
    from moetune.app.profile_request import ProfileOutcome, ProfileRequest

_TOKENS = 4096
_INTERRUPTED = 130
_BUDGET_SECONDS = 80.0
"""Budget of a run without --budget and --preset, which takes two minutes in all."""
_MEASURED = (
    "model", "d_model", "d_hidden", "num_experts", "top_k", "activation", "num_layers",
    "num_heads", "vocab", "moe_every", "seq",
)  # fmt: skip
"""Fields of the question that say what is measured: a layer, or a whole model."""


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(map(full_dtype, words_in(text)))
    for name in names:
        dtype_bytes(name)  # which refuses an unknown name
    return names


@command(
    "moetune profile --nproc 2 --preset quick --model bert-l --tokens 2k",
    *fields(*_MEASURED),
    option("--name", "Of the profile. Default: the device and number of ranks."),
    option("--nproc", "Ranks to start. Default: 1. Not under torchrun.", AT_LEAST_1),
    option("--preset", "How much to measure.", ("quick", "full")),
    option(
        "--budget",
        "Longest time: 90s, 30m. Default: 80s, quick; with --preset no limit.",
        parse_seconds,
    ),
    option("--dtype dtypes", "Element types, such as float32,bfloat16.", _dtypes, form="DTYPE"),
    option(
        "--group-sizes",
        "Group sizes, such as 2,4. Default: divisors and powers of two.",
        lambda text: tuple(map(parse_count, words_in(text))),
        form="SIZES",
    ),
    option("--tokens", "Tokens per rank and step, such as 8k.", parse_count),
    option(
        "--base",
        "A profile of the same device, such as h100-x8: where nothing is measured here, "
        "its times count, scaled by what both know.",
        form="NAME|FILE",
        names=profile_names,
    ),
    option("--resume", "Measure only the points that an earlier run lacks.", bool),
    OVERSUBSCRIBE,
)
def profile(
    session: Session,
    nproc: int | None,
    *,
    resume: bool,
    oversubscribe: bool,
    **asked: Any,  # noqa: ANN401 - of `_request`
) -> int:
    """Measure this machine and fit its profile.

    GEMMs, collectives, copies and their interference are measured. Under torchrun every rank runs
    this command, and rank 0 stores the samples.
    """
    from moetune.app.profile import take_part

    request = _request(session, nproc, oversubscribe=oversubscribe, **asked)
    if not request.is_writer:
        take_part(request)
        return 0
    return _measure(session, request, resume=resume)


def _request(
    session: Session, nproc: int | None, *, oversubscribe: bool, name: str | None,
    preset: Preset | None,
    budget: float | None, dtypes: tuple[str, ...] | None, group_sizes: tuple[int, ...] | None,
    tokens: int | None, base: str | None, **asked: str | None,
) -> "ProfileRequest":  # fmt: skip
    from moetune.app.profile_request import ProfileRequest, measured_models
    from moetune.app.requests import ask, model_name
    from moetune.domain.question import read_texts
    from moetune.huggingface.registry import find_decoder_model

    settings, environ = session.settings, config.environment()
    launch = config.launch(environ)
    if launch is not None and nproc is not None:
        raise InputError("--nproc does not apply under a launcher, which sets the ranks", "omit it")
    num_ranks = launch.world_size if launch else nproc or 1
    if budget is None and settings.budget is not None:
        budget = parse_seconds(settings.budget)
    if budget is None and preset is None:
        budget, preset = _BUDGET_SECONDS, "quick"
    question = ask(read_texts(texts_of(asked)))
    named = model_name(question)
    model = find_decoder_model(named, world_size=num_ranks) if named else None
    models = measured_models(model, question.seq) if model else ()
    layer = model.layer if model and model.paper else question.layer
    usual_tokens = model.paper.tokens_per_rank if model and model.paper else _TOKENS
    request = ProfileRequest(
        name=name, num_ranks=num_ranks, preset=preset or settings.preset, dtypes=dtypes or (),
        group_sizes=group_sizes or (), layers=() if layer is None or models else (layer,),
        models=models, max_tokens=tokens or usual_tokens, budget_seconds=budget,
        environment=environ, launch=launch, oversubscribe=oversubscribe,
    )  # fmt: skip
    if base is None or not request.is_writer:
        return request
    with about("base"):
        return replace(request, base=session.profile(base).profile)


def _measure(session: Session, request: "ProfileRequest", *, resume: bool) -> int:
    from moetune.app.profile import profile_machine
    from moetune.app.profile_request import detect_cluster

    screen = session.screen
    cluster = detect_cluster(request)
    machine, backend = cluster.machine, cluster.fingerprint.software["backend"]
    ranks = "1 rank" if machine.num_devices == 1 else f"{backend}, {machine.num_devices} ranks"
    cores = cluster.fingerprint.hardware["cores"]
    screen.note(f"{machine.kind.upper()} · {machine.device}, {cores} cores · {ranks}")
    for note in cluster.notes:
        screen.detail(note)
    longer = session.command_again(
        "--preset=full", "--budget=30m", "--resume", without=("--preset", "--budget")
    )
    progress = ScreenProgress(
        screen,
        resume=session.command_again("--budget=30m", "--resume", without=("--budget",)),
        longer=longer if request.preset == "quick" else "",
    )
    with session.open_store() as store:
        try:
            outcome = profile_machine(request, store=store, progress=progress, resume=resume)
        except KeyboardInterrupt:
            progress.finish(is_complete=False)
            screen.note(
                f"interrupted: {progress.num_done} of {progress.num_points} points are stored\n"
                f"  measure the rest:  {session.command_again('--resume')}"
            )
            return _INTERRUPTED
    screen.result(outcome.document)
    if not session.as_json:
        _show(session, request, outcome)
    return 0


def _show(session: Session, request: "ProfileRequest", outcome: "ProfileOutcome") -> None:
    from moetune.app.views.profile import quality_words
    from moetune.fit.quality import group_of

    screen, name = session.screen, outcome.profile.name
    reused = f", {outcome.num_reused} of them from an earlier run" if outcome.num_reused else ""
    screen.say(f'Profile "{name}" has {len(outcome.profile.samples)} samples{reused}.')
    screen.line(f"It is stored in {outcome.location}")
    for words in quality_words(outcome.profile):
        screen.say(words)
    for sample in outcome.failed[:3]:
        group = group_of(sample.point, outcome.profile.machine)
        screen.say(f"Not measured: one point of {group} ({sample.error})")
    quoted = shlex.quote(name)
    screen.line(f"See it:        moetune profiles show {quoted}")
    screen.line(f"Plan with it:  moetune plan --profile {quoted} {_planned(request)}")


def _planned(request: "ProfileRequest") -> str:
    """Return flags that plan for the measured layer, or for a small layer if none was measured."""
    if not request.layers:
        return f"--d-model 512 --d-hidden 2048 --num-experts {4 * request.num_ranks} --tokens 2k"
    layer = request.layers[0]
    return (
        f"--d-model {layer.d_model} --d-hidden {layer.d_hidden} --num-experts {layer.num_experts} "
        f"--top-k {layer.top_k} --activation {layer.activation} --tokens {request.max_tokens}"
    )
