"""Waits taken out of the runtime one at a time: does the test kit notice every one?

    python -m benchmarks.cuda_waits            # every site, and the results page
    python -m benchmarks.cuda_waits stored.py  # the sites of files with that name first
    python -m benchmarks.cuda_waits --page     # the page of what is judged so far

A site is a wait for a stream, an event, a transfer or a thread; the record of an event; a stream
that work is put on; or the device of a stream that is asked for. Each is removed in a copy of the
tree, whose tests on fake GPUs (`tests/cuda_kit`) then run until the first failure. Verdicts are
kept, so a run that was broken off goes on with the rest; a site that has moved since, or that
nothing noticed, is judged again. Once all are judged, docs/results/cuda-waits.md is written.
"""

import argparse
import ast
import copy
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tree_tests import ROOT, copy_tree, first_failure

KEPT = ROOT / ".mutants-waits.jsonl"
RESULT = ROOT / "docs/results/cuda-waits.md"
PACKAGES = ("moetune/comm", "moetune/runtime")
TESTS = (
    ("tests/comm/test_gpu_*.py", "tests/runtime/test_gpu_*.py", "tests/workflows/test_gpu_*.py"),
    # Sums that a rank adds up itself are gloo's. Waits of chunks on a CPU start what a GPU has
    # begun by then: its streams need some less.
    (
        "tests/runtime/test_late_transfers.py",
        "tests/runtime/test_chunked_alone.py",
    ),
)
"""Tests of the kit, and for what they let through those that run on the CPU."""
FIRST = {
    "moe": "streams", "parallel": "parallel", "sharded": "chunks", "plans": "times",
    "runtime": "times",
}  # fmt: skip
"""Tests that most probably notice what is removed from a package."""
WAITS = frozenset({
    "wait", "wait_event", "wait_stream", "synchronize", "result",
    # moetune's own, which wait by those above
    "drain", "finish", "finish_gather", "finish_reduce", "finish_reductions", "finish_step",
    "make_readable", "make_writable",
    "wait_for", "wait_for_save", "wait_for_saves",
    "_end_last_gather", "_end_last_reduce", "_finish_wait", "_wait",
})  # fmt: skip
RECORDS = frozenset({"record", "record_event"})
ALSO = frozenset({("rings.py", "self._rotation.end")})
"""Waits with a name that elsewhere means something else."""
NOT_SITES = frozenset({
    # These build something, and return it.
    ("function.py", "phase.finish"), ("function.py", "phase.grads.finish"),
    ("repacking.py", "move.finish"),
    ("reuse.py", "self._tokens.finish"),
    # The host's own: threads that talk to a service, and the recorder for CPUs.
    ("client.py", "outcome.result"), ("reports.py", "self._changed.wait_for"),
    ("trace.py", "one.ended.wait"),
})  # fmt: skip
_NOTHING = ast.parse("(lambda *_: None)", mode="eval").body
_HANDED_ON = "({}, lambda *_: None)[1]"
"""What would be waited for, and in place of its wait nothing."""
_NEVER_RECORDED = ast.parse("torch.cuda.Event()", mode="eval").body
_NO_STREAM = ast.parse("torch.cuda.stream(None)", mode="eval").body


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place at which something is removed.

    Args:
        kind: "wait", "record", "stream" or "device".
        number: among the file's sites.
        text: what stands there.
    """

    path: str
    line: int
    kind: str
    number: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of it.

    Args:
        noticed_by: the first test that failed; empty if none did.
        how: the first line of its complaint.
    """

    site: Site
    noticed_by: str
    how: str


class _Remover(ast.NodeTransformer):
    """Finds the sites of a file in order, and removes the one whose number is given."""

    def __init__(self, path: str, number: int | None = None) -> None:
        self._path, self._number = path, number
        self.sites: list[Site] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _name(node.func)
        if isinstance(node.func, ast.Attribute):  # its own name is no site beside the call's
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(one) for one in node.args]
        node.keywords = [self.visit(one) for one in node.keywords]
        if self._is_wait(node, name):
            receiver = node.func.value if isinstance(node.func, ast.Attribute) else _NOTHING
            return self._removed("wait", node, receiver)
        if name in RECORDS:
            return self._removed("record", node, _NEVER_RECORDED)
        if name == "stream" and ast.unparse(node.func) == "torch.cuda.stream":
            return self._removed("stream", node, _NO_STREAM)
        if name == "current_stream" and node.args:
            anywhere = copy.deepcopy(node)
            anywhere.args = []
            return self._removed("device", node, anywhere)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.value = self.visit(node.value)
        is_handed_on = isinstance(node.ctx, ast.Load) and node.attr in {"wait", "synchronize"}
        without = _HANDED_ON.format(ast.unparse(node.value))
        unwaited = ast.parse(without, mode="eval").body
        return self._removed("wait", node, unwaited) if is_handed_on else node

    def _is_wait(self, node: ast.Call, name: str) -> bool:
        place = Path(self._path).name, ast.unparse(node.func)
        return place in ALSO or (name in WAITS and place not in NOT_SITES)

    def _removed(self, kind: str, node: ast.expr, instead: ast.expr) -> ast.AST:
        number = len(self.sites)
        text = ast.unparse(node)
        self.sites.append(
            Site(path=self._path, line=node.lineno, kind=kind, number=number, text=text)
        )
        return copy.deepcopy(instead) if number == self._number else node


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def sites_of(root: Path) -> Iterator[Site]:
    """Yield every site."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            remover = _Remover(str(path.relative_to(root)))
            remover.visit(ast.parse(path.read_text()))
            yield from remover.sites


def judge(site: Site, tree: Path) -> Verdict:
    """Remove it in the copy of the tree, run the tests, and put it back."""
    path = tree / site.path
    before = path.read_text()
    changed = _Remover(site.path, site.number).visit(ast.parse(before))
    path.write_text(ast.unparse(ast.fix_missing_locations(changed)))
    likely = FIRST.get(path.parent.name, "")
    try:
        failures = (first_failure(_tests(tree, one, likely), tree) for one in TESTS)
        failure = next((one for one in failures if one is not None), None)
    finally:
        path.write_text(before)
    if failure is None:
        return Verdict(site=site, noticed_by="", how="")
    return Verdict(site=site, noticed_by=failure.test, how=failure.complaint)


def _tests(tree: Path, patterns: Sequence[str], likely: str) -> list[str]:
    found = [file for pattern in patterns for file in sorted(tree.glob(pattern))]
    return [str(file) for file in sorted(found, key=lambda file: likely not in file.name)]


_PREFACE = """# Waits taken out

Would the test kit of fake GPUs notice a missing wait? `python -m benchmarks.cuda_waits` takes out
one wait for a stream, an event, a transfer or a thread at a time, or the record of an event, the
stream that work is put on, or the device whose stream is asked for, and runs the kit's tests until
the first one fails. What those let through, some tests on a CPU get to see: of chunks, and
of transfers that end only when they are waited for.

"""


def page(verdicts: Sequence[Verdict], left: Sequence[Site] = ()) -> str:
    """Return the results page.

    Args:
        left: sites that are not judged yet.
    """
    missed = sum(not one.noticed_by for one in verdicts)
    so = "all of which are noticed" if not missed else f"**{missed} of which are not noticed**"
    text = f"{_PREFACE}`moetune/comm` and `moetune/runtime` have {len(verdicts) + len(left)} sites"
    text += f", {so}.\n\n" if not left else f"; {len(verdicts)} are judged here, {so}.\n\n"
    if left:
        places = ", ".join(f"{one.path.removeprefix('moetune/')}:{one.line}" for one in left)
        text += f"**Not judged, or not noticed,** in their present form: {places}.\n\n"
    return f"{text}{table(verdicts)}\n"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return what was noticed, by kind and site by site, as Markdown."""
    lines = ["| removed | sites | noticed |", "|---|---:|---:|"]
    found = Counter(one.site.kind for one in verdicts)
    noticed = Counter(one.site.kind for one in verdicts if one.noticed_by)
    lines += [f"| {kind} | {found[kind]} | {noticed[kind]} |" for kind in sorted(found)]
    lines += ["", "| where | removed | noticed by |", "|---|---|---|"]
    for one in verdicts:
        where = f"{one.site.path.removeprefix('moetune/')}:{one.site.line}"
        text = " ".join(one.site.text.split())
        shown = text if len(text) <= 60 else text[:57] + "…"  # noqa: PLR2004 - a column's width
        removed = f"the device of `{shown}`" if one.site.kind == "device" else f"`{shown}`"
        file, _, test = one.noticed_by.rpartition("::")
        by = f"{test.partition('[')[0]}{'' if 'gpu' in file else ' (on a CPU)'}" or "**nothing**"
        by = by if one.noticed_by else "**nothing**"
        lines.append("| " + " | ".join((where, removed.replace("|", "\\|"), by)) + " |")
    return "\n".join(lines)


def verdicts_of(root: Path) -> dict[Site, Verdict]:
    """Return what is kept about sites that were noticed, and are where they were."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    kept = [Verdict(**{**one, "site": Site(**one["site"])}) for one in map(json.loads, lines)]
    there = set(sites_of(root))
    return {one.site: one for one in kept if one.site in there and one.noticed_by}


def _write_page(judged: Mapping[Site, Verdict], sites: Sequence[Site]) -> None:
    left = [site for site in sites if site not in judged]
    text = page([judged[site] for site in sites if site in judged], left)
    RESULT.write_text(text, encoding="utf-8")


def main() -> None:
    """Judge the sites that are not judged yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="names of files to begin with")
    parser.add_argument("--page", action="store_true", help="write the page of what is judged")
    arguments = parser.parse_args()
    first = arguments.files
    if arguments.page:
        _write_page(verdicts_of(ROOT), list(sites_of(ROOT)))
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        judged = verdicts_of(tree)
        sites = list(sites_of(tree))
        for site in sorted(sites, key=lambda one: Path(one.path).name not in first):
            if site in judged:
                continue
            judged[site] = last = judge(site, tree)
            with KEPT.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(asdict(last)) + "\n")
            print(f"{site.path}:{site.line} {site.kind} {site.text[:60]!r}")
            print(f"    {last.noticed_by or 'NOTHING'}: {last.how[:160]}", flush=True)
        _write_page(judged, sites)


if __name__ == "__main__":
    main()
