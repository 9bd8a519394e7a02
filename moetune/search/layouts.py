"""Search of a decoder's layouts beyond branch and bound: an Optuna study of time and memory.

Optuna keeps the trials and chooses, generation by generation, those of which others are made:
NSGA-II (Deb et al., 2002), with the memory that there is as a constraint. What is made of them is
ours (`search.edits`): crossed at random, sizes of ranks and stages of pipelines break rules.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import NSGAIISampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from moetune.domain.cluster import HEADROOM
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.search.edits import LayoutEdits
from moetune.search.quiet import quiet
from moetune.solve.joint.front import merged
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import NOISE, Leaders, PricedLayout

_POPULATION = 32
_FASTEST = 0.5
"""Probability that the fastest of a generation that fits is edited, and not any of it."""
_REPEATS = 8
"""Edits in search of one that was not tried."""
_NUMBER, _OVER = "number", "over"
_DISTRIBUTIONS = {_NUMBER: IntDistribution(0, 2**31)}


class LayoutStudy:
    """A search to drive step by step, from layouts that are known to others near the best.

    The same seeds and as many steps find the same.

    Args:
        search: of the job, with the limits of memory.
        pins: what no layout may change.
        seeds: the known layouts, the chosen one first.
    """

    def __init__(
        self, search: FoldedSearch, pins: LayoutRequest, seeds: Sequence[PricedLayout]
    ) -> None:
        self._search, self._chosen = search, seeds[0]
        self._known: dict[FoldedLayout, PricedLayout] = {
            one.layout.changed(degree=None): one for one in seeds
        }
        edits = LayoutEdits(space=search.space, prices=search.prices, pins=pins)
        self._sampler = _Edits(edits, [*self._known])
        with quiet():
            self._study = optuna.create_study(directions=["minimize"] * 2, sampler=self._sampler)

    def try_next(self) -> PricedLayout:
        """Price one more layout; one of before where a small space has no other."""
        trial = self._study.ask(dict(_DISTRIBUTIONS))
        layout = self._sampler.layouts[trial.params[_NUMBER]]
        found = self._known.get(layout)
        if found is None:
            found = self._known[layout] = self._search.priced(layout)
        trial.set_constraint(_OVER, self._over(found))
        self._study.tell(trial, [found.step.seconds, found.memory.peak_bytes])
        return found

    def ranked(self) -> list[PricedLayout]:
        """Return the best layout and the best of other sizes, as branch and bound ranks them.

        None are returned where the chosen seed stays the answer: no other layout that fits is
        faster by more than noise, or none fits. A seed that does not fit gives way to any other
        that does.
        """
        leaders = Leaders(roomy_bytes=self._search.limit_bytes * (1 - HEADROOM))
        for one in self._fitting():
            leaders.add(one)
        if not leaders.found:
            return []
        best = leaders.ranked()
        is_noise = best[0].step.seconds > self._chosen.step.seconds * (1 - NOISE)
        if is_noise and self._over(self._chosen) <= 0:
            return []
        return list(map(self._search.told, best))

    def front(self, bounded: Sequence[PricedLayout]) -> tuple[PricedLayout, ...]:
        """Return a front with the layouts within the limits that are faster for their memory."""
        front = merged(bounded, self._fitting())
        return tuple(one if one in bounded else self._search.told(one) for one in front)

    def _fitting(self) -> list[PricedLayout]:
        return [one for one in self._known.values() if self._over(one) <= 0]

    def _over(self, one: PricedLayout) -> float:
        """Return by what share a layout exceeds the memory that there is; 0 where it fits."""
        search, memory = self._search, one.memory
        shares = (
            memory.peak_bytes / search.limit_bytes, memory.host_bytes / search.host_bytes,
        )  # fmt: skip
        return max(0.0, max(shares) - 1)


class _Edits(NSGAIISampler):
    """NSGA-II whose first generation are seeds and edits of them, and whose children are edits.

    What Optuna knows as a parameter is the place of a layout in `layouts`.
    """

    def __init__(self, edits: LayoutEdits, seeds: Sequence[FoldedLayout]) -> None:
        super().__init__(population_size=max(_POPULATION, len(seeds)), seed=0)
        self._edits, self._num_seeds = edits, len(seeds)
        self._draw = np.random.default_rng(0)
        self.layouts, self._proposed = [*seeds], {*seeds}

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        return dict(_DISTRIBUTIONS)

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],  # noqa: ARG002 - Optuna's signature
    ) -> dict[str, Any]:
        generation = self.get_trial_generation(study, trial)
        if trial.number < self._num_seeds:
            return {_NUMBER: trial.number}
        parents = self.get_parent_population(study, generation)
        numbers = [self._parent(parents) for _ in range(_REPEATS)]
        for number in numbers:
            one = self._edits.edited(self.layouts[number], self._draw)
            if one is not None and one not in self._proposed:
                self._proposed.add(one)
                self.layouts.append(one)
                return {_NUMBER: len(self.layouts) - 1}
        return {_NUMBER: numbers[-1]}

    def _parent(self, parents: Sequence[FrozenTrial]) -> int:
        """Return the number of a layout to edit: a seed's in the first generation."""
        if not parents:
            return int(self._draw.integers(self._num_seeds))
        fit = [one for one in parents if one.constraints[_OVER] <= 0]
        if fit and self._draw.random() < _FASTEST:
            parent = min(fit, key=lambda one: one.values[0])
        else:
            parent = parents[int(self._draw.integers(len(parents)))]
        return int(parent.params[_NUMBER])
