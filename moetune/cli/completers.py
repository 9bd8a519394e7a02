"""Names that a shell completes: of models, profiles and plans. What cannot be read is left out."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from moetune.domain.ports import Store

_ID_LETTERS = 6
_MOST_PLANS = 50


def complete_models(incomplete: str) -> list[str]:
    """Return the named models that begin so."""
    from moetune.domain.model import MODELS
    from moetune.huggingface.registry import model_names

    return _beginning(incomplete, (*model_names(), *MODELS))


def complete_profiles(incomplete: str) -> list[str]:
    """Return the reference machines and the profiles of the store that begin so."""
    from moetune.workflows.files import bundled_profiles

    return _beginning(incomplete, (*bundled_profiles(), *_stored_profiles()))


def complete_plans(incomplete: str) -> list[str]:
    """Return the beginnings of ids of plans in the store."""
    return _beginning(incomplete, _stored_plans())


def _stored_profiles() -> Iterator[str]:
    with suppress(MoetuneError, OSError), _store() as store:
        if store is not None:
            yield from (one.name for one in store.runs())


def _stored_plans() -> Iterator[str]:
    with suppress(MoetuneError, OSError), _store() as store:
        if store is not None:
            yield from (one.id[:_ID_LETTERS] for one in store.plan_page(limit=_MOST_PLANS))


def _store() -> "AbstractContextManager[Store | None]":
    from moetune.workflows import wiring

    return wiring.find_store(wiring.configure().settings)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})
