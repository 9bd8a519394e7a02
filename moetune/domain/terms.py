"""Terms of a layer's plan: the seconds and bytes that its times come from."""

from dataclasses import dataclass

from moetune.domain.constraints import Strategy
from moetune.domain.costs import Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTerms:
    """One phase of the plan, in seconds.

    Args:
        transfer_seconds: a chunk's dispatch or combine; in tensor parallelism its all-reduce.
        total_transfer_seconds: all transfers of the phase, without interference.
        total_compute_seconds: all experts, without interference.
        exposed_communication_seconds: time of the phase in addition to its experts'.
        hidden_seconds: time that overlapping saves over running everything in sequence.
    """

    degree: int
    seconds: float
    transfer_seconds: float
    compute_seconds: float
    total_transfer_seconds: float
    total_compute_seconds: float
    exposed_communication_seconds: float
    hidden_seconds: float
    transfer_trust: Trust
    compute_trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTerms:
    """One memory strategy at the best degrees that fit, or at the fastest if none fit.

    Args:
        needed_bytes: states, activations and buffers on the device, by MPipeMoE Eq. 1 to 6.
        host_bytes: activations that wait in host memory.
        is_paper_choice: whether Eq. 10 would choose it among the strategies that reuse memory.
        lost_because: why another strategy won; empty for the plan's strategy.
    """

    strategy: Strategy
    forward_degree: int
    backward_degree: int
    step_seconds: float
    needed_bytes: int
    peak_bytes: int
    host_bytes: int
    saving_ratio: float
    fits: bool
    is_chosen: bool
    paper_seconds: float
    is_paper_choice: bool
    lost_because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerms:
    """The terms of a layer's plan and its candidate strategies.

    Args:
        strategies: empty in a whole model and in tensor parallelism, which choose no strategy.
    """

    forward: PhaseTerms
    backward: PhaseTerms
    strategies: tuple[StrategyTerms, ...]
