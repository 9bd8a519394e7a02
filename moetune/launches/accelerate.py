"""accelerate's YAML: the keys of FSDP, DeepSpeed and replicas, and what accelerate refuses.

Source: accelerate 1.15, `commands/launch.py`, `parallelism_config.py`, `utils/dataclasses.py`.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from moetune.domain.errors import InputError
from moetune.export.deepspeed import CONFIG
from moetune.export.keys import Setting, size
from moetune.export.transformers import DISTRIBUTED
from moetune.launches.keyed import (
    CHECKPOINTING,
    COMMAND,
    TRAINER,
    Dialect,
    SettingValues,
    hugging_face,
)
from moetune.launches.keyed_problems import engine_problems, priced_as_else, replica_problems
from moetune.launches.reading import Given, Problem

KIND = "distributed_type"
_SHARDED, _REPLICATED = "DEEPSPEED", "MULTI_GPU"
_COPIES, _SHARDS, _TENSOR, _CONTEXT, _SEQUENCE = (
    f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
)
_SOURCE = "accelerate/parallelism_config.py"
_FULLY_SHARD = 2
"""Version of FSDP that combines with other parallel sizes."""


def _arrange_shards(settings: SettingValues, values: Mapping[str, Any], ranks: int) -> None:
    if settings.pop("sequences") != (1, 1):
        raise InputError(
            f"{_CONTEXT} or {_SEQUENCE} is above 1, which is not priced for accelerate",
            "leave it at 1, or plan it:  moetune plan --target torchtitan --cp 2",
        )
    hugging_face(settings, values, ranks)


def _shard_problems(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    """Yield the values that accelerate refuses, and those priced as something else."""
    places = [given[key] for key in (_COPIES, _SHARDS, _TENSOR) if key in given]
    started = prod(place.value for place in places if isinstance(place.value, int))
    line, version = min((place.line for place in places), default=None), given.get("fsdp_version")
    if started not in (1, ranks):
        yield Problem(
            severity="stops", line=line, why=f"{_SOURCE}, _validate_accelerator",
            what=f"the sizes of parallelism_config make {started} ranks, and {ranks} are started",
            fix=f"another {_SHARDS}, or --num_processes {started}",
        )  # fmt: skip
    if started > 1 and (version is None or version.value != _FULLY_SHARD):
        yield Problem(
            severity="stops", line=line, why=f"{_SOURCE}, _validate_accelerator",
            what="parallelism_config needs FSDP2, and the file has FSDP1",
            fix="accelerate to-fsdp2 --config_file FILE --output_file fsdp2.yaml",
        )  # fmt: skip
    yield from priced_as_else(given, ranks)


FULLY_SHARDED = Dialect(
    target="transformers", arrange=_arrange_shards, problems=_shard_problems, unknown="note",
    groups={
        "parallelism_config": (
            size("tp", _TENSOR),
            Setting(
                name="dp", keys={_SHARDS: None, _COPIES: 1},
                write=lambda planned: (planned.layout.dp, 1),
                read=lambda shards, copies: None if shards is None else shards * copies,
            ),
            Setting(
                name="sequences", keys={_CONTEXT: 1, _SEQUENCE: 1}, read=lambda *sizes: sizes,
                write=lambda _: (None, None),
            ),
        ),
        "fsdp_config": (
            Setting(
                name="recompute", read=lambda *are_on: ("full",) if any(are_on) else (),
                keys={CHECKPOINTING: False, "gradient_checkpointing": False},
                write=lambda planned: ("full" in planned.layout.recompute, None),
            ),
        ),
        "DistributedConfig": DISTRIBUTED[2:],
        COMMAND: (*CONFIG[:2], *(row for row in TRAINER if row.name != "recompute")),
    },
)  # fmt: skip


def _arrange_engine(settings: SettingValues, values: Mapping[str, Any], ranks: int) -> None:
    if settings.pop("engine") != _SHARDED:
        settings["zero"] = 0
    hugging_face(settings, values, ranks)


def _engine_problems(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    has_engine = given[KIND].value == _SHARDED
    return (engine_problems if has_engine else replica_problems)(given, ranks)


ENGINE = Dialect(
    target="deepspeed", arrange=_arrange_engine, problems=_engine_problems, unknown="note",
    groups={
        "": (Setting(
            name="engine", keys={KIND: None}, read=lambda kind: kind,
            write=lambda planned: (_SHARDED if planned.layout.zero else _REPLICATED,),
        ),),
        "deepspeed_config": (
            Setting(
                name="zero", keys={"zero_stage": 2}, read=lambda stage: stage,
                write=lambda planned: (planned.layout.zero or None,),
            ),
            CONFIG[1],
        ),
        "deepspeed_config_file": CONFIG[3:],
        COMMAND: (CONFIG[0], *TRAINER),
    },
)  # fmt: skip
"""DeepSpeed, or replicas without an engine."""


def dialect_of(kind: str) -> Dialect:
    """Return the dialect of a file by its `distributed_type`.

    Raises:
        InputError: the file is for an engine that is not read.
    """
    if kind == "MEGATRON_LM":
        raise InputError(
            f"{KIND} {kind}: accelerate's keys of Megatron are not read",
            "check the script with Megatron's arguments",
        )
    return FULLY_SHARDED if kind == "FSDP" else ENGINE
