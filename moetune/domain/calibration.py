"""A factor on predicted steps, from runs of the same machine and runtime that were observed."""

from dataclasses import dataclass

from moetune.domain.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What observed runs say of the steps of a question.

    Args:
        factor: on every predicted step, and so of no influence on their order.
        low_factor, high_factor: between which nine of ten steps lie, over their prediction without
            a calibration.
        num_runs: that it is from, each of another question or layout.
        num_of_model: of them of the question's model.
        num_left_out: that are so far off that they are taken to be mistaken.

    Raises:
        InputError: the factors are in no order, or not above 0.
    """

    factor: float
    low_factor: float
    high_factor: float
    num_runs: int
    num_of_model: int = 0
    num_left_out: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.low_factor <= self.factor <= self.high_factor:
            raise InputError("a calibration's factors must be above 0 and in order")


def factor_of(calibration: Calibration | None) -> float:
    """Return the factor of a calibration; 1 without any."""
    return 1.0 if calibration is None else calibration.factor
