"""Rows of `layouts.csv` and `megatron_bridge.csv`, as jobs and layouts that the planner can price.

What a row does not say is filled in by the stated defaults of the system that it is from; what
cannot be priced is a `Skipped` with its reason.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.public_runs.decoders import decoder_named
from benchmarks.public_runs.memory_runs import MORE_ROWS, OUT_OF_MEMORY, RECIPES, Recipe
from benchmarks.public_runs.recipes import with_recipe
from benchmarks.public_runs.systems import MemoryScope, System, system_of
from moetune.domain.errors import MoetuneError
from moetune.domain.routing import BALANCED, NATURAL
from moetune.domain.rules import check_layout
from moetune.domain.targets import TargetName
from moetune.domain.training import (
    FoldedLayout,
    Overlap,
    Recompute,
    TokenDispatcher,
    TrainingDtype,
    TrainingJob,
    ZeroStage,
)

MACHINES = {
    "H100": "h100-x8", "H800": "h800-x8", "H200": "h200-x8", "A100": "a100-x8", "B200": "b200-x8",
    "B300": "b300-x8", "GB200": "gb200-nvl72", "GB300": "gb300-nvl72",
}  # fmt: skip
_MODULES: Mapping[str, tuple[Recompute, ...]] = {
    "none": (), "": (), "norm": ("norm",), "layernorm": ("norm",), "act": ("moe_act",),
    "moe_act": ("moe_act",), "full": ("full",), "core_attn": ("core_attn",), "mlp": ("mlp",),
    "mla_up_proj": ("mla_up_proj",), "moe": ("moe",), "up_proj": ("mla_up_proj",),
    "shared_expert": ("shared_experts",),
}  # fmt: skip


_GIGABYTE = 1e9
"""Of Megatron-Bridge's log, which has five digits and no GiB (`report_memory`)."""


_PLAIN = ("hybrid_ep", "no recomputation", "no overlap", "no CUDA graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """A printed peak of memory.

    Args:
        scope: what it counts.
        of_last_rank: whether it is the last pipeline rank's, not the fullest one's.
    """

    bytes: float
    scope: MemoryScope
    of_last_rank: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicRun:
    """One run.

    Args:
        set_name: of the runs that it is ranked with: one model, machine, batch and release.
        release: of the software, for the efficiency factor, with the machine.
        tokens: measured, a second and device; None where the source has no time.
        measured: peak of memory; None where the source has none.
        assumed: what the source does not say.
        ran_out: whether it ended in an out-of-memory error.
        device_bytes: of its device, where that is not the profile's.
        facts: of the target, where the run's are others than what moetune exports.
        document: that the source tells its runs in, as it names no version; "" where it does.
    """

    name: str
    set_name: str
    profile: str
    release: str
    job: TrainingJob
    layout: FoldedLayout
    tokens: float | None
    measured: MeasuredMemory | None
    routing: str
    assumed: tuple[str, ...] = ()
    target: TargetName = "megatron"
    ran_out: bool = False
    device_bytes: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    document: str = ""

    @property
    def source(self) -> str:
        """The source's name, without the release."""
        return self.set_name.split(",", maxsplit=1)[0]

    @property
    def speed(self) -> float:
        """Tokens a second and device of a run that has a time."""
        assert self.tokens is not None  # noqa: S101 - the caller chose such runs
        return self.tokens

    @property
    def seconds(self) -> float:
        """Measured step."""
        return self.job.tokens / self.job.world_size / self.speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that cannot be priced."""

    name: str
    reason: str


def read_runs(folder: Path) -> Iterator[PublicRun | Skipped]:
    """Yield the rows of both files."""
    with (folder / "layouts.csv").open() as file:
        for row in csv.DictReader(file):
            yield read_row(row["id"], row, _of_layouts)
    for more in MORE_ROWS:
        yield read_row(more["id"], more, _of_layouts)
    with (folder / "megatron_bridge.csv").open() as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            yield read_row(f"bridge:{number}", row, _of_bridge)


def read_failed() -> Iterator[PublicRun]:
    """Yield the runs that ended in an out-of-memory error; they have no time."""
    for row in OUT_OF_MEMORY:
        yield _of_layouts(row["id"], row)


def read_row(
    name: str, row: Mapping[str, str], read: Callable[[str, Mapping[str, str]], PublicRun]
) -> PublicRun | Skipped:
    """Return the run of a row, or why it cannot be priced."""
    try:
        run = read(name, row)
        check_layout(run.layout, run.job)
    except MoetuneError as error:
        return Skipped(name=name, reason=str(error))
    except (KeyError, ValueError, ZeroDivisionError) as error:
        return Skipped(name=name, reason=f"not said, or not known here: {error}")
    return run


def _of_layouts(name: str, row: Mapping[str, str]) -> PublicRun:
    assumed: list[str] = []
    recipe, system = RECIPES.get(name), system_of(row["framework"])
    decoder, length = decoder_named(row["model"]), int(row["seq"])
    tokens = _tokens(row, decoder.flops_per_token(length).total, length)
    if not row["gbs"]:
        assumed.append("global batch, from TFLOP/s and seconds")
    job = TrainingJob(
        decoder=decoder,
        world_size=int(row["gpus"]),
        global_batch=_global_batch(row, tokens, length),
        length=length,
        dtype=read_dtype(row["precision"]),
        routing=NATURAL if _is_natural(row, recipe) else BALANCED,
        optimizer=system.optimizer if recipe is None else recipe.optimizer,
    )
    etp = row["etp"]
    if not etp:
        assumed.append("etp 1")
    layout = _layout(
        job, tp=row["tp"], pp=row["pp"], vpp=row["vpp"], cp=row["cp"], ep=row["ep"], etp=etp,
        micro_batch=row["mbs"], dispatcher=_dispatcher(row, assumed),
        recompute=read_modules(row["recompute"]), overlap=_overlap(row["overlap"]),
        zero=3 if "FSDP" in row["note"] else system.zero,
    )  # fmt: skip
    profile = _machine(row["hardware"])
    if name.startswith("card") and row["routing"].startswith("forced"):
        layout, _ = with_recipe(layout, job, release="26.08", profile=profile)
    if recipe is not None:
        layout = _as_said(layout, recipe)
        assumed.append(f"recipe {recipe.source}")
    memory, ran_out = row["mem_gib"], row["step_s"] == "inf"
    source = re.split(r"[ @#]", row["source"])[0]
    return PublicRun(
        name=name, set_name=f"{source}, {row['model']}, {row['gpus']} {row['hardware']}, "
        f"{job.length} x {job.global_batch}, {row['routing'] or 'balanced'}",
        profile=profile, release=source, job=job, layout=layout, tokens=None if ran_out else tokens,
        measured=MeasuredMemory(bytes=float(memory) * _GIGABYTE, scope="allocated")
        if memory else None,
        routing=row["routing"], assumed=tuple(assumed), ran_out=ran_out,
        target=system.target, facts=_facts(system, recipe), document=row["source"].split("@")[0],
    )  # fmt: skip


def _facts(system: System, recipe: Recipe | None) -> Mapping[str, Any]:
    if recipe is None or recipe.fuses_activations:
        return system.facts
    return {**system.facts, "fuses_activations": False}


def _tokens(row: Mapping[str, str], flops_per_token: float, length: int) -> float:
    """Return the tokens a second and device: as printed, of the step, or of the TFLOP/s."""
    if row["tok_s_gpu"]:
        return float(row["tok_s_gpu"])
    if row["step_s"] and row["gbs"]:
        return int(row["gbs"]) * length / int(row["gpus"]) / float(row["step_s"])
    return float(row["tflops_gpu"]) * 1e12 / flops_per_token


def _global_batch(row: Mapping[str, str], tokens: float, length: int) -> int:
    """Return the sequences of a step; where they are not said, the power of two that fits."""
    if row["gbs"]:
        return int(row["gbs"])
    sequences = tokens * int(row["gpus"]) * float(row["step_s"]) / length
    return 1 << round(math.log2(sequences))


def _of_bridge(name: str, row: Mapping[str, str]) -> PublicRun:
    if row["model"] == "Nemotron_3_Ultra":
        raise ValueError("it offloads activations of modules, not of whole blocks")
    job = TrainingJob(
        decoder=decoder_named(row["model"]),
        world_size=int(row["#-GPUs"]),
        global_batch=int(row["GBS"]),
        length=int(row["Sequence Length"]),
        dtype=read_dtype(row["Precision"] or "fp8"),
        optimizer="adam-bf16-grads",
    )
    profile = _machine(row["system"].removeprefix("DGX-"))
    release = row["release"].split()[0]
    dropped = ("rows of a capacity factor of 1",) if "tokendrop" in row["model"] else ()
    plain = _layout(
        job, tp=row["TP"], pp=row["PP"], vpp=row["VP"], cp=row["CP"], ep=row["EP"], etp="",
        micro_batch=row["MBS"], dispatcher="hybrid_ep", recompute=(), overlap="none",
        zero=3 if row["FSDP"] not in ("", "0") else 1,
    )  # fmt: skip
    layout, has_recipe = with_recipe(plain, job, release=release, profile=profile)
    return PublicRun(
        name=name, set_name=f"Bridge {row['release']}, {row['model']}, {profile}",
        profile=profile, release=f"Bridge {row['release']}", job=job, layout=layout,
        tokens=float(_first(row["Tokens / sec / GPU"])), measured=None, routing="forced",
        target="bridge", facts=system_of("Megatron-Bridge").facts,
        assumed=(*dropped, *(() if has_recipe else _PLAIN)),
    )  # fmt: skip


def _layout(
    job: TrainingJob, *, tp: str, pp: str, vpp: str, cp: str, ep: str, etp: str, micro_batch: str,
    dispatcher: TokenDispatcher, recompute: tuple[Recompute, ...], overlap: Overlap,
    zero: ZeroStage,
) -> FoldedLayout:  # fmt: skip
    sizes = {"tp": _size(tp), "pp": _size(pp), "vpp": _size(vpp), "cp": _size(cp)}
    dp = job.world_size // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    return FoldedLayout(
        dp=dp, ep=_size(ep), etp=_size(etp), micro_batch=_size(micro_batch), dispatcher=dispatcher,
        recompute=recompute, overlap=overlap, zero=zero, **sizes,  # type: ignore[arg-type]
    )  # fmt: skip


def _is_natural(row: Mapping[str, str], recipe: Recipe | None) -> bool:
    said = row["routing"]  # a capacity factor of 1 drops what would be uneven
    is_uneven = said.startswith("natural") and not said.endswith("capacity 1.0")
    return is_uneven or (recipe is not None and recipe.is_natural)


def _as_said(layout: FoldedLayout, recipe: Recipe) -> FoldedLayout:
    said = {
        name: value
        for name in ("dispatcher", "overlap", "recompute", "vpp")
        if (value := getattr(recipe, name)) is not None
    }
    return replace(layout, **said)


def _first(text: str) -> str:
    """Return "4" of "4 (8)": in parentheses the oldest pages have another recipe of 8 bits."""
    return text.split(maxsplit=1)[0] if text else ""


def _size(text: str) -> int:
    return int(_first(text)) if text and text.lower() not in {"n/a", "-"} else 1


def _machine(text: str) -> str:
    name = MACHINES[text.split(maxsplit=1)[0]]
    return f"{name}-efa" if "EFA" in text.split() else name


def read_dtype(text: str) -> TrainingDtype:
    """Return the dtype of a row's word; tensorwise, current and blockwise scaling are "fp8"."""
    name = text.lower()
    known: Mapping[str, TrainingDtype] = {
        "bf16": "bfloat16", "mxfp8": "mxfp8", "fp8-mx": "mxfp8", "fp8": "fp8", "fp8-cs": "fp8",
        "nvfp4": "nvfp4", "fp8 (current scaling)": "fp8", "fp8 tensorwise": "fp8",
        "fp8 blockwise": "fp8", "mxfp8 both": "mxfp8",
    }  # fmt: skip
    return known[name]


def _dispatcher(row: Mapping[str, str], assumed: list[str]) -> TokenDispatcher:
    text = row["dispatcher"]
    if text == "deepep(uccl)":
        raise ValueError("UCCL's library is none of the dispatchers")
    if not text:
        dispatcher: TokenDispatcher = "all_to_all"
        if row["framework"] == "Megatron-Bridge" and int(row["ep"]) > 1:
            dispatcher = "hybrid_ep" if row["hardware"].startswith(("GB", "B")) else "deepep"
        assumed.append(dispatcher)
        return dispatcher
    if text.startswith("deep"):
        return "deepep"
    return {"alltoall": "all_to_all", "hybridep": "hybrid_ep", "allgather": "all_gather"}[text]  # type: ignore[return-value]


def _overlap(text: str) -> Overlap:
    return "none" if text in {"", "off"} else "batch"


def read_modules(text: str) -> tuple[Recompute, ...]:
    """Return the modules of a text, each once."""
    modules = (module for name in text.split(",") for module in _MODULES[name.strip()])
    return tuple(dict.fromkeys(modules))
