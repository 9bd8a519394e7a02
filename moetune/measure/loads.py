"""Loads of experts that a layer which is run here has to follow."""

from moetune.domain.errors import InputError
from moetune.domain.layer import Workload
from moetune.domain.routing import LayerRouting


def expert_shares(workload: Workload) -> tuple[float, ...] | None:
    """Return each expert's share of the rows; None where routing is balanced.

    Raises:
        InputError: the routing is a law, which has no loads of single experts, or the gate has
            more experts than the model is wide, and random tokens cannot be steered.
    """
    routing = LayerRouting.of(workload.routing)
    shares = routing.loads.shares(workload.layer.top_k)
    if shares is None and workload.routing:
        raise InputError(
            f"the plan is for routing {workload.routing!r}, which says nothing of single experts",
            "plan with the loads of a file or a record to run the layer with them: --routing FILE",
        )
    if shares is not None and workload.layer.num_experts > workload.layer.d_model:
        raise InputError(
            f"{workload.layer.num_experts} experts for tokens of width {workload.layer.d_model}: "
            "random tokens cannot be made to follow the plan's routing",
            "plan with --routing balanced to run this layer",
        )
    return shares
