"""A caller's pins and bounds on a plan: see `domain.request` for how they are written."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from moetune.domain.errors import InfeasiblePlanError, check_positive
from moetune.domain.layer import PHASES, ExpertParallel, Phase
from moetune.domain.placement import PlacementRule

Order = Literal["dispatch_first", "interleaved"]
Strategy = Literal["none", "S1", "S2", "S3", "S4"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OFFLOADS_INPUT: frozenset[Strategy] = frozenset({"S1", "S3"})
"""The experts' inputs go to host memory; S2 and S4 send them again (MPipeMoE Table II)."""
OFFLOADS_MIDDLE: frozenset[Strategy] = frozenset({"S1", "S2"})
"""Pre-activations go to host memory; S3 and S4 compute them again."""
MAX_DEGREE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds and pins (not None) of a layer's chunks and memory.

    Raises:
        InputError: a degree or a size below 1.
    """

    forward_degree: int | None = None
    backward_degree: int | None = None
    max_degree: int = MAX_DEGREE
    min_chunk_tokens: int = 1
    order: Order | None = None
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        check_positive(self, "forward_degree", "backward_degree", "max_degree", "min_chunk_tokens")

    @property
    def chosen_order(self) -> Order:
        """The order pinned, or dispatch first: no order of the chunks is faster."""
        return self.order or "dispatch_first"

    def pinned(self, phase: Phase) -> int | None:
        """Return the degree pinned for the phase."""
        return self.forward_degree if phase == "forward" else self.backward_degree

    def largest(self, tokens: int) -> int:
        """Return the largest degree allowed; one chunk always is, however small."""
        return max(1, min(self.max_degree, tokens // self.min_chunk_tokens))

    def check_degrees(self, tokens: int) -> None:
        """Raise InfeasiblePlanError where so many tokens do not allow a pinned degree."""
        largest = self.largest(tokens)
        for phase in PHASES:
            pinned = self.pinned(phase)
            if pinned is None or pinned <= largest:
                continue
            what = f"{phase}_degree {pinned} is infeasible: "
            flag = f"--{phase}-degree"
            if pinned > self.max_degree:
                raise InfeasiblePlanError(
                    f"{what}max_degree is {self.max_degree}",
                    f"nearest: {flag} {largest}, or allow more with --max-degree {pinned}",
                )
            raise InfeasiblePlanError(
                f"{what}{tokens} tokens per rank in chunks of at least {self.min_chunk_tokens} "
                f"make at most {largest}",
                f"nearest: {flag} {largest}, or {pinned * self.min_chunk_tokens} tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Everything that a caller pins or bounds.

    Args:
        sequence_parallel: ranks of a tensor-parallel group have a shard of the tokens each.
        memory_taken_bytes: part of the memory limit that the rest of the model takes.
        allow_modelled: accept estimates for what was not measured.
        routing: text of a `LayerRouting`; "" for balanced.
        expert_placement: "planned" by the loads of the routing, or the "natural" order.
    """

    bounds: Bounds = field(default_factory=Bounds)
    expert_parallel: ExpertParallel = "all_to_all"
    sequence_parallel: bool = False
    memory_taken_bytes: int = 0
    allow_modelled: bool = False
    routing: str = ""
    expert_placement: PlacementRule = "planned"
