"""How programs load a model of transformers: its name, and what its class needs beside it."""

from collections.abc import Iterator

from moetune.export.planned import Planned

_IN_FOUR_BITS = frozenset({"gpt_oss"})
"""Families whose published weights are MXFP4, which only a dequantized copy trains."""
_DIVIDES_BY_GROUPS = frozenset({"beam", "deepseek_v3", "dots1"})
"""Families whose configuration may leave `n_group` null, by which their router divides
(`transformers/models/dots1/modeling_dots1.py`, Dots1TopkRouter)."""


def load_imports(planned: Planned) -> str:
    """Return the names of transformers that `load_arguments` needs, "" for none."""
    return "Mxfp4Config, " if planned.decoder.family in _IN_FOUR_BITS else ""


def load_arguments(planned: Planned) -> str:
    """Return the lines of `from_pretrained`'s arguments that the model's class needs."""
    return "".join(f"        {line}\n" for line in _arguments(planned))


def _arguments(planned: Planned) -> Iterator[str]:
    family, config = planned.decoder.family, planned.config
    if family in _IN_FOUR_BITS:
        yield "quantization_config=Mxfp4Config(dequantize=True),"
    if family in _DIVIDES_BY_GROUPS and config.get("n_group", 1) is None:
        yield "# The router divides by n_group, which is null: one group of all experts is none."
        yield "n_group=1,"
        yield "topk_group=1,"
