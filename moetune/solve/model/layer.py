"""moetune's MoE layer within a model's step, priced like the layer's plans (`solve.layer`).

The plans of a model and of a layer share rows, exchanges and chunks; published GEMM times become
times within a step. The host launches the start of a layer while the device runs the rest of the
block. So launches are compared with the time of the whole block.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from moetune.domain.experts import RoutedExperts
from moetune.domain.layer import PHASES, Workload
from moetune.domain.samples import GEMM_FORMS
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.operations import Price, in_numbers, total
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import ModuleName, Passes


def layer_in_step(
    part: RoutedExperts, *, device: DevicePrices, layout: FoldedLayout, job: TrainingJob
) -> LayerCosts:
    """Return the costs of a layer on the ranks that share its experts.

    Experts that return their input have no rows.
    """
    is_tensor = layout.dispatcher == "all_gather" and layout.ep > 1
    workload = Workload(
        layer=part.layer, world_size=layout.ep, tokens_per_rank=1, dtype=job.element,
        expert_parallel="tensor" if is_tensor else "all_to_all",
    )  # fmt: skip
    skew, share = job.skew(part, layout.ep), part.mean_top_k / part.layer.top_k
    return device.remembered(
        ("layer", workload, skew, share),
        lambda: replace(
            layer_costs(workload=workload, costs=device.costs), skew=skew.mean * share,
            expert_shares=skew.shares, gemm_factor=1 / device.reached,
            gap_seconds=device.gap_seconds,
        ),
    )  # fmt: skip


def layer_modules(
    costs: LayerCosts, tokens: float, device: DevicePrices
) -> Iterator[tuple[ModuleName, Passes]]:
    """Yield the modules of a layer in one chunk, named like those of other runtimes.

    They add up to the phases and their overhead, without launches before the first chunk. The
    gate's choice is part of "router"; "permute" has all permuting and unpermuting.
    """

    def seconds(price: Price) -> float:
        return device.trusts.note(in_numbers(price))

    rows = costs.rows(tokens)
    mine = rows / costs.world_size if costs.is_tensor else rows
    factor = costs.step_factor(rows=rows, degree=1).item()
    moved = total(*costs.moves(tokens)).seconds.item()
    sent = factor * costs.num_transfers * seconds(costs.transfer(rows=rows, degree=1))
    forms = (
        total(*costs.gemms(mine, form), *costs.gemms(mine, form, is_second=True))
        for form in GEMM_FORMS
    )
    experts = Passes(*(factor * form.seconds.item() for form in forms))
    yield "experts", experts
    for phase, multiplied in zip(PHASES, (experts.forward, experts.backward), strict=True):
        seconds(costs.phase_overhead(phase, tokens=tokens))
        gate = costs.gate(phase, tokens=tokens).seconds.item()
        small = costs.small_collectives(phase, tokens=tokens).seconds.item() if gate else 0.0
        activation = factor * costs.activation(phase, mine).seconds.item()
        computed = factor * total(*chain(*costs.operations(phase, rows))).seconds.item()
        by_module: dict[ModuleName, float] = {
            "moe_act": activation, "router": gate, "exchange": sent + small,
            "permute": computed - multiplied - activation + moved,
        }  # fmt: skip
        if waiting := factor * seconds(costs.compute(phase=phase, rows=rows)) - computed:
            by_module["launches"] = waiting
        for name, time in by_module.items():
            yield name, Passes(time) if phase == "forward" else Passes(grad_input=time)
