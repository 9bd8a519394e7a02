"""What a plan is asked for, and how ranks can share the work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from moetune.domain.document import digest
from moetune.domain.layer import ExpertParallel, LayerShape, Workload
from moetune.domain.layout import Layout

Order = Literal["dispatch_first", "interleaved"]
Strategy = Literal["none", "S1", "S2", "S3", "S4"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OFFLOADS_INPUT: frozenset[Strategy] = frozenset({"S1", "S3"})
"""What the experts received goes to host memory; S2 and S4 send it again (MPipeMoE Table II)."""
OFFLOADS_MIDDLE: frozenset[Strategy] = frozenset({"S1", "S2"})
"""Pre-activations go to host memory; S3 and S4 compute them again."""
EXPERT_PARALLEL = "expert-parallel"
"""Among a plan's constraints: how its ranks have to share the experts."""
SEQUENCE_PARALLEL = "sequence-parallel"
"""The same: whether the ranks of a tensor-parallel group have a shard of the tokens each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Everything the decision depends on; the plan's id is the hash of it.

    Args:
        tokens_per_rank: each rank's own; of a tensor-parallel group those that all ranks
            compute, whether each has all of them or a shard.
        constraints: what the caller pinned or bounded, by flag name; empty when nothing.
    """

    model: str | None
    layer: LayerShape
    world_size: int
    tokens_per_rank: int
    dtype: str
    memory_limit_bytes: int | None
    profile: str
    profile_fingerprint: str
    constraints: Mapping[str, str]

    @property
    def plan_id(self) -> str:
        """sha256 of the canonical inputs."""
        return digest(self)

    @property
    def expert_parallel(self) -> ExpertParallel:
        """How a layer alone has to share its experts: as pinned, else all to all."""
        is_tensor = self.constraints.get(EXPERT_PARALLEL) == "tensor"
        return "tensor" if is_tensor else "all_to_all"

    @property
    def sequence_parallel(self) -> bool:
        """Whether each rank of the tensor-parallel group has a shard of the tokens."""
        return self.constraints.get(SEQUENCE_PARALLEL) == "true"

    def workload(self, layout: Layout) -> Workload:
        """Return one layer, on the ranks that share its experts."""
        return Workload(
            layer=self.layer,
            world_size=layout.expert_ranks,
            tokens_per_rank=self.tokens_per_rank,
            dtype=self.dtype,
            expert_parallel=layout.expert_parallel,
            sequence_parallel=self.sequence_parallel,
        )
