"""Write the pages of the reference that follow from the code: the command line, the targets.

    python docs/hooks/reference.py

`docs/commands.md` has the help of each command as a terminal of 80 columns prints it.
The table of `docs/support.md` has the newest row of facts of each of `moetune.domain.targets`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from typer.main import get_command

from moetune.cli import app
from moetune.domain.targets import TARGETS, Target, find_target

DOCS = Path(__file__).resolve().parents[1]
_HEAD = """\
# The command line

Each command as `--help` prints it. `python docs/hooks/reference.py` writes this page, and a test
compares the two. [Scripts](scripts.md) has the documents of `--json` and the exit codes.
"""
_TABLE = re.compile(r"(?<=<!-- targets -->\n).*(?=<!-- end of targets -->)", re.DOTALL)


def pages() -> Mapping[str, str]:
    """Return the text of each generated page by its name in `docs/`."""
    return {"commands.md": _command_page(), "support.md": _support_page()}


def _command_page() -> str:
    return _HEAD + "".join(
        f"\n## moetune {name}\n\n```text\n{_help(name)}```\n" for name in _names()
    )


def _names() -> Iterator[str]:
    """Yield each command with its group: "plans list"."""
    whole = get_command(app.program())
    for word, command in getattr(whole, "commands", {}).items():
        inside = getattr(command, "commands", {})
        yield from (f"{word} {name}" for name in inside) if inside else (word,)


def _help(name: str) -> str:
    with redirect_stdout(StringIO()) as text, patch.dict("os.environ", COLUMNS="80"):
        app.main([*name.split(), "--help"])
    return text.getvalue()


def _support_page() -> str:
    targets = [find_target(name) for name in TARGETS]
    head = "".join(f" {target.name} |" for target in targets)
    table = f"| |{head}\n|---|{'---|' * len(targets)}\n"
    for feature, cells in _rows(targets):
        table += f"| {feature} |{''.join(f' {cell} |' for cell in cells)}\n"
    return _TABLE.sub(lambda _: table, (DOCS / "support.md").read_text(encoding="utf-8"))


def _rows(targets: list[Target]) -> Iterator[tuple[str, list[str]]]:
    """Yield the features with a cell for each target."""
    yield "newest version", [target.number or "moetune's" for target in targets]
    yield "`--tp`", [_tensor(target) for target in targets]
    for size in ("cp", "pp", "vpp", "etp"):
        yield f"`--{size}`", [_mark(target.largest.get(size) != 1) for target in targets]
    yield "`--schedule`", [_list(target.schedules) if _pipes(target) else "–" for target in targets]
    yield "`--zero`", [_list(target.zero) for target in targets]
    yield "… with pp", [f"up to {t.zero_with_pp}" if _pipes(t) else "–" for t in targets]
    yield "`--dispatcher`", [_list(target.dispatchers) for target in targets]
    yield "`--overlap`", [_list(target.overlaps) for target in targets]
    yield "`--recompute`", [_list(("none", *target.recompute)) for target in targets]
    yield "`--cuda-graphs`", [_list(target.cuda_graphs) for target in targets]
    yield "`--offload-activations`", [_mark(target.offloads_activations) for target in targets]
    yield "`--offload-optimizer`", [_offload(target) for target in targets]
    yield "`--dtype`", [_list(target.dtypes) for target in targets]
    yield "`--optimizer`", [_list(target.optimizers) for target in targets]
    yield "`--train lora`", [_adapters(target) for target in targets]
    yield "`--train qlora`", [_mark("nf4" in target.bases) for target in targets]
    yield "`--freeze`", [_mark(target.freezes) for target in targets]
    yield "`--expert-placement planned`", [_mark(target.places_experts) for target in targets]


def _pipes(target: Target) -> bool:
    return target.largest.get("pp") != 1


def _tensor(target: Target) -> str:
    return "yes" if len(target.tp_dispatchers) > 1 else f"with {target.tp_dispatchers[0]}"


def _offload(target: Target) -> str:
    return "all states" if target.offloads_states else _mark(target.offloads_optimizer)


def _adapters(target: Target) -> str:
    return f"experts {_list(target.adapters)}" if target.adapters else "–"


def _mark(is_there: bool) -> str:  # noqa: FBT001 - a cell
    return "yes" if is_there else "–"


def _list(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    for page, content in pages().items():
        (DOCS / page).write_text(content, encoding="utf-8")
