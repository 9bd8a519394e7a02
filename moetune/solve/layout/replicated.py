"""Replicas whose exchanges, gradients and batches share one timeline: the candidates of a layout.

Only layouts whose replicas are single ranks have them: tp and pp are 1, and states are whole. The
degrees, whether two batches are in flight, and the pieces of the gradients are chosen together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moetune.domain.costs import Estimate
from moetune.domain.layer import Workload
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.training import BATCHES_IN_TURNS, Overlap
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layer.choose import NOISE
from moetune.solve.layer.timeline import Timeline
from moetune.solve.layer.times import step_time
from moetune.solve.layout.candidates import Batching
from moetune.solve.model.costs import PositionsHalf
from moetune.solve.model.groups import Groups
from moetune.solve.model.in_turns import of_model, turns_factor
from moetune.solve.model.prices import Priced, Prices
from moetune.solve.model.program import GRADIENTS
from moetune.solve.model.replicas import ReplicaStep
from moetune.solve.runtime import MOETUNE

Degrees = tuple[int, int]
_MOST_CHUNKS = 16
_TOLD_APART_IN_TURNS = 0.02
"""Share of a step by which two numbers of chunks are predicted wrong beside each other where
batches take turns: 2 to 4 % in the network lab. The other batch hides what chunks would."""
_SAMPLE_LAYERS = 4
"""MoE layers whose timeline ranks the degrees; the whole model is simulated with the best."""


def can_replicate(layout: Layout, prices: Prices) -> bool:
    """Return whether ranks with whole models exchange tokens, as `moetune.replicate` has it."""
    return layout.tp == layout.pp == 1 < layout.ep and prices.runtime is MOETUNE


def ways_in_flight(
    prices: Prices, overlap: Overlap | None, setting: Batching
) -> Iterator[Batching]:
    """Yield the setting with one batch in flight, and on CPUs with two.

    Micro-batches that come in pairs take turns. Where they do not, the first and the last positions
    of each do, if a profile has measured blocks of them.
    """
    if overlap != "batch":
        yield replace(setting, between=True)
    if prices.runs_ahead or overlap not in {None, "batch"}:
        return
    in_turns = replace(setting, between=True, in_flight=BATCHES_IN_TURNS)
    if setting.num_micro_batches % BATCHES_IN_TURNS == 0:
        yield in_turns
    elif of_model(prices.turns, model=prices.model, dtype=prices.dtype, split="positions"):
        yield replace(in_turns, split="positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedTime:
    """A micro-batch's share of a step, and what the step's gradients add.

    Args:
        priced: with what is not hidden of the exchanges.
        gradients: what is not hidden of their reduction.
    """

    priced: Priced
    gradients: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Replicas with so many micro-batches in a step.

    Args:
        priced: of a micro-batch, each phase by itself.
        workload: of an MoE layer, with a batch in flight.
    """

    prices: Prices
    layout: Layout
    groups: Groups
    priced: Priced
    workload: Workload
    setting: Batching

    def best(self) -> ReplicatedTime:
        """Return the time in the best degrees.

        As in a layer alone, fewer chunks are taken where more do not gain what can be told apart.

        Raises:
            ProfileError: an operation was not measured.
        """
        sample = self._step(_shortened(self.prices.model))
        times = {
            degrees: _lengthened(
                sample.timeline(degrees, in_flight=self.setting.in_flight), self._longer(degrees)
            )
            for degrees in self._degrees()
        }
        least = min(times.values())
        told_apart = NOISE if self.setting.in_flight == 1 else _TOLD_APART_IN_TURNS
        chosen = next(one for one, time in times.items() if time <= least * (1 + told_apart))
        return self.at(chosen)

    def at(self, degrees: Degrees) -> ReplicatedTime:
        """Return the time in these degrees.

        Raises:
            ProfileError: an operation was not measured.
        """
        step, setting = self._step(self.prices.model), self.setting
        alone, summed, reduced = (
            step.timeline(
                degrees, in_flight=setting.in_flight, sums_replicas=sums, reduces=reduces
            ).makespan_seconds
            for sums, reduces in ((False, False), (True, False), (True, True))
        )
        others = setting.num_micro_batches // setting.micro_batches_in_turns - 1
        exposed = reduced - alone + others * (summed - alone)
        longer = self._longer(degrees) / setting.micro_batches_in_turns
        gradients = self.prices.gradients(
            layout=self.layout, groups=self.groups, zero=False, num_micro_batches=1
        )
        return ReplicatedTime(
            priced=self._priced(degrees, longer * alone),
            gradients=gradients._replace(seconds=max(0.0, exposed)),
        )

    def _longer(self, degrees: Degrees) -> float:
        """Return measured over predicted time of blocks with so many batches in flight."""
        if self.setting.in_flight == 1:
            return 1.0
        prices = self.prices
        return turns_factor(
            prices.turns, model=prices.model, dtype=prices.dtype, degrees=degrees,
            split=self.setting.split or "sequences",
        )  # fmt: skip

    def _priced(self, degrees: Degrees, seconds: float) -> Priced:
        """Return the parts of a micro-batch that takes so long."""
        num_layers, [stage] = self.prices.model.num_moe_layers, self.prices.stages(1)
        setting, tokens = self.setting, self.workload.tokens_per_rank
        step = step_time(
            costs=self._layer, tokens=tokens * setting.in_flight // setting.micro_batches_in_turns,
            forward_degree=degrees[0], backward_degree=degrees[1],
        )  # fmt: skip
        hidden = Priced.of(self.priced.backbone, self.priced.moe.exposing(step, 0.0))
        exposed = seconds - hidden.seconds.stage(stage, recompute=False)
        moe = self.priced.moe.exposing(step, max(0.0, exposed) / num_layers)
        return Priced.of(self.priced.backbone, moe)

    def _degrees(self) -> Iterator[Degrees]:
        """Yield the degrees to choose from, the fewest chunks first."""
        bounds, tokens = self.prices.bounds, self.workload.tokens_per_rank
        pinned = bounds.forward_degree or bounds.backward_degree
        if pinned:
            yield bounds.forward_degree or pinned, bounds.backward_degree or pinned
            return
        for degree in range(1, min(_MOST_CHUNKS, bounds.largest(tokens)) + 1):
            yield degree, degree

    def _step(self, model: Transformer) -> ReplicaStep:
        first, last = self.priced, None
        if self.setting.split == "positions":
            first, last = self._half("first"), self._half("last")
        return ReplicaStep(
            model=model, dtype=self.prices.dtype, costs=self.prices.costs, priced=first,
            layer=self._layer, groups=self.groups, tokens=self.workload.tokens_per_rank, last=last,
        )  # fmt: skip

    def _half(self, half: PositionsHalf) -> Priced:
        return self.prices.priced(
            layout=self.layout, groups=self.groups, sequences=self.setting.sequences,
            one_chunk=self.setting.one_chunk, half=half,
        )  # fmt: skip

    @property
    def _layer(self) -> AllToAllCosts:
        experts = self.groups.experts
        return AllToAllCosts(
            layer=self.workload.layer, world_size=experts.size, dtype=self.prices.dtype,
            costs=self.prices.costs, num_nodes=experts.num_nodes,
        )  # fmt: skip


def _shortened(model: Transformer) -> Transformer:
    """Return the model with no more MoE layers than the sample has."""
    most = _SAMPLE_LAYERS * max(1, model.moe_every)
    return replace(model, num_layers=min(model.num_layers, most))


def _lengthened(timeline: Timeline, factor: float) -> float:
    """Return when the timeline ends if all but what it waits for gradients takes so much longer."""
    own = max(one.end_seconds for one in timeline.spans if one.stream != GRADIENTS)
    return factor * own + timeline.makespan_seconds - own
