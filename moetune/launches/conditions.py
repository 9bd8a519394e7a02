"""Tests of a shell script: true, false, or without a value."""

import re
from fnmatch import fnmatchcase

from moetune.launches.expansion import Scope, Text, missing_of, text_of
from moetune.launches.tokens import Token

TESTS = frozenset({"[", "[[", "test"})
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
_UNSET = re.compile(r"(\$\w+|\$\{\w+\})?")
"""A variable without a value, which a test takes as empty; the output of a command is unknown."""


def test_result(tokens: list[Token], scope: Scope) -> bool | None:
    """Return whether the test in brackets is true; None if it has no value here."""
    inside = [token for token in tokens if token.text not in (*TESTS, "]", "]]")]
    signs = [token.text for token in inside]
    for joint in ("||", "&&"):
        if joint in signs:
            place = signs.index(joint)
            sides = (test_result(side, scope) for side in (inside[:place], inside[place + 1 :]))
            return join_results(joint, *sides)
    is_not = bool(inside) and inside[0].text == "!"
    result = _comparison([scope.text(token.text, token.line) for token in inside[is_not:]], scope)
    return result if result is None else result is not is_not


def join_results(joint: str, *results: bool | None) -> bool | None:
    """Return the result of tests joined by && or ||; None if it is unknown."""
    decides = joint == "||"
    if decides in results:
        return decides
    return None if None in results else not decides


def _comparison(texts: list[Text], scope: Scope) -> bool | None:
    words = [*map(text_of, texts)]
    is_known = not any(map(missing_of, texts))
    is_run = any(not _UNSET.fullmatch(missing_of(text)) for text in texts)
    match words:
        case ["-z" | "-n", value] if not is_run:
            return bool(value) is (words[0] == "-n")
        case [left, "=" | "==" | "!=", right] if is_known or (not is_run and "" in words):
            return fnmatchcase(left, right) is (words[1] != "!=")
        case _ if not is_known:
            return None
        case [value]:
            return bool(value)
        case [left, sign, right] if sign in _NUMBERS:
            number = scope.number(f"({left}) {_NUMBERS[sign]} ({right})")
            return None if number is None else bool(number)
        case _:
            return None
