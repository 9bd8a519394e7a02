"""`moetune.plan`, `moetune.load_plan`, `moetune.memory`: plans for programs and notebooks.

Arguments are the flags of `moetune plan`, and go the same way: see `domain.question`.
"""

import inspect
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any, cast

from moetune.app import wiring
from moetune.app.files import find_plan, is_plan_path
from moetune.app.memory import fit_memory
from moetune.app.plan_view import MemoryView, PlanView
from moetune.app.planner import plan_question
from moetune.app.requests import ask, memory_question
from moetune.app.staleness import stale_note
from moetune.config import Settings
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.question import MEMORY_FIELDS, Question
from moetune.domain.spelling import AS_ARGUMENTS, nearest_or, spelled

_LOGGER = logging.getLogger("moetune")


def plan(
    model: str | os.PathLike[str] | None = None,
    *,
    profile: str | os.PathLike[str] | Profile | None = None,
    db: str | os.PathLike[str] | None = None,
    save: bool = True,
    **options: object,
) -> PlanView:
    """Return the best plan for a layer or a model, as `moetune plan` does.

    A notebook draws the plan, `print` shows what the command line prints.

    Args:
        model: a named model or the path of a `config.json`; without it give the sizes of a layer:
            `d_model`, `d_hidden`, `num_experts` and `tokens`.
        profile: a name, a file or a `moetune.Profile`; default, the setting, else the newest
            measured one.
        db: the store; default, that of the command line.
        save: store the plan, so that its id finds it; False leaves the store as it is.
        options: flags of `moetune plan` with underscores, such as `world_size=64`. Sizes are
            numbers of tokens and bytes, or texts with a unit: `seq="8k"`, `memory_limit="80GB"`.

    Raises:
        InputError: an argument is unknown, or its value is wrong.
        InfeasiblePlanError: nothing satisfies the arguments or the memory limit.
        ProfileError: there is no such profile, or it lacks an operation.
        MoetuneError: the store cannot be opened or written.
    """
    with spelled(AS_ARGUMENTS):
        if not isinstance(profile, (str, os.PathLike, Profile, type(None))):
            raise InputError(f"profile must be a name, a file or a Profile, got {profile!r}")
        used = profile if isinstance(profile, Profile) else _text(profile)
        question = ask({"model": model, **options})
        settings = wiring.configure(db=_text(db)).settings
        planned = plan_question(question, settings, profile=used, save=save)
        machine = planned.found.profile
        if note := stale_note(machine):
            _LOGGER.warning(note)
        return PlanView(plan=planned.plan, db=_text(db), profile=machine)


def memory(
    model: str | os.PathLike[str],
    *,
    device_memory: str = "80GB",
    **options: object,
) -> MemoryView:
    """Return the layouts of a model's training that fit into memory, as `moetune memory` does.

    Args:
        model: a named model or the path of a `config.json`.
        device_memory: of one GPU, with its unit.
        options: other flags of `moetune memory` with underscores, such as `world_size=64` or
            `seq="8k"`.

    Raises:
        InputError: an argument is unknown, its value is wrong, or the pins break a rule.
    """
    with spelled(AS_ARGUMENTS):
        for name in options.keys() - {*MEMORY_FIELDS}:
            hint = nearest_or(f"known: {', '.join(MEMORY_FIELDS)}", name, MEMORY_FIELDS)
            raise InputError(f"memory has no argument {name!r}", hint, field=name)
        question = memory_question({"model": model, **options}, device_memory=device_memory)
        return MemoryView(answer=fit_memory(question))


def load_plan(
    path_or_id: str | os.PathLike[str], *, db: str | os.PathLike[str] | None = None
) -> PlanView:
    """Return the plan of a file, or of an id in the store.

    Args:
        path_or_id: a path that ends in .json or has a slash, a `pathlib.Path`, or an id or its
            first letters.
        db: the store; default, that of the command line.

    Raises:
        InputError: the file is missing or is no plan, or no plan or several have such an id.
        MoetuneError: the store cannot be opened.
    """
    with spelled(AS_ARGUMENTS):
        if not isinstance(path_or_id, (str, os.PathLike)):
            raise InputError(f"load_plan takes a path or an id, got {path_or_id!r}")
        wanted = os.fspath(path_or_id)
        is_path = isinstance(path_or_id, os.PathLike) or is_plan_path(wanted)
        path = str(Path(wanted).expanduser().absolute())
        if is_path and Path(path).is_dir():
            raise InputError(f"{wanted} is a folder, not a plan", "name one of its files")
        settings = wiring.configure(db=_text(db)).settings
        found = _found(path if is_path else wanted, settings, is_path=is_path)
        return PlanView(plan=found, db=_text(db))


def _text(value: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text with a slash, by which it is told from a name."""
    if value is None or isinstance(value, str):
        return value
    text = os.fspath(value)
    return text if os.sep in text else f"{os.curdir}{os.sep}{text}"


def _found(wanted: str, settings: Settings, *, is_path: bool) -> AnyPlan:
    try:
        return find_plan(wanted, stores=partial(wiring.find_store, settings))
    except InputError as error:
        if not is_path:
            where = "name another store with db=…, or a file by a path with a slash"
            error.hint = f"{error.hint}; {where}" if error.hint else where
        raise


def _signature() -> inspect.Signature:
    own = inspect.signature(plan)
    named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    flags = [one for one in inspect.signature(Question).parameters.values() if one.name != "model"]
    return own.replace(parameters=[*named, *flags])


# Editors and notebooks complete the names of arguments from it.
cast("Any", plan).__signature__ = _signature()
