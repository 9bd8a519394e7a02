"""A profile as the costs that the solvers read: the last step from samples to a plan's times."""

from functools import cached_property
from typing import get_args

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.cost_keys import CollectiveKey, CopyKey, CostKey
from moetune.domain.costs import CopyMode, Costs, Estimate, Number
from moetune.domain.errors import ProfileError
from moetune.domain.interference import OverlapSpeeds, SpeedTable
from moetune.domain.layer import LayerKey
from moetune.domain.profile import Profile
from moetune.domain.samples import Direction
from moetune.domain.step_errors import StepErrors
from moetune.fit.index import ProfileIndex, index_of
from moetune.fit.operations import Curves, Operations, Predictor


def costs_of(profile: Profile, *, allow_modelled: bool = False) -> Costs:
    """Return the costs that a profile predicts; `allow_modelled` lets another group stand in."""
    return ProfileCosts(index=index_of(profile), curves=Curves(), allow_modelled=allow_modelled)


class ProfileCosts:
    """Predictions from one profile (`domain.costs.Costs`). Not safe for several threads."""

    def __init__(self, *, index: ProfileIndex, curves: Curves, allow_modelled: bool) -> None:
        self._index = index
        self._curves = curves
        self._operations = Operations(index=index, curves=curves, allow_modelled=allow_modelled)
        self._estimates: dict[tuple[CostKey, float], Estimate[float]] = {}

    @cached_property
    def speeds(self) -> SpeedTable:
        """Speed of each class while others run."""
        return self._curves.speeds(self._index)

    def overlap_speeds(self, *, exchange_bytes: Sizes, exchange_seconds: Sizes) -> OverlapSpeeds:
        """Return the speeds during exchanges of that size; if unmeasured, the table's speeds."""
        comp, comm = self.speeds["comp", "comm"], self.speeds["comm", "comp"]
        lost_by_comp, lost_by_comm = map(self._index.overlap_loss, ("comp", "comm"))
        if lost_by_comp is not None:
            comp = lost_by_comp.speed(exchange_bytes, exchange_seconds)
        if lost_by_comm is not None:
            comm = lost_by_comm.stretched_speed(exchange_bytes, exchange_seconds)
        return OverlapSpeeds(comp, comm)

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        """Return the time at a size or an array of sizes; ProfileError if nothing predicts it."""
        if isinstance(key, CollectiveKey) and key.group_size == 1:
            return Estimate(seconds=0.0 * size, trust="measured")
        if isinstance(size, np.ndarray):
            return self._times(key, size)
        estimate = self._estimates.get((key, size))
        if estimate is None:
            estimate = self._estimates[key, size] = self._predictor(key).estimate(size)
        return estimate

    def _times(self, key: CostKey, sizes: Floats) -> Estimate[Floats]:
        if not sizes.ndim:
            single = self.seconds(key, sizes.item())
            return Estimate(np.asarray(single.seconds), single.trust, single.doubts)
        [times] = self._predictor(key).seconds_at(sizes.ravel())
        return Estimate(seconds=times.reshape(sizes.shape), trust="measured")

    def _predictor(self, key: CostKey) -> Predictor:
        predictor = self._operations.predictor(key)
        if predictor is None:
            raise ProfileError(
                f"no {key.words} measured (profile {self._index.profile.name!r} lacks it)",
                "measure it with `moetune profile`",
            )
        return predictor

    def knows(self, key: CostKey) -> bool:
        """Return whether a memory-bound operation or attention has times or a stand-in."""
        return self._operations.predictor(key) is not None

    def is_measured(self, dtype: str) -> bool:
        """Return whether measured points, not a line, predict the dtype's GEMMs."""
        return self._index.gemm_line(dtype) is None

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return the errors of a layer's whole steps against the sum of their operations."""
        return self._index.step_errors.of(key, tokens)

    @cached_property
    def copy_mode(self) -> CopyMode | None:
        """The way to offload activations; None unless copies were measured in both directions."""
        copies = self._index.keys(CopyKey)
        modes: tuple[CopyMode, CopyMode] = ("pinned", "pageable")
        if self._index.profile.machine.kind == "cpu":
            modes = ("inline", "inline")
        for mode, pinned in zip(modes, (True, False), strict=True):
            if all(CopyKey(way, pinned) in copies for way in get_args(Direction)):
                return mode
        return None
