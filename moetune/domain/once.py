"""Methods that cache their results, because a question asks for them many times."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

_Owner = TypeVar("_Owner", bound="Tables")
_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")
_Made = TypeVar("_Made")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Base of classes that cache results of their methods. Not safe for several threads."""

    _tables: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def remembered(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return the cached value of the key, or make it now; None is made again."""
        made: _Made | None = self._tables.get(key)
        if made is None:
            made = self._tables[key] = make()
        return made


def once(
    key: Callable[_Asked, Hashable],
) -> Callable[
    [Callable[Concatenate[_Owner, _Asked], _Answer]], Callable[Concatenate[_Owner, _Asked], _Answer]
]:
    """Return a decorator that computes a method once for each `key` of its arguments."""

    def decorate(
        method: Callable[Concatenate[_Owner, _Asked], _Answer],
    ) -> Callable[Concatenate[_Owner, _Asked], _Answer]:
        @wraps(method)
        def answer_once(self: _Owner, /, *args: _Asked.args, **kwargs: _Asked.kwargs) -> _Answer:
            of_method = method, key(*args, **kwargs)  # looked up once: hashing it takes longest
            answer: _Answer = self._tables.get(of_method, _MISSING)
            if answer is _MISSING:
                answer = self._tables[of_method] = method(self, *args, **kwargs)
            return answer

        return answer_once

    return decorate


def once_for(*names: str) -> Callable[[_Method], _Method]:
    """Return `once` with a key of the first argument's attributes and all further arguments."""
    attributes = attrgetter(*names)

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def remembering(self: Tables, first: object, *rest: Hashable) -> object:
            key = method, attributes(first), rest
            answer = self._tables.get(key, _MISSING)
            if answer is _MISSING:
                answer = self._tables[key] = method(self, first, *rest)
            return answer

        return cast("_Method", remembering)

    return decorate
