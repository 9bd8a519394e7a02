"""What plans of layers and of models both have, or runtimes read of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """Confidence in a choice, over refits of the measurements, or errors of earlier predictions.

    Args:
        probability_best: share of them in which no other choice is better.
        expected_regret: mean relative loss over them.
        p05_step_seconds, p95_step_seconds: of the chosen step over them.
    """

    probability_best: float
    expected_regret: float
    p05_step_seconds: float
    p95_step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Model states in chunks (Elixir).

    Args:
        num_parameters: of the whole model.
    """

    chunk_bytes: int
    cache_bytes: int
    scatter: bool
    offload: bool
    num_parameters: int
