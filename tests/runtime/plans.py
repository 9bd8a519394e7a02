"""A small plan for tests."""

from collections.abc import Mapping

from moetune.domain.constraints import Strategy
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.layout import Layout
from moetune.domain.plan import Memory, Pipeline, Plan, Predicted, Range, Verdict
from moetune.domain.request import PlanInputs


def small_plan(
    *,
    layer: LayerShape,
    world_size: int = 2,
    tokens: int = 40,
    dtype: str = "float32",
    degrees: tuple[int, int] = (4, 4),
    ranges: tuple[Range, ...] = ((1, 10, 2, 2), (11, 100, 4, 4)),
    strategy: Strategy = "none",
    expert_parallel: ExpertParallel = "all_to_all",
    constraints: Mapping[str, str] | None = None,
) -> Plan:
    constraints = dict(constraints or {})
    if expert_parallel != "all_to_all":
        constraints["expert-parallel"] = expert_parallel
    inputs = PlanInputs(
        model=None, layer=layer, world_size=world_size, tokens_per_rank=tokens, dtype=dtype,
        memory_limit_bytes=None, profile="test", profile_fingerprint="0",
        constraints=constraints,
    )  # fmt: skip
    return Plan(
        id=inputs.plan_id,
        inputs=inputs,
        layout=Layout.of_layer(expert_parallel, world_size),
        pipeline=Pipeline(
            forward_degree=degrees[0], backward_degree=degrees[1], order="dispatch_first",
            ranges=ranges,
        ),
        memory=Memory(
            strategy=strategy, state_bytes=1, activation_bytes=1, buffer_bytes=1, saved_bytes=0,
            saving_ratio=0.0,
        ),
        predicted=Predicted(
            forward_seconds=1.0, backward_seconds=1.0, step_seconds=2.0,
            sequential_forward_seconds=1.0, sequential_backward_seconds=1.0,
            overhead_seconds=0.0, p05_step_seconds=2.0, p95_step_seconds=2.0,
            trust="measured",
        ),
        decision=Verdict(
            probability_best=1.0, expected_regret=0.0, runner_up=None,
            binding="computation", why="because",
        ),
        alternatives=(),
        warnings=(),
    )  # fmt: skip
