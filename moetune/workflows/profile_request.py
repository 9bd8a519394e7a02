"""What to measure, and where."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.config import Launch
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.transformer import Transformer
from moetune.domain.units import dtype_bytes
from moetune.measure.grid import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to measure; empty tuples and None for the defaults.

    Args:
        name: of the profile; default, the device's with the number of ranks.
        num_ranks: ranks to start on this node, ignored in a launch that sets their number.
        dtypes: default, what the device is fast with.
        group_sizes: default, the divisors and powers of two up to the number of ranks.
        layers: shapes that must be covered exactly.
        transformers: whole models that must be.
        max_tokens: tokens of one step on one rank; of a model, those of a micro-batch.
        budget_seconds: longest time to measure; the fit comes on top.
    """

    name: str | None = None
    num_ranks: int = 1
    preset: Preset = "quick"
    dtypes: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()
    layers: tuple[LayerShape, ...] = ()
    transformers: tuple[Transformer, ...] = ()
    max_tokens: int = 4096
    budget_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            dtype_bytes(dtype)
        for name in ("num_ranks", "max_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where to measure.

    Args:
        environment: the process's; what can change speed goes into the fingerprint.
        launch: set where this process is a rank of a launch.
    """

    environment: Mapping[str, str]
    launch: Launch | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process keeps what is measured: rank 0 alone."""
        return self.launch is None or self.launch.rank == 0
