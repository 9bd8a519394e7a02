"""A layer's costs under many refits at once: every time is an array, one entry for each refit.

Sums and products of times hold for arrays as they hold for numbers, so that `LayerCosts` and the
closed forms work out a layer once, and not once a refit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar, cast

import numpy as np

from moetune.domain.arrays import array_of
from moetune.domain.costs import Burst, CopyMode, Costs, Estimate, LinearCost, costs_of_all
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.samples import CollectiveOp, Direction
from moetune.domain.step_errors import StepErrors
from moetune.solve.layer.costs import LayerCosts

_Found = TypeVar("_Found")
_Speed = TypeVar("_Speed", CompSpeed, CommSpeed, MemSpeed)


def stacked(
    layer: LayerCosts, refits: Sequence[Costs], errors: Sequence[StepErrors] = ()
) -> LayerCosts:
    """Return the layer's costs under all of the refits, whose estimates have arrays of seconds.

    Args:
        refits: at least one.
        errors: of whole steps, of each refit; by default those of the layer.
    """
    return replace(
        layer,
        costs=_StackedCosts(refits),
        errors=_stacked_errors(errors) if errors else layer.errors,
    )


def each(seconds: float, num: int) -> list[float]:
    """Return the seconds under each of so many refits, of stacked costs or the same for all."""
    return cast("list[float]", np.broadcast_to(seconds, num).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _ErrorsOfEach(StepErrors):
    """Errors that differ between refits."""

    refits: tuple[StepErrors, ...]

    def factor(self, degree: int) -> float:
        return array_of([one.factor(degree) for one in self.refits])


def _stacked_errors(errors: Sequence[StepErrors]) -> StepErrors:
    first = errors[0]
    if all(one is first for one in errors):
        return first
    return _ErrorsOfEach(refits=tuple(errors))


class _StackedCosts:
    """Costs (`domain.costs.Costs`) with an array of seconds in each estimate.

    An operation that only some of the refits know is a TypeError: refits are of the same samples.
    """

    def __init__(self, refits: Sequence[Costs]) -> None:
        self._refits = refits
        self._first = refits[0]
        self._together = costs_of_all(refits)

    @property
    def interference(self) -> Interference:
        """Arrays of speeds."""
        if self._together is not None:
            return self._together.interference
        tables = [one.interference for one in self._refits]
        return Interference(
            comp=_stacked_speeds([one.comp for one in tables]),
            comm=_stacked_speeds([one.comm for one in tables]),
            mem=_stacked_speeds([one.mem for one in tables]),
        )

    @property
    def copy_mode(self) -> CopyMode | None:
        """That of all refits."""
        return self._first.copy_mode

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return arrays of speeds."""
        if self._together is not None:
            return self._together.overlap_speeds(
                exchange_bytes=exchange_bytes, exchange_seconds=exchange_seconds
            )
        seconds = each(exchange_seconds, len(self._refits))
        found = [
            one.overlap_speeds(exchange_bytes=exchange_bytes, exchange_seconds=its)
            for one, its in zip(self._refits, seconds, strict=True)
        ]
        return OverlapSpeeds(
            comp=array_of([one.comp for one in found]), comm=array_of([one.comm for one in found])
        )

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        """Return that of all refits: it is not drawn."""
        return self._first.burst(op=op, group_size=group_size, num_nodes=num_nodes)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:  # noqa: ARG002 - of no refit
        """Return None: lines are drawn, too."""
        return None

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0  # noqa: ARG002 - of no refit
    ) -> LinearCost | None:  # fmt: skip
        """Return None: lines are drawn, too."""
        return None

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return the errors of each refit."""
        return _stacked_errors([one.step_errors(key, tokens=tokens) for one in self._refits])

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the times."""
        return self._stack(
            lambda one: one.gemm(
                dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in,
                d_out=d_out,
            )
        )  # fmt: skip

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the times; None where they were not measured."""
        return self._stack_known(
            lambda one: one.rows_op(op=op, dtype=dtype, rows=rows, width=width), op
        )

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the times."""
        return self._stack(
            lambda one: one.collective(
                op=op, group_size=group_size, num_bytes=num_bytes, in_flight=in_flight,
                num_nodes=num_nodes,
            )
        )  # fmt: skip

    def attention(
        self, *, dtype: str, num_sequences: float, length: int, num_heads: int, head_dim: int,
        backward: bool,
    ) -> Estimate | None:  # fmt: skip
        """Return the times; None where they were not measured."""
        return self._stack_known(
            lambda one: one.attention(
                dtype=dtype, num_sequences=num_sequences, length=length, num_heads=num_heads,
                head_dim=head_dim, backward=backward,
            ),
            "attention",
        )  # fmt: skip

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the times."""
        return self._stack(
            lambda one: one.copy(direction=direction, pinned=pinned, num_bytes=num_bytes)
        )

    def _stack(self, estimate: Callable[[Costs], Estimate]) -> Estimate:
        if self._together is not None:
            return Estimate(seconds=estimate(self._together).seconds, trust="measured")
        return _stacked_estimate([estimate(one) for one in self._refits])

    def _stack_known(
        self, estimate: Callable[[Costs], Estimate | None], what: str
    ) -> Estimate | None:
        """Return the times of an operation; None where no refit knows it.

        Raises:
            TypeError: only some know it.
        """
        if self._together is not None:
            found = estimate(self._together)
            return None if found is None else found._replace(trust="measured", doubts=())
        known = _all_or_none([estimate(one) for one in self._refits], what)
        return None if known is None else _stacked_estimate(known)


def _stacked_speeds(speeds: Sequence[_Speed]) -> _Speed:
    names = (one.name for one in fields(speeds[0]))
    rows = {name: array_of([getattr(one, name) for one in speeds]) for name in names}
    return replace(speeds[0], **rows)


def _stacked_estimate(estimates: Sequence[Estimate]) -> Estimate:
    return Estimate(seconds=array_of([one.seconds for one in estimates]), trust="measured")


def _all_or_none(found: Sequence[_Found | None], what: str) -> list[_Found] | None:
    """Return what every refit has; None where none of them has it.

    Raises:
        TypeError: only some have it.
    """
    known = [one for one in found if one is not None]
    if known and len(known) < len(found):
        raise TypeError(f"{len(known)} of {len(found)} refits have {what}, and the others do not")
    return known or None
