"""Make a plan from a request and a profile, and find plans again."""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from moetune.config import Settings
from moetune.domain.cluster import HOST_MEMORY
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer, find_model
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import EXPERT_PARALLEL, SEQUENCE_PARALLEL, PlanInputs
from moetune.domain.samples import CollectiveOp
from moetune.fit.costs import costs_of
from moetune.fit.resample import resample_costs
from moetune.solve.layer.choose import Bounds
from moetune.solve.layer.memory import MEMORY_TAKEN
from moetune.solve.layer.plan import solve_plan
from moetune.solve.layout.plan import LayoutProblem, solve_layout
from moetune.solve.layout.space import LayoutPins
from moetune.workflows import wiring
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.profiles import FoundProfile, find_profile
from moetune.workflows.request import check_shards, check_tensor, layout_constraints, reject_pins

NUM_RESAMPLES = 100
SEED = 0
ALLOW_MODELLED = "allow-modelled"
"""Among the constraints where estimates were accepted for what was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for: a named model or a layer, and what is pinned; None for the default.

    Args:
        model: a name of `moetune models list`.
        layer: where there is no `model`.
        transformer: the whole model; default, the named model's, where it is a whole one.
        pins: of a whole model's layout; of a layer's, how its ranks share the experts.
        sequence_parallel: whether a layer's tensor-parallel ranks have a shard of the tokens each.
        world_size: default, the profile's number of devices.
        tokens_per_rank: default, the model's; a layer needs it.
        dtype: default, what the profile is for: see `default_dtype`.
        memory_limit_bytes: default, the device's memory.
        memory_taken_bytes: by others on the device; the limit is less by so much.

    Raises:
        InputError: it is incomplete, contradicts itself, or names no known model.
    """

    model: str | None = None
    layer: LayerShape | None = None
    transformer: Transformer | None = None
    pins: LayoutPins = field(default_factory=LayoutPins)
    sequence_parallel: bool = False
    world_size: int | None = None
    tokens_per_rank: int | None = None
    dtype: str | None = None
    memory_limit_bytes: int | None = None
    memory_taken_bytes: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    allow_modelled: bool = False

    def __post_init__(self) -> None:
        if (self.model is None) == (self.layer is None):
            nothing = self.model is None
            raise InputError(
                "there is nothing to plan for" if nothing else "a model and a layer are given",
                "name a model with --model (see `moetune models list`), "
                "or a layer with --d-model, --d-hidden and --num-experts",
            )
        if self.model is not None:
            find_model(self.model)
        elif self.tokens_per_rank is None:
            raise InputError(
                "the number of tokens is missing", "give --tokens, or --batch and --seq"
            )
        for name in ("world_size", "tokens_per_rank", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.sequence_parallel:
            check_shards(self.pins, is_whole=self.whole is not None)
        if self.whole is not None:
            if self.bounds.strategy not in {None, "none"}:
                raise InputError(
                    f"strategy {self.bounds.strategy} is not planned in a whole model",
                    "leave --strategy away: where memory binds, blocks run forward again",
                )
            return
        reject_pins(self.pins)
        if self.pins.expert_parallel == "tensor":
            check_tensor(self.bounds)

    @property
    def whole(self) -> Transformer | None:
        """The whole model to plan for; None for a layer."""
        if self.transformer is not None or self.model is None:
            return self.transformer
        return find_model(self.model).transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A new plan, and the profile it was made with."""

    plan: Plan
    found: FoundProfile


def plan_layer(
    request: PlanRequest,
    *,
    profile: str | None,
    settings: Settings,
    output: Path | None = None,
    save: bool = True,
) -> Planned:
    """Find the profile, make the plan, write it to a file and keep it in the store.

    Args:
        profile: as in `find_profile`.
        output: file to write, whole or not at all.

    Raises:
        MoetuneError: whatever is wrong with the request, the profile, the file or the store.
    """
    with ExitStack() as stack:
        store = stack.enter_context(wiring.open_store(settings)) if save else None
        find = (
            partial(wiring.find_store, settings) if store is None else partial(nullcontext, store)
        )
        found = find_profile(profile, stores=find)
        plan = make_plan(request, profile=found.profile)
        if output is not None:
            write_text(output, plan_to_json(plan))
        if store is not None:
            store.save_plan(plan)
    return Planned(plan=plan, found=found)


def make_plan(request: PlanRequest, *, profile: Profile) -> Plan:
    """Return the best plan for the request on the profile's machine.

    Raises:
        InputError: the experts, or a whole model, do not divide by the ranks, or the dtype is
            unknown.
        InfeasiblePlanError: nothing satisfies the bounds or the memory limit.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    inputs = plan_inputs(request, profile=profile)
    allowed = request.allow_modelled
    costs = costs_of(profile, allow_modelled=allowed)
    resamples = resample_costs(profile, num=NUM_RESAMPLES, seed=SEED, allow_modelled=allowed)
    if request.whole is not None:
        return solve_layout(
            LayoutProblem(
                inputs=inputs,
                model=request.whole,
                pins=request.pins,
                costs=costs,
                resamples=resamples,
                bounds=request.bounds,
                per_node=profile.machine.devices_per_node,
                runs_ahead=profile.machine.kind == "cuda",
                shares_core=profile.shares_core,
                device_memory_bytes=profile.machine.memory_bytes,
                host_memory_bytes=host_memory_bytes(profile),
                provenance=profile.provenance,
            )
        ).plan
    plan = solve_plan(
        inputs=inputs,
        costs=costs,
        resamples=resamples,
        bounds=request.bounds,
        device_memory_bytes=profile.machine.memory_bytes,
        provenance=profile.provenance,
    ).plan
    return replace(plan, warnings=(*_stand_in(plan, profile), *plan.warnings))


def plan_inputs(
    request: PlanRequest, *, profile: Profile, fingerprint: str | None = None
) -> PlanInputs:
    """Return the request with every default filled in.

    Args:
        fingerprint: the profile's digest, where it is known; it takes long to work out.
    """
    world_size = request.world_size or profile.machine.num_devices
    layer, tokens = _layer_and_tokens(request, world_size)
    return PlanInputs(
        model=request.model,
        layer=layer,
        world_size=world_size,
        tokens_per_rank=tokens,
        dtype=request.dtype or default_dtype(profile),
        memory_limit_bytes=request.memory_limit_bytes,
        profile=profile.name,
        profile_fingerprint=fingerprint or profile.digest,
        constraints=_constraints(request),
    )


def host_memory_bytes(profile: Profile) -> int | None:
    """Return the memory of one node's host; None where the profile does not know it."""
    machine = profile.machine
    if machine.kind == "cpu":
        return machine.memory_bytes * machine.devices_per_node
    known = profile.fingerprint.hardware.get(HOST_MEMORY, "")
    return int(known) if known.isdigit() else None


def default_dtype(profile: Profile) -> str:
    """Return bfloat16 where a CUDA profile has it, else float32, else the profile's first."""
    known = list(dict.fromkeys(line.dtype for line in profile.gemm))
    known += [s.point.dtype for s in profile.samples if s.point.kind == "gemm"]
    wanted = ("bfloat16", "float32") if profile.machine.kind == "cuda" else ("float32",)
    return next((dtype for dtype in (*wanted, *known) if dtype in known), "float32")


def _layer_and_tokens(request: PlanRequest, world_size: int) -> tuple[LayerShape, int]:
    if request.layer is not None and request.tokens_per_rank is not None:
        return request.layer, request.tokens_per_rank
    model = find_model(request.model or "")
    return model.layer(world_size), request.tokens_per_rank or model.tokens_per_rank


def _stand_in(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """Say which group size stands in for the plan's, where that one was not measured."""
    ranks = plan.layout.expert_ranks
    missing = []
    for op in _exchanges(plan):
        sizes = {line.group_size for line in profile.collective if line.op == op}
        for sample in profile.samples:
            if sample.point.kind == "collective" and sample.point.op == op:
                sizes.add(sample.point.group_size)
        if ranks > 1 and ranks not in sizes:
            known = ", ".join(map(str, sorted(sizes)))
            missing.append(
                f"no {op} was measured for {ranks} ranks: the nearest of {known} stands in for it"
            )
    return tuple(missing)


def _exchanges(plan: Plan) -> tuple[CollectiveOp, ...]:
    if plan.workload.sequence_parallel:
        return "all_gather", "reduce_scatter"
    return ("all_reduce",) if plan.layout.expert_parallel == "tensor" else ("all_to_all",)


def _constraints(request: PlanRequest) -> Mapping[str, str]:
    """Return what differs from the defaults: the same question always has the same id."""
    bounds, default = request.bounds, Bounds()
    names = (
        "forward_degree", "backward_degree", "max_degree", "min_chunk_tokens", "order", "strategy",
    )  # fmt: skip
    found = {
        name.replace("_", "-"): str(getattr(bounds, name))
        for name in names
        if getattr(bounds, name) != getattr(default, name)
    }
    if request.whole is not None:
        own = find_model(request.model).transformer if request.model else None
        found |= layout_constraints(request.whole, own=own, pins=request.pins)
    elif request.pins.expert_parallel == "tensor":
        found[EXPERT_PARALLEL] = "tensor"
        if request.sequence_parallel:
            found[SEQUENCE_PARALLEL] = "true"
    if request.memory_taken_bytes:
        found[MEMORY_TAKEN] = str(request.memory_taken_bytes)
    return {**found, ALLOW_MODELLED: "true"} if request.allow_modelled else found
