"""A profile as the costs that the solvers read: the last step from samples to a plan's times."""

from dataclasses import replace
from functools import cached_property
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, array_of, is_many
from moetune.domain.cluster import Group, canonical
from moetune.domain.costs import NO_BURST, Burst, CopyMode, Costs, Estimate, LinearCost
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectiveOp, Direction
from moetune.domain.step_errors import StepErrors
from moetune.fit.curve import Line
from moetune.fit.index import ProfileIndex, index_of
from moetune.fit.operations import Operations
from moetune.fit.pool import AttentionKey, CollectiveKey, RowsKey
from moetune.fit.predictor import Curves, ExactCurves, Predictor

_FREE = Estimate(seconds=0.0, trust="measured")


def costs_of(profile: Profile, *, allow_modelled: bool = False) -> Costs:
    """Return the costs that the profile's samples, or else its lines, predict.

    Args:
        allow_modelled: estimate a group that was not measured from the nearest one.
    """
    return ProfileCosts(
        index=index_of(profile), curves=ExactCurves(), allow_modelled=allow_modelled
    )


class ProfileCosts:
    """Predictions from one profile (`domain.costs.Costs`).

    Predictors are cached by operation: a repeated query costs a dictionary access and a
    bisection. Not safe for several threads.
    """

    takes_arrays = True

    def __init__(self, *, index: ProfileIndex, curves: Curves, allow_modelled: bool) -> None:
        self._index = index
        self._curves = curves
        self._operations = Operations(index=index, curves=curves, allow_modelled=allow_modelled)
        self._gemms: dict[tuple[str, GemmForm, int, int, int], Predictor] = {}
        self._collectives: dict[CollectiveKey, Predictor] = {}
        self._copies: dict[tuple[Direction, bool], Predictor] = {}
        self._rows: dict[RowsKey, Predictor | None] = {}
        self._attention: dict[AttentionKey, Predictor | None] = {}

    @property
    def interference(self) -> Interference:
        """Speed of each class while others run."""
        return self._curves.interference(self._index)

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the speeds of computation and of exchanges of that size.

        They are the table's where sizes were not measured, or the table was set by hand.
        """
        comp, comm = self._index.comp_loss, self._index.comm_loss
        table = self.interference.overlap_speeds
        return OverlapSpeeds(
            comp=table.comp if comp is None else comp.speed(exchange_bytes, exchange_seconds),
            comm=table.comm
            if comm is None
            else comm.stretched_speed(exchange_bytes, exchange_seconds),
        )

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        """Return what collectives gain by a pause of the link; nothing where it is not known."""
        return self._index.bursts.get((op, self._canonical(group_size, num_nodes)), NO_BURST)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return the α–β line over MACs; None where measured points predict."""
        line = self._operations.gemm_line(dtype)
        return line.cost if line else None

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return the α–β line over bytes; None where measured points predict."""
        if group_size == 1:
            return None
        source = self._operations.source(op, self._canonical(group_size, num_nodes), 1)
        if source is None or not isinstance(source.found, Line):
            return None
        cost = self._curves.line(source.found, label=source.label).cost
        return replace(cost, beta_seconds=source.factor * cost.beta_seconds)

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the time of one GEMM of `num_experts` experts with `rows` rows each.

        A measured shape is interpolated over its rows; another shape is blended from the
        measured ones (`fit.gemm.Surface`). A form that was not measured takes the time of
        the forward form, labelled "modelled".

        Raises:
            ProfileError: nothing is known about that dtype.
        """
        key = (dtype, product, num_experts, d_in, d_out)
        found = self._gemms.get(key)
        if found is None:
            shape = (num_experts, d_in, d_out)
            found = self._gemms[key] = self._operations.gemm(dtype, product, shape)
        return found.predict(rows)

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the time of a memory-bound operation; None where it was not measured."""
        key = (op, dtype)
        if key not in self._rows:
            self._rows[key] = self._operations.rows(key)
        found = self._rows[key]
        return found.predict(rows * width) if found else None

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the time of one collective; 0 in a group of one.

        A number in flight that was not measured takes the nearest one: "interpolated" at best
        where both are above 1, else "extrapolated" at best.

        Args:
            num_bytes, in_flight: or arrays of both.

        Raises:
            ProfileError: such a group was not measured; the text names the command that does.
        """
        if group_size == 1:
            return _FREE
        if is_many(in_flight):
            sizes, numbers = np.asarray(num_bytes), np.asarray(in_flight)
            return self._each_collective(op, group_size, num_nodes, sizes, numbers)
        return self._collective(op, group_size, num_nodes, in_flight).predict(num_bytes)

    def _collective(
        self, op: CollectiveOp, group_size: int, num_nodes: int, in_flight: int
    ) -> Predictor:
        key = (op, group_size, num_nodes, in_flight)
        found = self._collectives.get(key)
        if found is None:
            group = self._canonical(group_size, num_nodes)
            found = self._collectives[key] = self._operations.collective(op, group, in_flight)
        return found

    def _each_collective(
        self,
        op: CollectiveOp,
        group_size: int,
        num_nodes: int,
        sizes: Floats,
        numbers: NDArray[np.int64],
    ) -> Estimate:
        """Return each time; numbers in flight of one predictor are predicted together."""
        of_number = {
            one: self._collective(op, group_size, num_nodes, one) for one in set(numbers.tolist())
        }
        predictors = {id(one): one for one in of_number.values()}
        ids = np.zeros(max(of_number, default=0) + 1, np.int64)
        ids[[*of_number]] = list(map(id, of_number.values()))
        of_each = ids[numbers]
        seconds = np.empty(sizes.shape)
        for one, predictor in predictors.items():
            alike = of_each == one
            seconds[alike] = predictor.predict(array_of(sizes[alike])).seconds
        return Estimate(seconds=array_of(seconds), trust="measured")

    def attention(
        self,
        *,
        dtype: str,
        num_sequences: float,
        length: int,
        num_heads: int,
        head_dim: int,
        backward: bool,
    ) -> Estimate | None:
        """Return the time of causal self-attention; None where it was not measured.

        Another length or number of heads takes the nearest measured one at as much work,
        labelled "extrapolated".
        """
        key = (dtype, length, num_heads, head_dim, backward)
        if key not in self._attention:
            self._attention[key] = self._operations.attention(key)
        found = self._attention[key]
        return found.predict(num_sequences) if found else None

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return by how much steps of a layer differ from the sum of their operations."""
        return self._index.step_errors.of(key, tokens)

    @cached_property
    def copy_mode(self) -> CopyMode | None:
        """Way to offload activations; None where copies were not measured both ways."""
        known = {
            pinned: {way for way, how, both in self._index.copies() if how == pinned and not both}
            for pinned in (True, False)
        }
        modes: tuple[CopyMode, CopyMode] = ("pinned", "pageable")
        if self._index.profile.machine.kind == "cpu":
            modes = ("inline", "inline")
        for mode, pinned in zip(modes, (True, False), strict=True):
            if len(known[pinned]) == len(get_args(Direction)):
                return mode
        return None

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the time of one copy while none runs the other way.

        Raises:
            ProfileError: no such copy was measured.
        """
        key = (direction, pinned)
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = self._operations.copy(direction, pinned=pinned)
        return found.predict(num_bytes)

    def _canonical(self, group_size: int, num_nodes: int) -> Group:
        return canonical((group_size, num_nodes), self._index.profile.machine)
