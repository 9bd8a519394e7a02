"""Layouts of the golden cases' models, drawn for a runtime, and what export writes of them."""

import random
from collections.abc import Iterator

from moetune.domain.rules import broken_rules
from moetune.domain.target_rules import model_rules, target_rules
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.export import export_layout
from moetune.export.planned import Planned
from moetune.huggingface.reader import language_model
from moetune.huggingface.registry import named_model
from tests.golden.cases import CASES

CHOICES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 4), "cp": (1, 2), "pp": (1, 2, 4), "vpp": (1, 2, 3), "ep": (1, 2, 4, 8),
    "etp": (1, 2), "micro_batch": (1, 2), "zero": (0, 1, 2, 3),
    "recompute": ((), ("full",), ("moe_act", "norm"), ("core_attn", "mlp"), ("selective",)),
    "dispatcher": ("all_to_all", "all_gather", "deepep", "hybrid_ep"),
    "overlap": ("none", "batch"), "cuda_graphs": ("none", "partial"),
    "schedule": (None, "zero_bubble"), "offload_activations": (0.0, 0.0, 0.25),
    "offload_optimizer": (0.0, 0.0, 0.5),
}  # fmt: skip
OPTIMIZERS = ("adam", "adam-bf16-grads", "adam-remainders", "adam-bf16")
DTYPES = ("bfloat16", "bfloat16", "fp8", "mxfp8", "nvfp4")


def models() -> tuple[str, ...]:
    """Return the registry's models of the golden cases."""
    words = (case.plan for case in CASES.values() if "--global-batch" in case.plan)
    names = {plan[plan.index("--model") + 1] for plan in words if "--model" in plan}
    return tuple(sorted(names))


def drawn(target_name: str, count: int, seed: int = 7) -> Iterator[tuple[Planned, str]]:
    """Yield plans that the runtime runs, each with its export."""
    draw, target = random.Random(seed), find_target(target_name)
    while count:
        model = named_model(draw.choice(models()))
        values = {name: draw.choice(choices) for name, choices in CHOICES.items()}
        if values["vpp"] != 1 and values["pp"] == 1:
            values["vpp"] = 1
        layout = FoldedLayout(dp=draw.choice((1, 2, 4, 8)), **values)  # type: ignore[arg-type]
        share = layout.offloaded_share(model.decoder)  # of whole blocks
        layout = layout.changed(offload_activations=share)
        job = TrainingJob(
            decoder=model.decoder, world_size=layout.world_size, global_batch=192, length=4096,
            optimizer=draw.choice(OPTIMIZERS), dtype=draw.choice(DTYPES),  # type: ignore[arg-type]
        )  # fmt: skip
        rules = (*broken_rules(layout, job), *model_rules(model.decoder, target),
                 *target_rules(layout, target, job))  # fmt: skip
        if rules:
            continue
        config = language_model(model.config)[0]
        planned = Planned(plan_id="a" * 64, job=job, layout=layout, target=target, config=config,
                          hub_name="a/b")  # fmt: skip
        yield planned, export_layout(planned).text
        count -= 1
