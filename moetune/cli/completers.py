"""Values that a shell completes: models, profiles and plans, silent where something is wrong."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import typer

from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from moetune.store import SqlStore

ID_LETTERS = 8
"""Of a plan's id, which is as unique as a store needs and still readable."""


def model_names(incomplete: str) -> list[str]:
    """Return the named models, of the papers and of Hugging Face, that begin so."""
    from moetune.domain.model import MODELS, WHOLE_MODELS
    from moetune.huggingface.registry import model_names as registered

    return _beginning(incomplete, (*MODELS, *WHOLE_MODELS, *registered()))


def profile_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the profiles of the store and the reference machines that begin so."""
    from moetune.app.files import bundled_profiles

    return _beginning(incomplete, (*stored_profiles(context, incomplete), *bundled_profiles()))


def gpu_names(incomplete: str) -> list[str]:
    """Return the GPUs of the reference machines that begin so."""
    from moetune.app.describe import gpus

    return _beginning(incomplete, gpus())


def stored_profiles(context: typer.Context, incomplete: str) -> list[str]:
    """Return the profiles of the store that begin so, newest first."""
    return _stored(context, incomplete, lambda store: (run.name for run in store.runs()))


def plan_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return short ids of the stored plans that begin so, newest first."""
    # A longer beginning than the short ids have is completed to the whole id.
    letters = None if len(incomplete) > ID_LETTERS else ID_LETTERS
    return _stored(context, incomplete, lambda store: (plan.id[:letters] for plan in store.plans()))


def _stored(
    context: typer.Context, incomplete: str, names: Callable[["SqlStore"], Iterable[str]]
) -> list[str]:
    """Return names from the store; none where there is no store or it cannot be read."""
    try:
        with _find_store(context) as store:
            return _beginning(incomplete, names(store)) if store else []
    except MoetuneError:
        return []


def _find_store(context: typer.Context) -> "AbstractContextManager[SqlStore | None]":
    from moetune.app import wiring

    before = context.find_root().params
    settings = wiring.configure(
        db=before.get("db"),
        file=before.get("config"),
        no_files=bool(before.get("no_config")),
    ).settings
    return wiring.find_store(settings)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
