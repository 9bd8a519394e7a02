"""Days, GPU-hours and cost of a whole training, from its plan's step and prices of GPU-hours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError
from moetune.domain.spelling import flag_of

_DAY_SECONDS, _HOUR_SECONDS = 86_400, 3600
LEAST_UTILIZATION = 0.01
LARGEST_TRAIN_TOKENS = 10**18
LARGEST_PRICE = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A prediction, with the 5th and the 95th percentile of the predicted number."""

    p05: float
    predicted: float
    p95: float

    def times(self, factor: float) -> "Spread":
        """Return the spread multiplied by the factor."""
        low, middle, high = (factor * value for value in (self.p05, self.predicted, self.p95))
        return Spread(p05=low, predicted=middle, p95=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Time and cost of a whole training.

    Args:
        steps: number of steps with the plan's batch; the last may be partly filled.
        days: wall-clock days.
        gpu_hours: hours of all ranks together in these days.
        cost: cost in the currency of the price; None without a price.
    """

    steps: int
    days: Spread
    gpu_hours: Spread
    cost: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Tokens of a whole training and price of its GPUs; raises InputError out of range.

    Args:
        train_tokens: tokens that the model is trained on, with every repetition.
        price_per_gpu_hour: price in any currency; None where none is given.
        utilization: share of the wall-clock time in which steps run. The rest are restarts,
            checkpoints and evaluations. Llama 3 405B had more than 0.9 (arXiv 2407.21783, 3.3.4).
    """

    train_tokens: int
    price_per_gpu_hour: float | None = field(default=None, metadata=UNLESS_DEFAULT)
    utilization: float = 1.0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("train_tokens", self.train_tokens, 1, LARGEST_TRAIN_TOKENS),
            ("price_per_gpu_hour", self.price_per_gpu_hour or 0.0, 0, LARGEST_PRICE),
            ("utilization", self.utilization, LEAST_UTILIZATION, 1),
        ):
            if not least <= value <= most:
                raise InputError(f"{name} must be from {least} to {most}, got {value}", field=name)

    @classmethod
    def of(
        cls, tokens: int | None, price: float | None, utilization: float | None
    ) -> "Budget | None":
        """Return the budget of a question's fields; None without any. InputError without tokens."""
        if tokens is not None:
            share = 1.0 if utilization is None else utilization
            return cls(train_tokens=tokens, price_per_gpu_hour=price, utilization=share)
        for field_name, value in (("price", price), ("utilization", utilization)):
            if value is not None:
                raise InputError(
                    f"{flag_of(field_name)} needs {flag_of('train_tokens')}",
                    "give the tokens of the whole training, such as 1T", field=field_name,
                )  # fmt: skip
        return None

    def run(self, seconds: Spread, *, tokens_per_step: int, world_size: int) -> TrainingRun:
        """Return time and cost of the training, from the seconds of a step."""
        steps = math.ceil(self.train_tokens / tokens_per_step)
        wall = seconds.times(steps / self.utilization)
        hours, price = wall.times(world_size / _HOUR_SECONDS), self.price_per_gpu_hour
        return TrainingRun(
            steps=steps, days=wall.times(1 / _DAY_SECONDS), gpu_hours=hours,
            cost=None if price is None else hours.times(price),
        )  # fmt: skip


def read_prices(text: str | None, profiles: Sequence[str]) -> dict[str, float]:
    """Return the price of a GPU-hour by profile.

    Args:
        text: "2.5" for all, or "h100-x8=2.5,b200-x8=3.2"; None for no price.

    Raises:
        InputError: the text has no price, or prices of only some profiles.
    """
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(profiles, _price(text))
    pairs = [pair.partition("=") for pair in text.split(",")]
    prices = {name.strip(): _price(price) for name, _, price in pairs}
    for name in profiles:
        if name not in prices:
            raise _wrong_prices(f"has none for {name}")
    for name in prices:
        if name not in profiles:
            raise _wrong_prices(f"names {name!r}, which is not asked")
    return prices


def _wrong_prices(what: str) -> InputError:
    return InputError(f"--price {what}", "give a single price, or NAME=PRICE for each profile")


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        raise _wrong_prices(f"has {text!r}, which is no number") from None
    if not 0 <= price <= LARGEST_PRICE:
        what = f"--price must be from 0 to {LARGEST_PRICE}, got {text}"
        raise InputError(what, "give the price of a GPU-hour", field="price")
    return price
