"""Number formats of Megatron's weights, gradients and optimizer states, as a launch gives them."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from moetune.domain.optimizers import MEGATRON_ADAM, Optimizer
from moetune.domain.targets import Target
from moetune.export.keys import Value
from moetune.export.megatron_optimizer import STATE_DTYPES
from moetune.launches.entries import Entry
from moetune.launches.reading import Given, Problem

PRECISION = (
    "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "fp8_param",
    "fp4_param", "megatron_fsdp_main_grads_dtype", "megatron_fsdp_main_params_dtype",
)  # fmt: skip
"""Keys of number formats that are no settings of a plan."""
WEIGHTS: Mapping[str, tuple[str, Value]] = MappingProxyType({
    "fp8_param": ("fp8_param_gather", True), "fp4_param": ("fp4_param_gather", True),
})  # fmt: skip
"""Other names of keys, with the field and the value that they mean."""
_HALF: Mapping[str, Any] = MappingProxyType({"dispatchers": ("all_to_all", "all_gather")})
"""Dispatchers that Megatron runs in float16 (`domain/megatron_rules.py`), in any priced dtype."""
_DELAYED, _TENSORWISE = ("hybrid", "delayed", True), ("hybrid", "tensorwise", True)
_RECIPES: Mapping[str, tuple[str, str, bool]] = MappingProxyType({
    "fp8_delayed_scaling": _DELAYED, "fp8": _DELAYED, "mxfp8": ("e4m3", "mxfp8", True),
    "fp8_current_scaling": _TENSORWISE, "fp8_subchannel_scaling": ("hybrid", "blockwise", False),
})  # fmt: skip
_PREFIXES = ("bf16_with_", "fp16_with_", "nemotron_h_bf16_with_", "nanov2_bf16_with_",
             "nemotron_3_super_bf16_with_")  # fmt: skip


def recipe_values(entries: Iterable[Entry]) -> dict[str, Value]:
    """Return the fields that Megatron-Bridge's recipe of mixed precision sets.

    Source: `src/megatron/bridge/training/mixed_precision.py`, Megatron-Bridge 0.3 to 0.6; "fp8" is
    NeMo 2's name of delayed scaling.
    """
    values: dict[str, Value] = {"fp8_recipe": "tensorwise"}
    for entry in entries:
        name = str(entry.value).rpartition(".")[2].removesuffix("_mixed")
        if not name.startswith(_PREFIXES):
            continue
        kind = name.partition("_with_")[2]
        if kind == "nvfp4":
            values |= {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True}
        elif kind in _RECIPES:
            fp8, recipe, gathers = _RECIPES[kind]
            recipe = "blockwise" if name.startswith("nanov2") else recipe
            values |= {"fp8": fp8, "fp8_recipe": recipe, "fp8_param_gather": gathers}
    return values


def precision_facts(
    settings: Mapping[str, Any], values: Mapping[str, Value], target: Target, optimizer: Optimizer
) -> dict[str, Any]:
    """Return the facts of the target that number formats set."""
    has_fp8_weights = bool(values.get("fp8") and values.get("fp8_param_gather"))
    is_narrow = has_fp8_weights or bool(values.get("fp4") and values.get("fp4_param_gather"))
    return {
        "caches_narrow_weights": target.caches_narrow_weights and not is_narrow,
        **({"keeps_narrow_weights": True} if is_narrow else {}),
        **({"adam": optimizer} if optimizer.name == target.adam.name else {}),
        **(_HALF if settings["half"] else {}),
    }


def precision_problems(
    values: Mapping[str, Value], given: Mapping[str, Given], optimizer: Optimizer
) -> Iterator[Problem]:
    """Yield notes on states and weights whose formats no planned optimizer has."""
    places = [given[key] for key in STATE_DTYPES if key in given]
    if optimizer.name == "adam" and optimizer != MEGATRON_ADAM:
        states = f"{optimizer.master_bytes} + {optimizer.moment_bytes:g}"
        what = f"gradients take {optimizer.gradient_bytes} bytes a parameter, states {states}"
        if optimizer.step_bytes:
            what += f", and copies for the step {optimizer.step_bytes}"
        yield Problem(
            severity="note", line=places[0].shown if places else None, what=what,
            why="megatron/core/optimizer, and Transformer Engine's fused_adam.py",
        )  # fmt: skip
    for key in PRECISION[-2:]:
        if key in given and str(values[key]) not in ("auto", "fp32"):
            what = f"{given[key].written} {values[key]} is priced as fp32"
            yield Problem(severity="note", line=given[key].shown, what=what)
    fp8, is_set = values.get("fp8"), values.get("fp8_param_gather")
    if is_set and not fp8 and "fp8_param_gather" in given:
        place = given["fp8_param_gather"]
        yield Problem(severity="note", line=place.shown, fix="--fp8-format e4m3, or leave it out",
                      what=f"{place.written} does nothing without GEMMs in FP8")  # fmt: skip
