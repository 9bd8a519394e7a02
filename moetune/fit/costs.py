"""A profile as the costs that the solvers read: the last step from samples to a plan's times."""

from functools import cached_property
from typing import get_args

import numpy as np

from moetune.domain.arrays import array_of, is_many
from moetune.domain.cost_keys import CollectiveKey, CopyKey, CostKey
from moetune.domain.costs import CopyMode, Costs, Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.profile import Profile
from moetune.domain.samples import Direction
from moetune.domain.step_errors import StepErrors
from moetune.fit.index import ProfileIndex, index_of
from moetune.fit.operations import Curves, Operations, Predictor

_FREE = Estimate(seconds=0.0, trust="measured")


def costs_of(profile: Profile, *, allow_modelled: bool = False) -> Costs:
    """Return the costs that a profile predicts; `allow_modelled` takes the nearest group."""
    return ProfileCosts(index=index_of(profile), curves=Curves(), allow_modelled=allow_modelled)


class ProfileCosts:
    """Predictions from one profile (`domain.costs.Costs`). Not safe for several threads."""

    def __init__(self, *, index: ProfileIndex, curves: Curves, allow_modelled: bool) -> None:
        self._index = index
        self._curves = curves
        self._operations = Operations(index=index, curves=curves, allow_modelled=allow_modelled)
        self._estimates: dict[tuple[CostKey, float], Estimate] = {}

    @cached_property
    def interference(self) -> Interference:
        """Speed of each class while others run."""
        return self._curves.interference(self._index)

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the speeds during exchanges of that size, else those of the table."""
        comp, comm = self._index.overlap_loss("comp"), self._index.overlap_loss("comm")
        table = self.interference.overlap_speeds
        return OverlapSpeeds(
            comp=table.comp if comp is None else comp.speed(exchange_bytes, exchange_seconds),
            comm=table.comm
            if comm is None
            else comm.stretched_speed(exchange_bytes, exchange_seconds),
        )

    def seconds(self, key: CostKey, size: float) -> Estimate:
        """Return the time at a size or an array of them; ProfileError where nothing stands in."""
        if isinstance(key, CollectiveKey) and key.group_size == 1:
            return _FREE
        if is_many(size):
            sizes = np.asarray(size, float)
            [times] = self._predictor(key).seconds_at(sizes.ravel())
            return Estimate(seconds=array_of(times.reshape(sizes.shape)), trust="measured")
        estimate = self._estimates.get((key, size))
        if estimate is None:
            estimate = self._estimate(self._predictor(key), size)
            self._estimates[key, size] = estimate
        return estimate

    def _estimate(self, predictor: Predictor, size: float) -> Estimate:
        return predictor.estimate(size)

    def _predictor(self, key: CostKey) -> Predictor:
        predictor = self._operations.predictor(key)
        if predictor is None:
            raise ProfileError(
                f"no {key.words} measured (profile {self._index.profile.name!r} lacks it)",
                "measure it with `moetune profile`",
            )
        return predictor

    def knows(self, key: CostKey) -> bool:
        """Return whether a memory-bound operation or attention, or what stands in, was measured."""
        return self._operations.predictor(key) is not None

    def is_measured(self, dtype: str) -> bool:
        """Return whether points predict the dtype's GEMMs."""
        return self._index.gemm_line(dtype) is None

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return by how much steps of a layer differ from the sum of their operations."""
        return self._index.step_errors.of(key, tokens)

    @cached_property
    def copy_mode(self) -> CopyMode | None:
        """Way to offload activations; None where copies were not measured both ways."""
        copies = self._index.keys(CopyKey)
        modes: tuple[CopyMode, CopyMode] = ("pinned", "pageable")
        if self._index.profile.machine.kind == "cpu":
            modes = ("inline", "inline")
        for mode, pinned in zip(modes, (True, False), strict=True):
            if all(CopyKey(way, pinned) in copies for way in get_args(Direction)):
                return mode
        return None
