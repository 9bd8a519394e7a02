"""Keys and values of TOML, JSON and YAML configurations, each with its line."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moetune.domain.errors import InputError

_TOML_KEY = re.compile(r"\s*(?:\[+\s*([\w.\"'-]+)\s*\]+|([\w.\"'-]+)\s*=)")
_JSON_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:')
_YAML_LINE = re.compile(r"( *)(- )?(?:([\w.\"'/-]+)\s*:(?:\s+|$))?(.*)")


class Entry(NamedTuple):
    """A value of a configuration.

    Args:
        path: its keys, joined by dots.
        line: its line; 0 for an argument after `--`, and in a file that the launch names.
        file: the name of that file; "" for the launch itself.
    """

    path: str
    value: Any
    line: int
    file: str = ""


def entries_of(name: str, text: str) -> tuple[Entry, ...]:
    """Return the values of a configuration, whose name's ending gives its kind.

    Raises:
        InputError: the text is not of that kind, or has a key twice.
    """
    ending = name.rpartition(".")[2].lower()
    try:
        match ending:
            case "toml":
                return tuple(_with_lines(flat(tomllib.loads(text)), _toml_lines(text)))
            case "json":
                return tuple(_of_json(text))
            case _:
                return tuple(_of_yaml(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name} is no TOML: {error}", "mend that line") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is no JSON: {error}", "mend that line") from None


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of nested mappings, each with the path of its keys."""
    for key, value in values.items():
        path = f"{before}.{key}" if before else key
        if isinstance(value, Mapping):
            yield from flat(value, path)
        else:
            yield path, tuple(value) if isinstance(value, list) else value


def _with_lines(pairs: Iterator[tuple[str, Any]], lines: Mapping[str, int]) -> Iterator[Entry]:
    for path, value in pairs:
        yield Entry(path, value, lines.get(path, 1))


def _toml_lines(text: str) -> dict[str, int]:
    lines, section = {}, ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _TOML_KEY.match(line)
        if match and match[1]:
            section = match[1].replace('"', "")
        elif match:
            key = match[2].replace('"', "")
            lines[f"{section}.{key}" if section else key] = number
    return lines


def _of_json(text: str) -> Iterator[Entry]:
    """Yield the values with their lines: keys are visited in the order of the text."""
    lines = [text.count("\n", 0, match.start()) + 1 for match in _JSON_KEY.finditer(text)]
    numbers = iter(lines)

    def pairs(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        names = [name for name, _ in items]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f'key "{twice}" is given twice', "keep one of them")
        return items

    def walk(value: Any, path: str) -> Iterator[Entry]:  # noqa: ANN401 - of any kind
        is_object = isinstance(value, list) and all(isinstance(item, tuple) for item in value)
        if is_object and value:
            for key, inner in value:
                line = next(numbers)
                yield from _on_line(walk(inner, f"{path}.{key}" if path else key), line, inner)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item, path)
        else:
            yield Entry(path, value, 0)

    document = json.loads(text, object_pairs_hook=pairs)
    yield from walk(document, "")


def _on_line(entries: Iterator[Entry], line: int, value: object) -> Iterator[Entry]:
    """Yield entries with the line of their key; items of a list keep a line that they have."""
    for entry in entries:
        yield entry if isinstance(value, list) and entry.line else entry._replace(line=line)


def _of_yaml(text: str) -> Iterator[Entry]:
    """Yield the values of nested mappings with scalars and lists of scalars, launchers' YAML."""
    above: list[tuple[int, str]] = []
    seen: dict[str, int] = {}
    items: dict[str, tuple[list[Any], int]] = {}
    counts: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        plain = re.sub(r"(^|\s)#.*", "", line).rstrip()
        match = _YAML_LINE.fullmatch(plain)
        if not plain.strip() or plain.strip() in ("---", "..."):
            continue
        if match is None or "\t" in plain[: len(plain) - len(plain.lstrip())]:
            raise InputError(f"line {number} is no YAML that is read here", "write key: value")
        indent, key, rest = len(match[1]), match[3], match[4].strip()
        most = indent if match[2] else indent - 1  # items may begin where their key does
        above = [(depth, name) for depth, name in above if depth <= most]
        path = ".".join(name for _, name in above)
        if key is None:
            items.setdefault(path, ([], seen.get(path, number)))[0].append(_scalar(rest))
            continue
        if match[2]:
            above.append((indent + 1, str(counts[path])))
            counts[path] += 1
            indent += len(match[2])
        path = ".".join([*(name for _, name in above), key.strip("\"'")])
        if path in seen:
            raise InputError(f"line {number}: {path} is given twice", "keep one of them")
        seen[path] = number
        if rest:
            yield Entry(path, _scalar(rest), number)
        else:
            above.append((indent, key.strip("\"'")))
    for path, (values, number) in items.items():
        yield Entry(path, tuple(values), number)


def _scalar(text: str) -> Any:  # noqa: ANN401 - of any kind
    """Return the value of a YAML scalar, or of a list in brackets."""
    if text.startswith("[") and text.endswith("]"):
        return tuple(_scalar(part.strip()) for part in text[1:-1].split(",") if part.strip())
    if text[:1] in "\"'" and text[-1:] == text[:1]:
        return text[1:-1]
    words: Mapping[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
