"""A caller's pins and bounds on a plan: see `domain.request` for how they are written."""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from moetune.domain.errors import InfeasiblePlanError, InputError, check_positive
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import ExpertParallel
from moetune.domain.placement import PlacementRule
from moetune.domain.withdrawn import EQUAL_DEGREES

Order = Literal["dispatch_first", "interleaved"]
Strategy = Literal["none", "S1", "S2", "S3", "S4"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OFFLOADS_INPUT: frozenset[Strategy] = frozenset({"S1", "S3"})
"""The experts' inputs go to host memory; S2 and S4 dispatch them again (MPipeMoE Table II)."""
OFFLOADS_MIDDLE: frozenset[Strategy] = frozenset({"S1", "S2"})
"""Pre-activations go to host memory; S3 and S4 recompute them."""
MAX_DEGREE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds and pins (not None) of a layer's chunks and memory.

    Args:
        forward_degree, backward_degree: a pin of one phase holds for both.

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
        """The pinned order, or dispatch first, since no order of the chunks is faster."""
        return self.order or "dispatch_first"

    @property
    def degree(self) -> int | None:
        """The pinned number of chunks; raises InputError if phases differ, as in older plans."""
        forward, backward = self.forward_degree, self.backward_degree
        if forward and backward and forward != backward:
            raise InputError(
                f"--forward-degree {forward} and --backward-degree {backward} exclude each other: "
                f"{EQUAL_DEGREES}",
                "give one of them, which holds for both",
                field="backward_degree",
            )
        return forward or backward

    def without_degree(self) -> "Bounds":
        """Return the bounds without a pinned number of chunks."""
        return replace(self, forward_degree=None, backward_degree=None)

    def largest(self, tokens: int) -> int:
        """Return the largest allowed degree, at least 1, however few the tokens."""
        return max(1, min(self.max_degree, tokens // self.min_chunk_tokens))

    def check_degree(self, tokens: int) -> None:
        """Raise InfeasiblePlanError if the pinned degree is too large, InputError if two differ."""
        pinned, largest = self.degree, self.largest(tokens)
        if pinned is None or pinned <= largest:
            return
        phase = "backward" if self.forward_degree is None else "forward"
        what, flag = f"{phase}_degree {pinned} is infeasible: ", f"--{phase}-degree"
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
        memory_taken_bytes: part of the memory limit that the rest of the model takes.
        routing: text of a `LayerRouting`; "" for balanced.
        expert_placement: "planned" by the loads of the routing, or the "natural" order.
        expert_kernel: None for the fastest that was measured.
    """

    bounds: Bounds = field(default_factory=Bounds)
    expert_parallel: ExpertParallel = "all_to_all"
    memory_taken_bytes: int = 0
    allow_modelled: bool = False
    routing: str = ""
    expert_placement: PlacementRule = "planned"
    expert_kernel: ExpertKernel | None = None
