"""Counts of Slurm: options of #SBATCH lines and of srun, and the variables that they set.

Source: the manual pages of sbatch and srun, Slurm 25.05.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from moetune.launches.expansion import Word

STEP_TASKS = "SLURM_STEP_NUM_TASKS"
"""Variable with the number of processes that srun starts; empty if nothing gives it."""
_NODES, _TASKS, _TASKS_PER_NODE, _GPUS = "nodes", "ntasks", "ntasks-per-node", "gpus-per-node"
_OPTIONS: Mapping[str, str] = {
    "-N": _NODES, "-n": _TASKS, "--gres": _GPUS,
    **{f"--{name}": name for name in (_NODES, _TASKS, _TASKS_PER_NODE, _GPUS)},
}  # fmt: skip
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    _NODES: ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    _TASKS: ("SLURM_NTASKS", "SLURM_NPROCS"),
    _TASKS_PER_NODE: ("SLURM_NTASKS_PER_NODE",),
    _GPUS: ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
_LINE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_COUNT = re.compile(r"(?:gpu:)?(?:[a-zA-Z][\w-]*:)?(\d+)(?:\(\w+:\d+\))?")
"""A number, after the type of a GPU as in gpu:h100:8."""
_PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|(?:ba)?sh|torchrun|accelerate)|.*\.(?:py|sh)")


def batch_variables(text: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return Slurm's variables by the #SBATCH lines of a script, without the given ones.

    The number of tasks is that of all nodes.
    """
    values: dict[str, str] = {}
    for line in _LINE.findall(text):
        words = [Word(word, 0) for word in line.partition(" #")[0].split()]
        for name, word in _options(words):
            values |= dict.fromkeys(_VARIABLES[name], word.text) if word.text.isdigit() else {}
    values |= given
    counts = [values.get(_VARIABLES[name][0], "") for name in (_NODES, _TASKS_PER_NODE)]
    if all(map(str.isdigit, counts)):
        tasks = str(int(counts[0]) * int(counts[1]))
        values = {**dict.fromkeys(_VARIABLES[_TASKS], tasks), **values}
    return {name: value for name, value in values.items() if name not in given}


def step_tasks(words: Sequence[Word], variable: Callable[[str], Word | None]) -> Word:
    """Return the number of processes that an srun command starts, as a word.

    Args:
        words: the command's words from srun on.
        variable: returns the value of a variable; None if it has none.
    """
    line, options = words[0].line, dict(_options(words))
    nodes = options.get(_NODES) or variable(_VARIABLES[_NODES][0])
    per_node = options.get(_TASKS_PER_NODE) or variable(_VARIABLES[_TASKS_PER_NODE][0])
    is_given = _NODES in options or _TASKS_PER_NODE in options
    tasks = options.get(_TASKS) or (None if is_given else variable(_VARIABLES[_TASKS][0]))
    if tasks is None and per_node is not None:
        nodes = nodes or Word("", line, f"${_VARIABLES[_NODES][0]}")
        missing = nodes.missing or per_node.missing
        counts = nodes.text, per_node.text
        are_numbers = not missing and all(map(str.isdigit, counts))
        text = str(int(counts[0]) * int(counts[1])) if are_numbers else " x ".join(counts)
        tasks = Word("" if missing else text, line, missing, per_node.file)
    return tasks or variable(_VARIABLES[_TASKS][0]) or Word("", line)


def _options(words: Sequence[Word]) -> Iterator[tuple[str, Word]]:
    """Yield the counts among words up to a program, each with the name of its option."""
    for number, word in enumerate(words):
        if _PROGRAM.fullmatch(word.text):
            return
        key, _, value = word.text.partition("=")
        if word.text[:2] in _OPTIONS and word.text[1] != "-":
            key, value = word.text[:2], word.text[2:].removeprefix("=")
        if key in _OPTIONS:
            is_next = not value and not word.missing and number + 1 < len(words)
            count = words[number + 1] if is_next else word._replace(text=value)
            match = _COUNT.fullmatch(count.text)
            yield _OPTIONS[key], count._replace(text=match[1]) if match else count
