"""Programs that make a configuration: what they assign to attributes, and named arguments.

A program is read, and never run. Functions that it calls for a configuration to begin with are
read before it where they stand in the same file.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from operator import add, floordiv, mul, sub
from typing import Any, TypeAlias

from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or
from moetune.launches.entries import Entry, flat

_LAYOUT = re.compile(
    r"(parallel_size|parallel_degree|shard_degree|micro_batch_size|autoep_size|ep_size"
    r"|per_device_train_batch_size|tokens_per_microbatch_per_dp_rank)\b"
)
_RANKS = re.compile(r"_(\d+)gpu_")
_Functions: TypeAlias = Mapping[str, ast.FunctionDef]


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
        known = f"name one of them: {', '.join(makers)}" if makers else "give the file alone"
        raise InputError(
            f"{name} has no function {function!r}", nearest_or(known, function, makers)
        )
    if not function and len(makers) > 1:
        raise InputError(
            f"{name} has {len(makers)} functions that make a configuration",
            f"name one of them behind --: {', '.join(makers)}",
        )
    constants = dict(_constants(tree))
    parts = [tree] if not function else [
        *(node for node in tree.body if isinstance(node, ast.ImportFrom)),
        *_with_bases(functions[function], functions),
    ]  # fmt: skip
    return tuple(
        entry._replace(value=constants.get(str(entry.value), entry.value))
        for part in parts for entry in _given(part)
    )  # fmt: skip


def ranks_of(function: str) -> int | None:
    """Return the ranks in a recipe's name, such as 16 of "qwen3_30b_a3b_pretrain_16gpu_h100"."""
    match = _RANKS.search(function)
    return int(match[1]) if match else None


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names of the module with a plain value."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield from ((ast.unparse(target), node.value.value) for target in node.targets)


def _with_bases(
    function: ast.FunctionDef, functions: _Functions, seen: frozenset[str] = frozenset()
) -> Iterator[ast.FunctionDef]:
    """Yield a function behind those of the file whose results it goes on with."""
    for node in function.body:
        value = node.value if isinstance(node, ast.Assign | ast.Return) else None
        called = value.func if isinstance(value, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else ""
        if name in functions and name not in seen:
            yield from _with_bases(functions[name], functions, seen | {function.name})
    yield function


def _given(tree: ast.AST) -> Iterator[Entry]:
    """Yield what statements assign to attributes, and named arguments of what they call."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str() as module, names=names):
                for alias in names:
                    yield Entry(f"import.{alias.name}", module, node.lineno)
            case ast.Assign(targets=[target], value=value):
                yield from _assigned(_path(target), value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _assigned(_path(target), value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
                yield Entry(name, value=True, line=node.lineno)
            case ast.Return(value=ast.Call() as value):
                yield from _assigned("", value)
            case _:
                continue


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


def _assigned(path: str, value: ast.expr) -> Iterator[Entry]:
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute):  # Bridge.from_hf_pretrained(name).to_provider()
            yield from _assigned(path, value.func.value)
        yield Entry(path, ast.unparse(value.func), value.lineno)
        for number, argument in enumerate(value.args):
            yield from _assigned(f"{path}.{number}", argument)
        for word in value.keywords:
            if word.arg is not None:
                yield from _assigned(f"{path}.{word.arg}", word.value)
        return
    try:
        plain = _plain(value)
    except ValueError:
        yield Entry(path, ast.unparse(value), value.lineno)
        return
    if isinstance(plain, Mapping):
        for inner, item in flat(plain, path):
            yield Entry(inner, item, value.lineno)
    else:
        yield Entry(path, tuple(plain) if isinstance(plain, list) else plain, value.lineno)
