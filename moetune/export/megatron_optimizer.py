"""The optimizer as fields of Megatron-Core's `OptimizerConfig`, and the bytes that fields mean.

The precision-aware optimizer is Transformer Engine's `FusedAdam`. Its states may each have another
dtype. It computes in float32, and copies a state in another dtype for the step, unless both moments
are in bfloat16 (`fuse_unscale`) or the state is the remainder of a bfloat16 parameter.

Source: megatron/core/optimizer, `optimizer_config.py` (`__post_init__`), `distrib_optimizer.py`;
Transformer Engine, `pytorch/optimizers/fused_adam.py` (`step`, `get_unscaled_state`).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moetune.domain.optimizers import (
    MEGATRON_ADAM,
    OPTIMIZERS,
    Optimizer,
    optimizer_of,
    with_whole_master,
)
from moetune.export.keys import Setting, Value
from moetune.export.planned import Planned

_FULL = 4
_BYTES: Mapping[str, int] = MappingProxyType({"fp32": _FULL, "fp16": 2, "bf16": 2, "fp8": 1})
_MOMENTS = MappingProxyType({4: "bf16", 8: "fp32"})
STATE_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_KEYS: Mapping[str, Value] = MappingProxyType({
    "use_precision_aware_optimizer": False, "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32", "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32",
    "grad_reduce_in_bf16": False, "optimizer": "adam", "muon_tp_mode": "blockwise",
})  # fmt: skip
ONE_MOMENT = ("sgd", "lion")
"""Optimizers with one moment in float32; Megatron's SGD has momentum."""
_SCALED = (None, "delayed")
"""Values of `fp8_recipe` with which `FusedAdam` itself keeps the master copy."""


def given_optimizer(values: Mapping[str, Value]) -> Optimizer:
    """Return the optimizer that fields describe.

    Its name is that of a planned optimizer with the same bytes, or "adam" if there is none.
    """
    if values.get("optimizer") in ("muon", "dist_muon"):
        return optimizer_of("muon")
    optimizer = _states(values)
    is_narrow = bool(values.get("fp8"))
    for name in reversed(OPTIMIZERS):
        named = optimizer_of(name)
        effective = with_whole_master(named) if is_narrow else named
        if replace(effective, name="adam") == optimizer:
            return replace(optimizer, name=name)
    return optimizer


def _states(values: Mapping[str, Value]) -> Optimizer:
    """Return Adam with the bytes that fields mean."""
    said = {key: values.get(key, default) for key, default in _KEYS.items()}
    is_aware = said["use_precision_aware_optimizer"] and not values.get("optimizer_cpu_offload")
    grads, master, *moments = (str(said[key]) for key in STATE_DTYPES)
    narrow_grads = bool(said["grad_reduce_in_bf16"] or (is_aware and grads == "bf16"))
    gradient = 2 if narrow_grads else _FULL
    if not is_aware:
        return replace(
            MEGATRON_ADAM, gradient_bytes=gradient, step_bytes=_FULL if narrow_grads else 0,
            moment_bytes=_FULL if said["optimizer"] in ONE_MOMENT else 2 * _FULL,
        )  # fmt: skip
    is_outside = master == "fp32" and values.get("fp8_recipe") not in _SCALED
    is_whole = is_outside or (master == "fp32" and bool(values.get("fp16")))
    step = _FULL * (narrow_grads and (is_outside or grads == "fp32"))
    if set(moments) != {"bf16"}:
        step += _FULL * sum(dtype != "fp32" for dtype in moments)
    return replace(
        MEGATRON_ADAM, gradient_bytes=gradient, master_bytes=_FULL if is_whole else 2,
        moment_bytes=sum(_BYTES.get(dtype, _FULL) for dtype in moments),
        step_bytes=step + _FULL * (master == "fp16"), is_precision_aware=True,
    )  # fmt: skip


def _write(planned: Planned) -> tuple[Value, ...]:
    optimizer = optimizer_of(planned.job.optimizer)
    has_full_grads = optimizer.gradient_bytes == _FULL
    reduced = None if has_full_grads else True  # in two bytes, of float16 as well
    if not optimizer.is_precision_aware:
        is_aware = True if planned.layout.offload_optimizer else None
        muon = ("muon", "blockwise") if optimizer.is_muon else (None, None)
        return is_aware, None, None, None, None, reduced, *muon
    moments = _MOMENTS[round(optimizer.moment_bytes)]
    return True, "fp32" if has_full_grads else "bf16", "fp32", moments, moments, reduced, None, None


def _write_host(planned: Planned) -> tuple[Value, ...]:
    share = planned.layout.offload_optimizer
    return (True, share, True) if share else (None, None, None)


def _read_host(is_on_host: object, share: float | str, _: object) -> float:
    return float(share) if is_on_host else 0.0


OPTIMIZER = (
    Setting(
        name="optimizer", keys=_KEYS, write=_write,
        read=lambda *values: given_optimizer(dict(zip(_KEYS, values, strict=True))).name,
    ),
    Setting(
        name="offload_optimizer", write=_write_host, read=_read_host,
        keys={"optimizer_cpu_offload": False, "optimizer_offload_fraction": 1.0,
              "overlap_cpu_optimizer_d2h_h2d": False},
    ),
)  # fmt: skip
"""Settings of `OptimizerConfig`; dtypes as "fp32" and "bf16"."""
