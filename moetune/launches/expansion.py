"""Expansion of a shell script's words: nothing is run, and a word without a value says so."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from moetune.launches.tokens import tokens_of

_PARAMETER = re.compile(
    r"(#?)([A-Za-z_]\w*|\d+|[@*#?!$-])(\[[@*]\]|\[\d+\])?(:?[-=?+])?(.*)", re.DOTALL
)
_CHOICE = re.compile(r"^([^?:]+)\?([^?:]+):([^?:]+)$")
"""C's conditional operator, which Python writes differently."""
_SCRIPT = re.compile(r"BASH_SOURCE|\$0|\$\{0\}")
"""The script's path, whose folder is "." here."""
_ECHO = re.compile(r"\$\((?:IFS=(?:'(.)[^']*'|(\S)) *; *)?echo +(?!-)([^|&;<>`()]*)\)")
"""The output of echo, with what it puts between the elements of an array."""
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?!$]")
_OPERATIONS: Mapping[type, Callable[[int, int], int]] = MappingProxyType({
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.Gt: operator.gt, ast.Lt: operator.lt,
    ast.GtE: operator.ge, ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne,
})  # fmt: skip
_CASES: Mapping[str, Callable[[str], str]] = {",,": str.lower, "^^": str.upper}
_LARGEST = 10**18
_DEEPEST = 50


class Run(NamedTuple):
    """Text of a single line.

    Args:
        missing: the expression without a value, such as "$TP"; its text is then empty.
    """

    text: str
    line: int
    missing: str = ""


Text = tuple[Run, ...]
"""The value of a variable, or of an element of an array."""


class Word(NamedTuple):
    """A word of a command, and the line that it stands in.

    Args:
        missing: its first variable without a value, such as "$TP".
        file: the file that has the word and that the script reads; "" for the script itself.
    """

    text: str
    line: int
    missing: str = ""
    file: str = ""

    @property
    def place(self) -> str:
        """The words "line 3", or the name of the file."""
        return self.file or f"line {self.line}"


class _Piece(NamedTuple):
    """A part of words: a run, and whether its white space splits words; None ends a word."""

    run: Run | None
    splits: bool = False


_END = _Piece(None)


def text_of(text: Text) -> str:
    """Return the characters of a value."""
    return "".join(run.text for run in text)


def plain(value: str, line: int) -> Text:
    """Return a value that stands on a single line."""
    return (Run(value, line),)


def missing_of(text: Text) -> str:
    """Return the first variable without a value in a text; "" if all have a value."""
    return next((run.missing for run in text if run.missing), "")


@dataclass(slots=True)
class Scope:
    """Variables of a script, and its positional words.

    Args:
        variables: a text for each element of an array; a single text for other variables.
        is_passed_on: whether the script has read its positional words.
        empty: names that are set only in a branch that is not taken: their value is empty.
    """

    variables: dict[str, tuple[Text, ...]] = field(default_factory=dict)
    positional: tuple[Text, ...] = ()
    empty: set[str] = field(default_factory=set)
    is_passed_on: bool = False
    deep: int = 0

    def words(self, raw: str, line: int) -> list[Word]:
        """Return the words that a word of the script expands to, which may be none or several."""
        return [*map(_word_of, self._texts(raw, line))]

    def _texts(self, raw: str, line: int) -> list[Text]:
        words: list[Text] = []
        runs: list[Run] | None = None
        for run, splits in [*self._pieces(raw, line, quoted=False), _END]:
            if run is None:
                if runs is not None:
                    words.append(tuple(runs))
                runs = None
            elif not splits:
                runs = [*(runs or []), run]
            else:
                for part in _split(run):
                    if part is not None:
                        runs = [*(runs or []), part]
                    elif runs is not None:
                        words.append(tuple(runs))
                        runs = None
        return words

    def text(self, raw: str, line: int) -> Text:
        """Return the text that a word becomes without splitting, as in `NAME=word`."""
        pieces = self._pieces(raw, line, quoted=False)
        return tuple(Run(" ", line) if run is None else run for run, _ in pieces)

    def elements(self, inside: str, line: int) -> tuple[Text, ...]:
        """Return the elements of an array."""
        words = (token for token in tokens_of(inside, line) if token.kind == "word")
        return tuple(text for token in words for text in self._texts(token.text, token.line))

    def _pieces(self, raw: str, line: int, *, quoted: bool) -> Iterator[_Piece]:
        position, plain_text = 0, ""
        while position < len(raw):
            char, rest = raw[position], raw[position + 1 :]
            special = char in "\\'\"$`" and not (quoted and char == "'")
            if not special:
                plain_text += char
                position += 1
                if char == "\n":
                    yield _Piece(Run(plain_text, line))
                    plain_text, line = "", line + 1
                continue
            if plain_text:
                yield _Piece(Run(plain_text, line))
                plain_text = ""
            if char == "\\":
                if rest[:1] == "\n":
                    line += 1
                elif rest:
                    keeps_backslash = quoted and rest[0] not in '$`"\\'
                    yield _Piece(Run("\\" * keeps_backslash + rest[0], line))
                position += 2
                continue
            length = _length(raw, position)
            inside = raw[position : position + length]
            yield from self._special(inside, line, quoted=quoted)
            position, line = position + length, line + inside.count("\n")
        if plain_text:
            yield _Piece(Run(plain_text, line))

    def _special(self, inside: str, line: int, *, quoted: bool) -> Iterator[_Piece]:
        match inside[0]:
            case "'":
                for number, part in enumerate(inside[1:-1].splitlines(keepends=True) or [""]):
                    yield _Piece(Run(part, line + number))
            case '"':
                pieces = [*self._pieces(inside[1:-1], line, quoted=True)]
                is_list = inside[1:-1] in ("$@", "${@}") or inside.endswith('[@]}"')
                yield from pieces or ([] if is_list else [_Piece(Run("", line))])
            case "`":
                yield _Piece(Run("", line, inside))
            case _:
                yield from self._dollar(inside, line, quoted=quoted)

    def _dollar(self, inside: str, line: int, *, quoted: bool) -> Iterator[_Piece]:
        if inside.startswith(("$((", "$(expr ")):
            is_plain = inside.startswith("$((")
            number = self.number(inside[3:-2] if is_plain else inside[7:-1].replace("\\*", "*"))
            run = Run("", line, inside) if number is None else Run(str(number), line)
            yield _Piece(run, splits=not quoted)
        elif match := _ECHO.fullmatch(inside):
            yield from self._echo_pieces(match[3], match[1] or match[2] or " ", line, quoted=quoted)
        elif inside.startswith("$("):
            is_folder = "dirname" in inside and _SCRIPT.search(inside)
            upwards = "/.." * (inside.count("/..") + inside.count("dirname") - 1)
            yield _Piece(Run(f".{upwards}", line) if is_folder else Run("", line, inside))
        elif inside == "$":
            yield _Piece(Run("$", line))
        else:
            body = inside[2:-1] if inside.startswith("${") else inside[1:]
            yield from self._parameter(body, inside, line, quoted=quoted)

    def _echo_pieces(self, words: str, joint: str, line: int, *, quoted: bool) -> Iterator[_Piece]:
        """Yield what echo prints of words."""
        is_list = words.strip('"').endswith("[*]}")
        for number, text in enumerate(self._texts(words.replace("[*]}", "[@]}"), line)):
            if number:
                yield _Piece(Run(joint if is_list else " ", line), splits=not quoted)
            yield from (_Piece(run, splits=not quoted) for run in text)

    def _parameter(self, body: str, inside: str, line: int, *, quoted: bool) -> Iterator[_Piece]:
        """Yield a parameter's value or its default, or name it as missing."""
        match = _PARAMETER.fullmatch(body)
        if match is None:
            yield _Piece(Run("", line, inside))
            return
        counts, name, index, action, rest = match.groups()
        value = self._value(name, index or "")
        value, rest = _cased(value, rest)
        asks_text = (action or "").startswith(":")
        has_value = value is not None and (not asks_text or bool(text_of(sum(value, ()))))
        if counts:
            yield _Piece(Run(str(len(value or ())), line))
        elif action and action[-1] == "+":
            if has_value:
                yield from self._pieces(rest, line, quoted=quoted)
        elif not has_value and action and action[-1] in "-=":
            default = self.text(rest, line)
            if action[-1] == "=":
                self.variables[name] = (default,)
            yield from (_Piece(run, splits=not quoted) for run in default)
        elif value is None or (rest and not action):  # such as ${NAME%.*}
            yield _Piece(Run("", line, inside))
        else:
            is_list = name == "@" or index == "[@]"
            for number, element in enumerate(value):
                if number:
                    yield _END if is_list or not quoted else _Piece(Run(" ", line))
                yield from (_Piece(run, splits=not quoted) for run in element)

    def _value(self, name: str, index: str) -> tuple[Text, ...] | None:
        """Return the elements of a variable; None if it has no value."""
        self.is_passed_on = self.is_passed_on or name in "@*" or name.isdigit()
        if name in "@*":
            return self.positional
        if name == "#":
            return (plain(str(len(self.positional)), 0),)
        if name.isdigit():
            number = int(name)
            return self.positional[number - 1 : number] or None if number else None
        if name in self.variables:
            elements = self.variables[name]
            if index[1:-1].isdigit():
                return elements[int(index[1:-1]) :][:1] or None
            return elements if index else elements[:1]
        return ((),) if name in self.empty else None

    def number(self, text: str) -> int | None:
        """Return the value of an arithmetic expression; None if it has none."""
        self.deep += 1
        try:
            if self.deep > _DEEPEST:
                return None
            flat = "".join(
                run.text if run and not run.missing else "$"
                for run, _ in self._pieces(text, 0, quoted=True)
            )
            python = _CHOICE.sub(r"(\2) if (\1) else (\3)", flat.strip())
            return self._compute(ast.parse(python, mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return None
        finally:
            self.deep -= 1

    def _compute(self, node: ast.expr) -> int | None:
        result: int | None = None
        match node:
            case ast.Constant(value=int() as value):
                result = int(value)
            case ast.Name(id=name):
                text = self._value(name, "")
                result = self.number(text_of(text[0]) or "0") if text else None
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                result = self._combine(ast.Constant(0), ast.Sub(), operand)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                holds = self._compute(test)
                result = None if holds is None else self._compute(body if holds else orelse)
            case ast.BinOp(left=left, op=operation, right=right):
                result = self._combine(left, operation, right)
            case ast.Compare(left=left, ops=[operation], comparators=[right]):
                result = self._combine(left, operation, right)
            case _:
                pass
        return result

    def _combine(self, left: ast.expr, operation: ast.AST, right: ast.expr) -> int | None:
        first, second = self._compute(left), self._compute(right)
        compute = _OPERATIONS.get(type(operation))
        if first is None or second is None or compute is None:
            return None
        result = int(compute(first, second))
        return result if abs(result) < _LARGEST else None


def _length(raw: str, start: int) -> int:
    """Return the length of the string or the expansion that begins with a quote or a dollar."""
    char, following = raw[start], raw[start + 1 : start + 2]
    if char == "$" and following not in ("(", "{"):
        match = _NAME.match(raw, start + 1)
        return 1 + len(match[0]) if match else 1
    closing = {"(": ")", "{": "}"}.get(following, "") if char == "$" else char
    position, depth = start + (2 if char == "$" else 1), 1
    while position < len(raw):
        if raw[position] == "\\" and char != "'":
            position += 1
        elif raw[position] == closing:
            depth -= 1
            if not depth:
                return position + 1 - start
        elif char == "$" and raw[position] == following:
            depth += 1
        elif char == '"' and raw[position] == "$":
            position += _length(raw, position) - 1
        position += 1
    return len(raw) - start


def _cased(value: tuple[Text, ...] | None, rest: str) -> tuple[tuple[Text, ...] | None, str]:
    """Return a value in the case that ${NAME,,} or ${NAME^^} asks for, and the unused rest."""
    change = _CASES.get(rest)
    if value is None or change is None:
        return value, rest
    return tuple(tuple(run._replace(text=change(run.text)) for run in text) for text in value), ""


def _word_of(runs: Text) -> Word:
    """Return a word; if it has spaces, as a script, it keeps the names of unset variables."""
    text = text_of(runs)
    if any(map(str.isspace, text)):
        text = "".join(run.text or run.missing for run in runs)
    return Word(text, runs[0].line, missing_of(runs))


def _split(run: Run) -> Iterator[Run | None]:
    """Yield the parts of a run, and None for the white space between them."""
    if run.missing:
        yield run
        return
    for part in re.split(r"(\s+)", run.text):
        if part.isspace():
            yield None
        elif part:
            yield Run(part, run.line)
