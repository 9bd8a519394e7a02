"""PipeMoE's own way to a degree (Algorithm 1, Theorem 1), kept as an oracle and a baseline.

α_a, β_a are of the all-to-all over y bytes, α_e, β_e of the experts over x MACs. The paper's
three cases are solved as it says; where it cannot be followed to the letter, the docstrings say
what was done.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy.optimize import minimize

from moetune.domain.costs import LinearCost

START = 2.0
"""SLSQP starts at the smallest degree of the pipelined cases (Eq. 37, 44)."""

_Function = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Theorem1:
    """One problem of PipeMoE §IV-B.

    Args:
        rejects_failures: drop a case whose solver says that it found no feasible point.
            Algorithm 1 asks for no such check and takes whatever the solver returns.
    """

    transfer: LinearCost
    payload_bytes: float
    compute: LinearCost
    macs: float
    rejects_failures: bool = False

    def degree(self, *, max_degree: int) -> int:
        """Return Theorem 1's degree, a real one rounded, and clipped to the largest allowed."""
        cases = (
            self._link_bound(),
            self._slsqp(self._f3, sign=-1.0, max_degree=max_degree),
            self._slsqp(self._f4, sign=1.0, max_degree=max_degree),
        )
        seconds, real = min(cases)
        if seconds >= self._sequential():
            return 1
        return min(max_degree, round(real))

    @property
    def _wire(self) -> float:
        return self.transfer.beta_seconds * self.payload_bytes

    @property
    def _work(self) -> float:
        return self.compute.beta_seconds * self.macs

    def _sequential(self) -> float:
        """Eq. 19; Algorithm 1, line 5 swaps t_d and t_e against it."""
        return 2 * self.transfer.seconds(self.payload_bytes) + self.compute.seconds(self.macs)

    def _link_bound(self) -> tuple[float, float]:
        """Eq. 25 and 28; where α_a = α_e divides by zero, the smallest pipelined degree."""
        difference = self.transfer.alpha_seconds - self.compute.alpha_seconds
        ratio = (self._work - self._wire) / difference if difference else START
        degree = max(START, math.ceil(ratio))
        return self._f4(degree), degree

    def _f3(self, degree: float) -> float:
        """Eq. 33."""
        return (
            2 * self.transfer.alpha_seconds
            + self._work
            + 2 * self._wire / degree
            + self.compute.alpha_seconds * degree
        )

    def _f4(self, degree: float) -> float:
        """Eq. 40."""
        return 2 * self.transfer.alpha_seconds * degree + 2 * self._wire

    def _not_q1(self, degree: float) -> float:
        """Eq. 35: positive where the experts of a chunk outlast its transfer."""
        transfer = self.transfer.seconds(self.payload_bytes / degree)
        return self.compute.seconds(self.macs / degree) - transfer

    def _not_q2(self, degree: float) -> float:
        """Eq. 43: positive where the inner transfers outlast the experts."""
        return self._f4(degree) * (degree - 1) / degree - (
            self.compute.alpha_seconds * degree + self._work
        )

    def _slsqp(self, objective: _Function, *, sign: float, max_degree: int) -> tuple[float, float]:
        """Return (seconds, real degree) of the case with Q2 of that sign."""
        solution = minimize(
            lambda degrees: objective(degrees[0]),
            [START],
            method="SLSQP",
            bounds=[(START, max(START, max_degree))],
            constraints=[
                {"type": "ineq", "fun": lambda degrees: self._not_q1(degrees[0])},
                {"type": "ineq", "fun": lambda degrees: sign * self._not_q2(degrees[0])},
            ],
        )
        if self.rejects_failures and not solution.success:
            return math.inf, START
        return float(solution.fun), float(solution.x[0])
