"""Models of public runs: the registry's by name, others by the sizes that their sources print.

`decoders.json` has the configurations of models that the registry does not have; an entry of the
registry goes first. A proxy is a model with fewer blocks: its first ones, as its source cuts it.
"""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from moetune.domain.architecture import Block, Decoder
from moetune.domain.experts import DenseFfn
from moetune.huggingface.reader import read_decoder
from moetune.huggingface.registry import named_model, resolve_name

_FILE = Path(__file__).parent / "decoders.json"
_NOISE = re.compile(r"\(.*?\)|\b(weak|proxy|hybrid|pretrain|full|sft)\b", re.IGNORECASE)
_CUT = re.compile(r"cut to (\d+) layers|, (\d+) layers$|\b(\d+) layers$")


def decoder_named(text: str, note: str = "") -> Decoder:
    """Return the model of a row, cut to the layers that it or its note says.

    Raises:
        ValueError: neither the registry nor `decoders.json` has it.
    """
    cut = _CUT.search(note) or _CUT.search(text)
    words = _NOISE.sub(" ", _CUT.sub("", text)).lower().replace("_", "-").split()
    name = "-".join(words).rstrip("-")
    decoder = _decoder(_written()["names"].get(name, name))
    if cut is None:
        return decoder
    return shortened(decoder, int(next(group for group in cut.groups() if group)))


def shortened(decoder: Decoder, num_layers: int) -> Decoder:
    """Return a decoder of the first blocks alone."""
    return replace(decoder, blocks=decoder.blocks[:num_layers])


@cache
def _decoder(name: str) -> Decoder:
    known = resolve_name(name)
    if known is not None:
        return named_model(known).decoder
    entry = _written()["configurations"].get(name)
    if entry is None:
        raise ValueError(f"there is no configuration of {name!r}")
    decoder = read_decoder(entry["config"], name=name, where=name)
    return _ungated(decoder) if entry.get("ungated") else decoder


def _ungated(decoder: Decoder) -> Decoder:
    """Return a decoder whose FFNs have two matrices: the family that is read has three."""
    return replace(decoder, blocks=tuple(_ungated_block(block) for block in decoder.blocks))


def _ungated_block(block: Block) -> Block:
    parts = tuple(
        replace(part, is_gated=False) if isinstance(part, DenseFfn) else part
        for part in block.parts
    )
    return replace(block, parts=parts)


@cache
def _written() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return models
