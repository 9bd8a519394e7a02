"""Layouts of the golden cases' models, drawn for a runtime, and what export writes of them."""

import functools
import random
from collections.abc import Iterator
from typing import Any

from moetune.domain.rules import broken_rules
from moetune.domain.target_rules import model_rules, target_rules
from moetune.domain.targets import Target, find_target
from moetune.domain.training import FoldedLayout, TrainingDtype, TrainingJob
from moetune.domain.tuning import TRAINS_ALL, Tuning, read_tuning
from moetune.export import export_layout
from moetune.export.planned import Planned
from moetune.huggingface.reader import language_model
from moetune.huggingface.registry import named_model as read_model
from tests.golden.cases import CASES

SIZES: dict[str, tuple[int, ...]] = {
    "tp": (1, 2, 4, 8), "cp": (1, 2), "pp": (1, 2, 4), "vpp": (1, 2, 3), "ep": (1, 2, 4, 8),
    "etp": (1, 2), "micro_batch": (1, 2), "dp": (1, 2, 4, 8),
}  # fmt: skip
named_model = functools.cache(read_model)
"""Reading a model anew is half of a draw; for Bridge 200 are refused for each that is not."""
NUM_FROZEN = 4
"""Types of Megatron but float16, of which no layout is frozen."""
MODULES = (("moe_act", "norm"), ("core_attn", "mlp"))


@functools.cache
def models() -> tuple[str, ...]:
    """Return the registry's models of the golden cases."""
    words = (case.plan for case in CASES.values() if "--global-batch" in case.plan)
    names = {plan[plan.index("--model") + 1] for plan in words if "--model" in plan}
    return tuple(sorted(names))


def choices(target: Target) -> dict[str, tuple[Any, ...]]:
    """Return values that the runtime's row of facts has, for each part of a layout."""
    sizes = {
        name: tuple(size for size in sizes if size <= target.largest.get(name, size))
        for name, sizes in SIZES.items()
    }
    lists = [names for names in MODULES if {*names} <= {*target.recompute}]
    return {
        **sizes,
        "zero": target.zero, "dispatcher": target.dispatchers, "overlap": target.overlaps,
        "recompute": ((), *((name,) for name in target.recompute), *lists),
        "cuda_graphs": target.cuda_graphs[:2], "schedule": (None, *target.schedules),
        "offload_activations": (0.0, 0.25) if target.offloads_activations else (0.0,),
        "offload_optimizer": (0.0, 0.5) if target.offloads_optimizer else (0.0,),
    }  # fmt: skip


def tunings(target: Target) -> tuple[Tuning, ...]:
    """Return what may train, of runtimes whose adapters are read back."""
    texts = ("lora:rank=8,targets=attention", "lora:rank=4", "lora:rank=4,targets=experts")
    able = (read_tuning(text, None, experts=kind) for text in texts for kind in target.adapters)
    frozen = read_tuning(None, "router,norms", experts="each")
    return (TRAINS_ALL, frozen, *able) if target.name == "bridge" else (TRAINS_ALL,)


def drawn(
    target_name: str, count: int, seed: int = 7, dtypes: tuple[TrainingDtype, ...] = ()
) -> Iterator[tuple[Planned, str]]:
    """Yield plans that the runtime runs, each with its export."""
    for planned in plans(target_name, count, seed, dtypes):
        yield planned, export_layout(planned).text


def plans(
    target_name: str, count: int, seed: int, dtypes: tuple[TrainingDtype, ...] = ()
) -> Iterator[Planned]:
    """Yield plans that the runtime runs, in some types or those that the frozen ones are in."""
    draw, target = random.Random(seed), find_target(target_name)
    dtypes = dtypes or target.dtypes[:NUM_FROZEN]
    able = choices(target)
    while count:
        model = named_model(draw.choice(models()))
        values = {name: draw.choice(options) for name, options in able.items()}
        values["vpp"] = values["vpp"] if values["pp"] > 1 else 1
        if values["ep"] == 1:  # nothing is exchanged
            values["dispatcher"] = "all_to_all"
        layout = FoldedLayout(**values)
        share = layout.offloaded_share(model.decoder)  # of whole blocks
        layout = layout.changed(offload_activations=share)
        job = TrainingJob(
            decoder=model.decoder, world_size=layout.world_size, global_batch=192, length=4096,
            optimizer=draw.choice(target.optimizers), dtype=draw.choice(dtypes),
            tuning=draw.choice(tunings(target)),
        )  # fmt: skip
        rules = (*broken_rules(layout, job), *model_rules(model.decoder, target),
                 *target_rules(layout, target, job))  # fmt: skip
        if rules:
            continue
        config = language_model(model.config)[0]
        planned = Planned(plan_id="a" * 64, job=job, layout=layout, target=target, config=config,
                          hub_name="a/b")  # fmt: skip
        yield planned
        count -= 1


def changed(planned: Planned) -> Iterator[FoldedLayout]:
    """Yield layouts of the same ranks that the runtime runs, and that differ in one decision."""
    layout, job = planned.layout, planned.job
    for name, options in choices(planned.target).items():
        for value in options:
            other = layout.changed(**{name: value})
            is_idle = {"vpp": layout.pp == 1, "dispatcher": layout.ep == 1}.get(name, False)
            if name == "dp" or is_idle:
                continue
            if name in ("tp", "cp", "pp"):  # replicas are what is left
                sharers = other.tp * other.cp * other.pp
                other = other.changed(dp=max(1, job.world_size // sharers))
            other = other.changed(offload_activations=other.offloaded_share(job.decoder))
            rules = (*broken_rules(other, job), *target_rules(other, planned.target, job))
            same = other.explicit(job.decoder) == layout.explicit(job.decoder)
            if other.world_size == job.world_size and not rules and not same:
                yield other
