"""Programs that make a configuration: what they assign to attributes, and named arguments.

A program is read, and never run. Functions that it calls for a configuration to begin with are
read before it where they stand in the same file.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import add, floordiv, mul, sub
from typing import Any, NamedTuple, TypeAlias

from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or
from moetune.launches.entries import Entry, flat

_LAYOUT = re.compile(
    r"(parallel_size|parallel_degree|shard_degree|micro_batch_size|autoep_size|ep_size"
    r"|per_device_train_batch_size|tokens_per_microbatch_per_dp_rank)\b"
)
_RANKS = re.compile(r"_(\d+)gpu_")
_Bindings: TypeAlias = Mapping[str, Any]


def program_entries(name: str, text: str, function: str = "") -> tuple[Entry, ...]:
    """Return the values that a program gives.

    Args:
        function: that makes the configuration; "" where there is one at most.

    Raises:
        InputError: the text is no Python, has no such function, or several make a configuration
            and none is named.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{name} is no Python: {error}", "mend that line") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    makers = [key for key, node in functions.items()
              if not key.startswith("_") and _LAYOUT.search(ast.unparse(node))]  # fmt: skip
    if function and function not in functions:
        hint = f"name one of them: {', '.join(makers)}" if makers else "give the file alone"
        raise InputError(f"{name} has no function {function!r}", nearest_or(hint, function, makers))
    if not function and len(makers) > 1:
        raise InputError(
            f"{name} has {len(makers)} functions that make a configuration",
            f"name one of them behind --: {', '.join(makers)}",
        )
    reader = _Reader(functions, dict(_constants(tree)))
    if not function:
        return tuple(_with_referred(reader.of_body(tree.body, reader.constants)))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    made = reader.of_function(functions[function], {})
    return (*reader.of_body(imports, reader.constants), *_with_referred(made))


def _with_referred(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries, with the value of an earlier path where one refers to it."""
    values: dict[str, Any] = {}
    for entry in entries:
        referred = entry.value.partition(".")[2] if isinstance(entry.value, str) else ""
        values[entry.path] = values.get(referred, entry.value) if referred else entry.value
        yield entry._replace(value=values[entry.path])


def ranks_of(function: str) -> int | None:
    """Return the ranks in a recipe's name, such as 16 of "qwen3_30b_a3b_pretrain_16gpu_h100"."""
    match = _RANKS.search(function)
    return int(match[1]) if match else None


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names of the module with a plain value."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets, value=ast.Constant(value=value)):
                yield from ((ast.unparse(target), value) for target in targets)
            case ast.AnnAssign(target=target, value=ast.Constant(value=value)):
                yield ast.unparse(target), value
            case _:
                pass


class _Reader(NamedTuple):
    """Reader of statements.

    Args:
        constants: plain values of the module, by name.
    """

    functions: Mapping[str, ast.FunctionDef]
    constants: _Bindings

    def of_function(
        self, function: ast.FunctionDef, passed: _Bindings, seen: frozenset[str] = frozenset()
    ) -> Iterator[Entry]:
        """Yield what a function gives, with the usual values of arguments that are not passed."""
        arguments = function.args
        named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
        usual = dict(zip((argument.arg for argument in named), arguments.defaults, strict=True))
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        usual |= {argument.arg: value for argument, value in keywords if value is not None}
        bindings = dict(self.constants)
        bindings |= {key: _value(node, self.constants) for key, node in usual.items()}
        yield from self.of_body(function.body, {**bindings, **passed}, seen | {function.name})

    def of_body(
        self, body: Iterable[ast.stmt], bindings: _Bindings, seen: frozenset[str] = frozenset()
    ) -> Iterator[Entry]:
        """Yield what statements assign to attributes, and named arguments of what they call."""
        for node in body:
            match node:
                case ast.ImportFrom(module=str() as module, names=names):
                    for alias in names:
                        yield Entry(f"import.{alias.name}", module, node.lineno)
                case ast.Assign(targets=[target], value=value):
                    yield from self._of_value(_path(target), value, bindings, seen)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    yield from self._of_value(_path(target), value, bindings, seen)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
                    yield Entry(name, value=True, line=node.lineno)
                case ast.Return(value=ast.Call() as value):
                    yield from self._of_value("", value, bindings, seen)
                case ast.If(test=test) if _value(test, bindings) in (False, None):
                    yield from self.of_body(node.orelse, bindings, seen)
                case _:
                    for part in ("body", "orelse", "finalbody"):
                        yield from self.of_body(getattr(node, part, ()), bindings, seen)

    def _of_value(
        self, path: str, node: ast.expr, bindings: _Bindings, seen: frozenset[str]
    ) -> Iterator[Entry]:
        if isinstance(node, ast.Call):
            yield from self._of_call(path, node, bindings, seen)
            return
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            for key, inner in zip(node.keys, node.values, strict=True):
                name = str(key.value) if isinstance(key, ast.Constant) else ""
                yield from self._of_value(f"{path}.{name}" if path else name, inner, bindings, seen)
            return
        value = _value(node, bindings)
        if isinstance(value, Mapping):
            yield from (Entry(inner, item, node.lineno) for inner, item in flat(value, path))
        else:
            yield Entry(path, tuple(value) if isinstance(value, list) else value, node.lineno)

    def _of_call(
        self, path: str, node: ast.Call, bindings: _Bindings, seen: frozenset[str]
    ) -> Iterator[Entry]:
        name, words = ast.unparse(node.func), [word for word in node.keywords if word.arg]
        if name in self.functions and name not in seen:
            passed = {str(word.arg): _value(word.value, bindings) for word in words}
            yield from self.of_function(self.functions[name], passed, seen)
        elif isinstance(node.func, ast.Attribute):  # Bridge.from_hf_pretrained(name).to_provider()
            yield from self._of_value(path, node.func.value, bindings, seen)
        yield Entry(path, name, node.lineno)
        for number, argument in enumerate(node.args):
            yield from self._of_value(f"{path}.{number}", argument, bindings, seen)
        for word in words:
            yield from self._of_value(f"{path}.{word.arg}", word.value, bindings, seen)


def _value(node: ast.expr, bindings: _Bindings) -> Any:  # noqa: ANN401 - of any kind
    """Return the plain value of an expression, or its text."""
    try:
        return bindings[node.id] if isinstance(node, ast.Name) else _plain(node)
    except (KeyError, ValueError):
        return ast.unparse(node)


def _plain(node: ast.expr) -> Any:  # noqa: ANN401 - of any kind
    """Return a literal, or the product, sum or difference of whole numbers.

    Raises:
        ValueError: it is none.
    """
    operators = {ast.Mult: mul, ast.Add: add, ast.Sub: sub, ast.FloorDiv: floordiv}
    if not isinstance(node, ast.BinOp) or type(node.op) not in operators:
        return ast.literal_eval(node)
    left, right = _plain(node.left), _plain(node.right)
    if not isinstance(left, int) or not isinstance(right, int) or not right:
        raise ValueError(ast.unparse(node))
    return operators[type(node.op)](left, right)


def _path(target: ast.expr) -> str:
    """Return "training.seq_len" of `config.training.seq_len`, and a plain name as it is."""
    text = ast.unparse(target)
    return text.partition(".")[2] or text
