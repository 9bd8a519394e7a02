"""The parts of a model that a launch trains: adapters of ms-swift and of Megatron-Bridge.

Modules are Megatron-Core's: `linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`, and those of
latent attention. ms-swift has adapters of each expert (mcore-bridge, `tuners/lora.py`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError
from moetune.domain.tuning import AdaptedParts, Adapters, ExpertAdapters, ModelPart, Tuning
from moetune.export.megatron_tuning import (
    ATTENTION,
    DELTA,
    FFNS,
    FROZEN_NAMES,
    LATENT,
    ROUTED,
    attention_modules,
)
from moetune.launches.arguments import Argument, Launch
from moetune.launches.entries import Entry

_SWIFT_RANK = 8
_OF_MIXERS = {*ATTENTION, *LATENT, *DELTA}
_BRIDGE: Mapping[str, Any] = {
    "dim": 32, "target_modules": (*ATTENTION, *FFNS), "share_expert_adapters": True,
}  # fmt: skip
"""Defaults of `megatron/bridge/peft/lora.py`."""
_USUAL_LORA = ("default_peft_config", "lora")
"""Function of recipes that makes `LoRA`, and its argument."""
_UNPLANNED = ("normalize_moe_lora", "experts_shared_outer_loras", "exclude_modules")
_FROZEN = ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio",
           "trainable_parameters", "trainable_parameters_regex", "freeze_llm")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAdapters:
    """Adapters as a launch gives them.

    Args:
        modules: modules that the launch names; () for all linear modules.
        line: line that gives the adapters.
    """

    rank: int
    modules: tuple[str, ...]
    experts: ExpertAdapters
    line: int

    def of(self, decoder: Decoder) -> Tuning:
        """Return which parts of a model train.

        Raises:
            InputError: adapters on these modules are not planned.
        """
        targets = self._targets(decoder)
        experts: ExpertAdapters = "each" if targets == "attention" else self.experts
        return Tuning(adapters=Adapters(rank=self.rank, targets=targets, experts=experts))

    def _targets(self, decoder: Decoder) -> AdaptedParts:
        named = {*self.modules}
        if not named:
            return "all"
        attention, ffns = {*attention_modules(decoder)}, {*FFNS}
        if named - _OF_MIXERS in (ffns, {*ROUTED}):
            is_routed = named >= {*ROUTED} or not decoder.has_other_ffns
            if named >= attention and named >= ffns:
                return "all"
            if is_routed and not named & attention:
                return "experts"
        elif named >= attention and named <= _OF_MIXERS:
            return "attention"
        raise InputError(
            f"line {self.line}: adapters on {', '.join(self.modules)} are not planned",
            f"name {' '.join(attention_modules(decoder))}, or these with {' '.join(FFNS)}",
        )


def swift_adapters(launch: Launch) -> GivenAdapters | None:
    """Return the adapters of ms-swift's command; None if all parameters train.

    Raises:
        InputError: the command trains in another way, or freezes parameters by name.
    """
    given = {argument.name.replace("-", "_"): argument for argument in launch.arguments}
    kind = given.get("tuner_type") or given.get("train_type")  # its name before 4.0
    name = _texts(kind)[0] if kind is not None and _texts(kind) else "full"
    frozen = next((given[name] for name in _FROZEN if name in given), None)
    if frozen is not None and _texts(frozen) not in ([], ["false"], ["0"], ["0."]):
        raise InputError(
            f"line {frozen.line}: --{frozen.name} names parameters, which are not read",
            "plan it:  moetune plan --freeze router,embedding --target bridge",
        )
    if name == "full":
        return None
    line = kind.line if kind is not None else 0
    if name != "lora":
        what = f"line {line}: --{kind.name if kind else ''} {name} is not planned"
        raise InputError(what, "use full or lora")
    rank, modules = given.get("lora_rank"), given.get("target_modules")
    names = tuple(_texts(modules)) if modules is not None else ()
    return GivenAdapters(
        rank=_rank(_texts(rank)[0] if rank is not None and _texts(rank) else _SWIFT_RANK, line),
        modules=() if names == ("all-linear",) else names, experts="each", line=line,
    )  # fmt: skip


def names_adapters(entries: Collection[Entry]) -> bool:
    """Return whether Megatron-Bridge's keys give the class of adapters, or rank and modules."""
    paths = {f".{entry.path}".partition(".peft")[2]: str(entry.value) for entry in entries
             if ".peft" in f".{entry.path}"}  # fmt: skip
    is_lora = paths.get("", "").endswith("LoRA") or (paths.get(""), paths.get(".0")) == _USUAL_LORA
    return is_lora or paths.keys() >= {".dim", ".target_modules"}


def bridge_adapters(entries: Collection[Entry]) -> GivenAdapters | None:
    """Return the adapters that Megatron-Bridge's keys give; None if all parameters train.

    Raises:
        InputError: the adapters are not `LoRA`, or have an option that is not planned.
    """
    if not names_adapters(entries):
        return None
    named: dict[str, Any] = {}
    line, kind = 0, ""
    for entry in entries:
        _, is_peft, rest = f".{entry.path}".partition(".peft")
        if not is_peft or entry.value is None:
            continue
        line = line or entry.line
        if not rest:
            kind = str(entry.value).rpartition(".")[2]
        named[rest.lstrip(".")] = entry.value
    unplanned = next((name for name in _UNPLANNED if named.get(name)), "")
    if kind not in ("", "LoRA", "lora", _USUAL_LORA[0]) or unplanned:
        what = f"line {line}: {unplanned or f'peft {kind}'} is not planned"
        raise InputError(what, "use LoRA with target_modules, dim and share_expert_adapters")
    values = {name: named.get(name, default) for name, default in _BRIDGE.items()}
    return GivenAdapters(
        rank=_rank(values["dim"], line), modules=tuple(values["target_modules"]), line=line,
        experts="shared" if values["share_expert_adapters"] else "each",
    )  # fmt: skip


def bridge_frozen(entries: Iterable[Entry]) -> tuple[ModelPart, ...]:
    """Return the parts that an exported program freezes by patterns of parameter names."""
    patterns = next((str(entry.value) for entry in entries if entry.path == "FROZEN"), "")
    return tuple(part for part, pattern in FROZEN_NAMES.items() if pattern in patterns)


def given_tuning(
    adapters: GivenAdapters | None, frozen: tuple[ModelPart, ...], decoder: Decoder
) -> Tuning:
    """Return what trains: the adapters, or else all parameters except those of frozen parts."""
    return Tuning(frozen=frozen) if adapters is None else adapters.of(decoder)


def _rank(value: object, line: int) -> int:
    if not str(value).isdecimal() or not int(str(value)):
        raise InputError(f"line {line}: the rank of the adapters is {value!r}", "give a number")
    return int(str(value))


def _texts(argument: Argument) -> list[str]:
    return [word.text for word in argument.values if not word.missing]
