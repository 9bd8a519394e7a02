"""Files without code of runtimes that are not read, although some of their keys are known."""

from collections.abc import Iterable

from moetune.domain.errors import InputError
from moetune.launches.entries import Entry

BRIDGE_KEYS = frozenset(f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
"""Keys by which Megatron-Bridge's configurations are known."""
_OF_AXOLOTL = frozenset({"base_model", "micro_batch_size"})


def check_runtime(name: str, entries: Iterable[Entry]) -> None:
    """Raise InputError where a file is of axolotl, or names sizes in another section.

    Such are Primus, NeMo-RL, and NeMo 1, which has a section for its trainer.
    """
    paths = {entry.path: entry.line for entry in entries}
    if paths.keys() >= _OF_AXOLOTL:
        raise InputError(
            f"{name} is axolotl's, whose keys are not read",
            "plan it:  moetune plan --target transformers --train qlora:rank=16",
        )
    sections = {path.rpartition(".")[0] for path in paths}
    for path, line in paths.items():
        section, _, leaf = path.rpartition(".")
        is_foreign = section not in ("", "model") or "trainer" in sections
        if leaf in BRIDGE_KEYS and is_foreign:
            raise InputError(
                f"line {line}: {path} is of a runtime whose files are not read",
                "give the script with Megatron's arguments that it becomes, or plan its sizes:  "
                "moetune plan --tp 2 --pp 4",
            )
