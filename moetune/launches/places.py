"""Places of keys and values in TOML, JSON, YAML, Python and commands, and edits at these places.

An edit changes, adds or removes a single item. The rest stays as it is: comments, order, quotes.
"""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from moetune.domain.errors import InputError
from moetune.export.keys import Value
from moetune.launches.reading import Given

Form = Literal["toml", "yaml", "json", "statement", "keyword", "call", "override", "argument"]
_TOML_TABLE = re.compile(r"\s*\[+\s*([\w.\"'-]+)\s*\]+")
_TOML_ITEM = re.compile(r"\s*([\w\"'-]+)\s*=\s*")
_YAML_ITEM = re.compile(r"( *)([\w.\"'/-]+)\s*:(?:\s+|$)")
_INLINE_COMMENT = re.compile(r"\s+#.*")
_WORD = r"(?<![\w.])(--)?\+*{}(=|[ \t]+)(\"[^\"]*\"|'[^']*'|[^\s\\)]+)"
_SPACES = re.compile(r"\s*")
_FORMS: Mapping[Form, str] = {
    "toml": "{leaf} = {value}", "yaml": "{leaf}: {value}", "json": '"{leaf}": {value}',
    "keyword": "{leaf}={value}", "statement": "{parents}{leaf} = {value}",
    "override": "{parents}{leaf}={value}", "argument": "{parents}{leaf} {value}",
    "call": "{parents}{leaf}()",
}  # fmt: skip
LOADED = "from_pretrained"
"""Leaf of the statement that loads a model; calls of the model's methods may be added after it."""
_LINES = frozenset({"toml", "yaml", "statement", "call"})
"""Forms of items that take whole lines; most other forms have commas between items."""
WORDS = frozenset({"override", "argument"})
"""Forms of items that are words of a command."""


class Code(str):
    """An expression of Python, which is written as it is."""

    __slots__ = ()


class Place(NamedTuple):
    """The place of a configuration's item in its text.

    Args:
        leaf: the last of its keys.
        parents: the keys before it, each with a dot after it, such as "cfg.model.".
        line: line of its value.
        start, end: span of the item, in characters.
        value: start of its value, which ends with the item.
    """

    form: Form
    leaf: str
    parents: str
    line: int
    start: int
    value: int
    end: int

    def item(self, leaf: str, value: object) -> str:
        """Return another item of the same form."""
        return _FORMS[self.form].format(parents=self.parents, leaf=leaf, value=self.text_of(value))

    def text_of(self, value: object) -> str:
        """Return a value as this form writes it."""
        if isinstance(value, Code):
            return value
        if self.form in WORDS:
            parts = ",".join(map(str, value)) if isinstance(value, tuple | list) else ""
            return f"'[{parts}]'" if parts else str(value)
        is_python = self.form in ("statement", "keyword") or self.parents.startswith("{")
        plain = _plain(value)
        if is_python and not isinstance(plain, str):
            return repr(plain)
        return json.dumps(plain)


def places_of(name: str, text: str) -> tuple[Place, ...]:
    """Return the items of a valid configuration, whose name's ending gives its kind."""
    kinds: dict[str, Callable[[str], Iterator[Place]]] = {
        "toml": _of_toml, "json": _of_json, "py": _of_python, "yaml": _of_yaml, "yml": _of_yaml,
    }  # fmt: skip
    kind = kinds.get(name.rpartition(".")[2].lower())
    return () if kind is None else tuple(kind(text))


def with_value(text: str, place: Place, value: Value) -> str:
    """Return the text with another value for an item; None removes the item."""
    if value is not None and place.form != "call":
        return text[: place.value] + place.text_of(value) + text[place.end :]
    if place.form == "statement":
        return text[: place.value] + "None" + text[place.end :]
    start, end = place.start, place.end
    if place.form in WORDS:
        return text[:start].rstrip(" ") + text[end:]
    if place.form not in _LINES:
        start, end = _with_comma(text, start, end)
    line_start, line_end = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    if not text[line_start:start].strip() and not _without_comment(text[end:line_end]):
        start, end = line_start, min(len(text), line_end + 1)
    return text[:start] + text[end:]


def with_item(text: str, place: Place, leaf: str, value: object) -> str:
    """Return the text with a new item of that leaf after the item at a place."""
    line_start = text.rfind("\n", 0, place.start) + 1
    before = text[line_start : place.start]
    indent = before[: len(before) - len(before.lstrip())]
    new = place.item(leaf, value)
    if place.form in _LINES:
        line_end = text.find("\n", place.end)
        if line_end < 0:
            return f"{text}\n{indent}{new}\n"
        return f"{text[:line_end]}\n{indent}{new}{text[line_end:]}"
    if place.form in WORDS:
        return f"{text[: place.end]} {new}{text[place.end :]}"
    gap = f",\n{indent}" if not before.strip() and "\n" in text[: place.start] else ", "
    return f"{text[: place.end]}{gap}{new}{text[place.end :]}"


def with_table(text: str, table: str, leaf: str, value: object) -> str:
    """Return a TOML text with a new table of a single item at its end."""
    return f"{text.rstrip()}\n\n[{table}]\n{leaf} = {json.dumps(_plain(value))}\n"


def with_mapping(text: str, table: str, leaf: str, value: object, places: Collection[Place]) -> str:
    """Return a YAML text with an item added to a mapping, which is made if it is missing."""
    inside = [place for place in places if place.parents == f"{table}."]
    if inside:
        return with_item(text, inside[-1], leaf, value)
    mapping = f"{table}:\n  {leaf}: {json.dumps(_plain(value))}"
    empty = next((place for place in places if (place.parents, place.leaf) == ("", table)), None)
    if empty is not None:
        return text[: empty.start] + mapping + text[empty.end :]
    return f"{text.rstrip()}\n{mapping}\n"


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _without_comment(rest: str) -> str:
    return rest.partition("#")[0].strip()


def _with_comma(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of an item with the comma after it, or else the comma before it."""
    behind = end + len(_spaces(text, end))
    if text[behind : behind + 1] == ",":
        return start, behind + 1 + len(_spaces(text, behind + 1).partition("\n")[0])
    before = text[:start].rstrip()
    return (len(before) - 1, end) if before.endswith(",") else (start, end)


def _spaces(text: str, start: int) -> str:
    match = _SPACES.match(text, start)
    return match[0] if match else ""


def _lines_of(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each line with its number and its first character."""
    start = 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        yield number, start, line
        start += len(line)


def _of_toml(text: str) -> Iterator[Place]:
    table, skipped = "", 0
    for number, start, line in _lines_of(text):
        if start < skipped:
            continue
        if head := _TOML_TABLE.match(line):
            table = f"{head[1]}."
        elif match := _TOML_ITEM.match(line):
            value = start + match.end()
            end = _end_of_toml(text, value)
            skipped = end
            yield Place(form="toml", leaf=match[1].strip("\"'"), parents=table, line=number,
                        start=start + match.start(1), value=value, end=end)  # fmt: skip


def _end_of_toml(text: str, start: int) -> int:
    """Return where a value ends: at the first line end or comment up to which it can be read."""
    for match in re.finditer(r"[ \t]*(?:#[^\n]*)?(?:\n|$)", text[start:]):
        try:
            tomllib.loads(f"x = {text[start : start + match.start()]}")
        except tomllib.TOMLDecodeError:
            continue
        return start + match.start()
    return len(text)


def _of_yaml(text: str) -> Iterator[Place]:
    above: list[tuple[int, str]] = []
    for number, start, line in _lines_of(text):
        match = _YAML_ITEM.match(line)
        if match is None:
            continue
        above = [(depth, key) for depth, key in above if depth < len(match[1])]
        parents = "".join(f"{key}." for _, key in above)
        rest = _INLINE_COMMENT.sub("", line[match.end() :]).rstrip()
        if rest and not rest.startswith("#"):
            yield Place(form="yaml", leaf=match[2].strip("\"'"), parents=parents, line=number,
                        start=start + match.start(2), value=start + match.end(),
                        end=start + match.end() + len(rest))  # fmt: skip
        else:
            above.append((len(match[1]), match[2].strip("\"'")))


def _of_json(text: str) -> Iterator[Place]:
    decoder = json.JSONDecoder()

    def members(start: int, parents: str) -> Iterator[Place]:
        """Yield the members of the object that begins at `start`."""
        position = start + 1
        while True:
            position += len(_spaces(text, position))
            if text[position] in "},":
                if text[position] == "}":
                    return
                position += 1
                continue
            key, colon = decoder.raw_decode(text, position)
            value = text.index(":", colon) + 1
            value += len(_spaces(text, value))
            _, end = decoder.raw_decode(text, value)
            line = text.count("\n", 0, position) + 1
            yield Place(form="json", leaf=key, parents=parents, line=line, start=position,
                        value=value, end=end)  # fmt: skip
            if text[value] == "{":
                yield from members(value, f"{parents}{key}.")
            position = end

    start = len(_spaces(text, 0))
    if text[start : start + 1] == "{":
        yield from members(start, "")


def _of_python(text: str) -> Iterator[Place]:
    source = _Source(text)
    paths: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):  # outer nodes come first
        match node:
            case ast.Assign() | ast.Expr():
                yield from _of_statement(source, node)
            case ast.Call(func=function, keywords=keywords):
                parents = f"{ast.unparse(function)}."
                for word in keywords:
                    if word.arg is not None:
                        yield source.place("keyword", word, word.value, word.arg, parents)
            case ast.Dict(keys=keys, values=values):
                parents = paths.get(id(node), "{")
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        paths[id(value)] = f"{parents}{key.value}."
                        yield source.place("json", key, value, key.value, parents)
            case _:
                continue


def _of_statement(source: "_Source", node: ast.Assign | ast.Expr) -> Iterator[Place]:
    match node:
        case ast.Assign(targets=[ast.Attribute(value=owner, attr=leaf)], value=value):
            yield source.place("statement", node, value, leaf, f"{ast.unparse(owner)}.")
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr=leaf))):
            if leaf == LOADED:
                yield source.place("call", node, node.value, LOADED, f"{name}.")
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=leaf)) as call):
            yield source.place("call", node, call, leaf, f"{ast.unparse(owner)}.")
        case _:
            return


class _Source:
    """Character offsets of a Python text by line and column; columns count bytes."""

    def __init__(self, text: str) -> None:
        self._lines = [(start, line) for _, start, line in _lines_of(text)]

    def place(
        self, form: Form, node: ast.stmt | ast.expr | ast.keyword, value: ast.expr, leaf: str,
        parents: str,
    ) -> Place:  # fmt: skip
        """Return the place of a node that ends with its value."""
        return Place(
            form=form, leaf=leaf, parents=parents, line=value.lineno,
            start=self._offset(node.lineno, node.col_offset),
            value=self._offset(value.lineno, value.col_offset),
            end=self._offset(value.end_lineno or value.lineno, value.end_col_offset or 0),
        )  # fmt: skip

    def _offset(self, line: int, column: int) -> int:
        start, text = self._lines[line - 1]
        return start + len(text.encode()[:column].decode())


def words_of(text: str, given: Mapping[str, Given]) -> Iterator[Place]:
    """Yield the places of the overrides and arguments of a command, such as `model.x=4`."""
    lines = {number: (start, line) for number, start, line in _lines_of(text)}
    for place in given.values():
        start, line = lines.get(place.line, (0, ""))
        match = re.search(_WORD.format(re.escape(place.written)), line)
        if match is not None:
            parents, _, leaf = place.written.rpartition(".")
            form: Form = "override" if match[2] == "=" and not match[1] else "argument"
            dashes = match[1] or ""
            yield Place(form=form, leaf=leaf, parents=f"{dashes}{parents}." if parents else dashes,
                        line=place.line, start=start + match.start(), value=start + match.start(3),
                        end=start + match.end())  # fmt: skip


def no_place(key: str, value: object) -> InputError:
    """Return the error for a key that the text lacks, and that has no place in it."""
    hint = f"write it by hand: {key} = {json.dumps(_plain(value))}"
    return InputError(f"{key} stands in no line of the file", hint)
