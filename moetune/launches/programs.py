"""Reader of programs that make a configuration: assigned attributes, and named arguments.

A program is read, and never run. A function that it calls to make the initial configuration is
read before it, if the same file has it.
"""

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or
from moetune.launches.entries import Entry, flat

_LAYOUT = re.compile(
    r"(parallel_size|parallel_degree|shard_degree|micro_batch_size|autoep_size|ep_size"
    r"|per_device_train_batch_size|tokens_per_microbatch_per_dp_rank)\b"
)
_SIZE = re.compile(rf"{_LAYOUT.pattern}|(global_batch_size|seq_length|seq_len)$")
_RANKS = re.compile(r"_(\d+)gpu_")
BRANCH = "branch"
"""Path of an entry for a test without a value, whose branches are all read."""
_ENVIRONMENT = "os.environ"
_ASKING = frozenset({"os.environ.get", "os.getenv"})
"""Functions that read an environment variable, given its name and its default."""
_KINDS: Mapping[str, type] = {"int": int, "float": float, "str": str}
_OPERATORS = {
    ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_COMPARISONS: Mapping[type, Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.Lt: operator.lt,
    ast.GtE: operator.ge, ast.LtE: operator.le, ast.In: lambda item, items: item in items,
}  # fmt: skip
_Bindings: TypeAlias = Mapping[str, Any]


def program_entries(
    name: str, text: str, function: str = "", environment: Mapping[str, str] | None = None
) -> tuple[Entry, ...]:
    """Return the values that a program sets.

    Args:
        function: the function that makes the configuration; "" if at most a single function does.
        environment: variables that it reads; others have the defaults that the program gives.

    Raises:
        InputError: the text is no Python, has no such function, or has several that make a
            configuration and none is named.
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
    constants: dict[str, Any] = {_ENVIRONMENT: environment or {}}
    for key, node in _constants(tree):
        with contextlib.suppress(KeyError, ValueError, TypeError):
            value = _plain(node, constants)
            if value is None or isinstance(value, int | float | str):
                constants[key] = value
    reader = _Reader(functions, constants)
    if not function:
        return tuple(_with_referred(reader.of_body(tree.body, reader.constants)))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    made = reader.of_function(functions[function], {})
    return (*reader.of_body(imports, reader.constants), *_with_referred(made))


def _with_referred(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries; a value that names an earlier path is replaced by that path's value."""
    values: dict[str, Any] = {}
    for entry in entries:
        referred = (
            entry.value.partition(".")[2] or entry.value if isinstance(entry.value, str) else ""
        )
        values[entry.path] = values.get(referred, entry.value) if referred else entry.value
        yield entry._replace(value=values[entry.path])


def ranks_of(function: str) -> int | None:
    """Return the ranks in a recipe's name, such as 16 of "qwen3_30b_a3b_pretrain_16gpu_h100"."""
    match = _RANKS.search(function)
    return int(match[1]) if match else None


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that the module assigns, with the assigned expressions."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from (
                    (target.id, value) for target in targets if isinstance(target, ast.Name)
                )
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
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
        """Yield the values that a function sets, with defaults for arguments that are missing."""
        arguments = function.args
        named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
        usual = dict(zip((argument.arg for argument in named), arguments.defaults, strict=True))
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        usual |= {argument.arg: value for argument, value in keywords if value is not None}
        bindings = dict(self.constants)
        bindings |= _values(usual, self.constants)
        yield from self.of_body(function.body, {**bindings, **passed}, seen | {function.name})

    def of_body(
        self, body: Iterable[ast.stmt], bindings: _Bindings, seen: frozenset[str] = frozenset()
    ) -> Iterator[Entry]:
        """Yield values that statements assign to attributes, and named arguments of their calls."""
        for node in body:
            bindings = _bound(node, bindings)
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
                case ast.If():
                    yield from self._of_branch(node, bindings, seen)
                case _:
                    for part in ("body", "orelse", "finalbody"):
                        yield from self.of_body(getattr(node, part, ()), bindings, seen)

    def _of_branch(
        self, node: ast.If, bindings: _Bindings, seen: frozenset[str]
    ) -> Iterator[Entry]:
        """Yield the values of the branch that is taken, or of both if the test has no value."""
        test, text = _value(node.test, bindings), ast.unparse(node.test)
        if test != text or text.startswith("hasattr("):
            yield from self.of_body(node.body if test else node.orelse, bindings, seen)
            return
        if any(map(_is_changed, ast.walk(node))):
            yield Entry(BRANCH, text, node.lineno)
        yield from self.of_body((*node.body, *node.orelse), bindings, seen)

    def _of_value(
        self, path: str, node: ast.expr, bindings: _Bindings, seen: frozenset[str]
    ) -> Iterator[Entry]:
        if isinstance(node, ast.Call):
            value = _value(node, bindings)
            if value == ast.unparse(node):
                yield from self._of_call(path, node, bindings, seen)
            else:
                yield Entry(path, value, node.lineno)
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
            passed = _values({str(word.arg): word.value for word in words}, bindings)
            yield from self.of_function(self.functions[name], passed, seen)
        elif isinstance(node.func, ast.Attribute):  # Bridge.from_hf_pretrained(name).to_provider()
            yield from self._of_value(path, node.func.value, bindings, seen)
        yield Entry(path, ast.unparse(node) if _SIZE.search(path) else name, node.lineno)
        for number, argument in enumerate(node.args):
            yield from self._of_value(f"{path}.{number}", argument, bindings, seen)
        for word in words:
            yield from self._of_value(f"{path}.{word.arg}", word.value, bindings, seen)


def _bound(node: ast.stmt, bindings: _Bindings) -> _Bindings:
    """Return the bindings after a statement, without the names that branches or loops assign."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            result = _value(value, bindings)
            is_plain = result != ast.unparse(value) and not isinstance(
                result, Mapping | list | tuple
            )
            return {**bindings, name: result} if is_plain else _without({name}, bindings)
        case ast.If() | ast.For() | ast.While() | ast.Try():
            names = (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)
                     and isinstance(inner.ctx, ast.Store))  # fmt: skip
            return _without({*names}, bindings)
        case _:
            return bindings


def _values(nodes: Mapping[str, ast.expr], bindings: _Bindings) -> dict[str, Any]:
    """Return the values of expressions, or their texts; leave out calls, which are not run."""
    values = {name: _value(node, bindings) for name, node in nodes.items()}
    return {
        name: value for name, value in values.items()
        if value != ast.unparse(nodes[name])
        or not any(isinstance(inner, ast.Call) for inner in ast.walk(nodes[name]))
    }  # fmt: skip


def _is_changed(node: ast.AST) -> bool:
    """Return whether an attribute is assigned."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _without(names: Collection[str], bindings: _Bindings) -> _Bindings:
    return {name: value for name, value in bindings.items() if name not in names}


def _value(node: ast.expr, bindings: _Bindings) -> Any:  # noqa: ANN401 - of any kind
    """Return the plain value of an expression, or its text."""
    try:
        return _plain(node, bindings)
    except (KeyError, ValueError, TypeError):
        return ast.unparse(node)


def _plain(node: ast.expr, bindings: _Bindings) -> Any:  # noqa: ANN401 - of any kind
    """Return the value of a literal, a bound name, a known call, a comparison or arithmetic.

    Raises:
        KeyError: a name is not bound.
        ValueError: the expression is none of these.
    """
    match node:
        case ast.Name(id=name):
            return bindings[name]
        case ast.Call(keywords=[]):
            return _called(node, bindings)
        case ast.Compare() | ast.BoolOp():
            return _truth(node, bindings)
        case ast.BinOp(left=first, op=sign, right=second) if type(sign) in _OPERATORS:
            left, right = _plain(first, bindings), _plain(second, bindings)
            if not isinstance(left, int) or not isinstance(right, int) or not right:
                raise ValueError(ast.unparse(node))
            return _OPERATORS[type(sign)](left, right)
        case _:
            return ast.literal_eval(node)


def _called(node: ast.Call, bindings: _Bindings) -> Any:  # noqa: ANN401 - of any kind
    """Return an environment variable's value, or the result of converting a plain value."""
    match node:
        case ast.Call(func=ast.Name(id="int" | "float" | "str" as kind), args=[inner]):
            return _KINDS[kind](_plain(inner, bindings))
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip" as name), args=[]):
            return getattr(str(_plain(inner, bindings)), name)()
        case ast.Call(func=function, args=[ast.Constant(value=key), *usual]) if (
            ast.unparse(function) in _ASKING
        ):
            default = _plain(usual[0], bindings) if usual else None
            return bindings[_ENVIRONMENT].get(key, default)
        case _:
            raise ValueError(ast.unparse(node))


def _truth(node: ast.Compare | ast.BoolOp, bindings: _Bindings) -> bool:
    """Return whether a comparison holds, or comparisons joined by `and` or `or`."""
    if isinstance(node, ast.BoolOp):
        holds = (bool(_plain(value, bindings)) for value in node.values)
        return all(holds) if isinstance(node.op, ast.And) else any(holds)
    compares = _COMPARISONS.get(type(node.ops[0]))
    if compares is None or len(node.ops) > 1:
        raise ValueError(ast.unparse(node))
    return bool(compares(_plain(node.left, bindings), _plain(node.comparators[0], bindings)))


def _path(target: ast.expr) -> str:
    """Return "training.seq_len" for `config.training.seq_len`, and a plain name as it is."""
    text = ast.unparse(target)
    return text.partition(".")[2] or text
