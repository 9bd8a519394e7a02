"""Cached costs of a model's parts, which many layouts share.

Most layouts share most of their costs: a block depends on the micro-batch and its group, a
gradient on its size and its group, and neither on the rest of the layout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from moetune.domain.constraints import Bounds
from moetune.domain.cost_keys import CollectiveKey, RowsKey
from moetune.domain.costs import Costs, Estimate, seconds_if_known
from moetune.domain.layer import ExpertParallel
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.samples import CollectiveOp
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layer.totals import total
from moetune.solve.model.cost_parts import Backbone, CostPart, MoeParts
from moetune.solve.model.costs import Parts, send_time
from moetune.solve.model.groups import Group, Groups, groups_of
from moetune.solve.model.memory import Share, share_of
from moetune.solve.model.stages import Stage, cut_into_stages
from moetune.solve.runtime import MOETUNE, StateBytes, TargetRuntime

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Time of one micro-batch in each element of a stage: both passes, and forward alone."""

    dense: float
    moe: float
    first: float
    last: float
    dense_forward: float
    moe_forward: float
    first_forward: float
    last_forward: float

    def stage(self, stage: Stage, *, recompute: bool) -> float:
        """Return one micro-batch's forward and backward pass on the stage."""
        seconds = stage.num_dense * self.dense + stage.num_moe * self.moe
        if recompute:
            seconds += self._blocks_forward(stage)
        return seconds + stage.is_first * self.first + stage.is_last * self.last

    def forward(self, stage: Stage) -> float:
        """Return one micro-batch's forward pass on the stage."""
        ends = stage.is_first * self.first_forward + stage.is_last * self.last_forward
        return self._blocks_forward(stage) + ends

    def _blocks_forward(self, stage: Stage) -> float:
        return stage.num_dense * self.dense_forward + stage.num_moe * self.moe_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The parts of a layout with their times, for one size of micro-batch."""

    backbone: Backbone
    moe: MoeParts
    seconds: Seconds

    @classmethod
    def of(cls, backbone: Backbone, moe: MoeParts) -> "Priced":
        """Return the parts, summed up."""
        return cls(backbone=backbone, moe=moe, seconds=_seconds(backbone, moe))


class PriceCache:
    """Values by key, each computed when it is first wanted. Not safe for several threads."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], object] = {}

    def once(self, key: tuple[object, ...], find: Callable[[], T]) -> T:
        """Return the key's value."""
        if key not in self._known:
            self._known[key] = find()
        return cast("T", self._known[key])


class Prices:
    """Cached costs of a model on a machine. Not safe for several threads.

    Args:
        structure: what depends on the model and its layouts alone, not on costs; prices of one
            model share it.
    """

    def __init__(
        self,
        *,
        model: Transformer,
        dtype: str,
        costs: Costs,
        bounds: Bounds,
        per_node: int,
        runtime: TargetRuntime = MOETUNE,
        runs_ahead: bool = False,
        structure: "PriceCache | None" = None,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.runtime = runtime
        self.state_bytes = StateBytes.of_model(dtype)
        self.costs = costs
        self.bounds = bounds
        self._per_node = per_node
        self.runs_ahead = runs_ahead
        self.structure = structure or PriceCache()
        self._priced = PriceCache()

    @property
    def fewest_chunks(self) -> tuple[int, int]:
        """The MoE layer's degrees that take the least memory: one chunk, but for pins."""
        return self.bounds.forward_degree or 1, self.bounds.backward_degree or 1

    def stages(self, num_stages: int) -> tuple[Stage, ...]:
        """Return the model cut into stages."""
        return self.structure.once(
            ("stages", num_stages), lambda: cut_into_stages(self.model, num_stages)
        )

    def under(self, costs: Costs, *, degrees: tuple[int, int]) -> "Prices":
        """Return the prices by other costs.

        Args:
            degrees: at which the MoE layer's chunks are fixed.
        """
        return Prices(
            model=self.model,
            dtype=self.dtype,
            costs=costs,
            bounds=replace(self.bounds, forward_degree=degrees[0], backward_degree=degrees[1]),
            per_node=self._per_node,
            runtime=self.runtime,
            runs_ahead=self.runs_ahead,
            structure=self.structure,
        )

    def groups(self, layout: Layout) -> Groups:
        """Return the layout's groups on the machine's nodes."""
        return groups_of(layout, per_node=self._per_node)

    def priced(
        self,
        *,
        layout: Layout,
        groups: Groups,
        sequences: int,
        one_chunk: bool,
    ) -> Priced:
        """Return the parts of a layout.

        Args:
            sequences: of a micro-batch.
            one_chunk: run the MoE layer in one chunk, whatever the bounds allow.

        Raises:
            ProfileError: an operation was not measured.
        """
        kind = layout.expert_parallel
        key = (groups.tensor, groups.experts, kind, sequences, one_chunk)
        return self._priced.once(
            ("priced", *key),
            lambda: self._price(
                groups.tensor, groups.experts, kind, sequences, one_chunk=one_chunk
            ),
        )

    def send(self, *, hop: Group, tensor: Group, tokens: int) -> Estimate:
        """Return the send of one micro-batch from a stage to the next.

        Raises:
            ProfileError: no such send was measured.
        """
        return self._priced.once(
            ("send", hop, tensor, tokens),
            lambda: send_time(
                hop=hop,
                tensor=tensor,
                tokens=tokens,
                model=self.model,
                dtype=self.dtype,
                costs=self.costs,
                runtime=self.runtime,
            ),
        )

    def gradients(
        self, *, layout: Layout, groups: Groups, zero: bool, num_micro_batches: int
    ) -> Estimate:
        """Return the time of the slowest stage's reduction of gradients by itself.

        They travel in the parameters' dtype. With sharded optimizer states they are
        reduce-scattered, and the new parameters all-gathered. Sharded gradients are
        reduce-scattered after each micro-batch.

        Raises:
            ProfileError: no such collective was measured.
        """
        times = num_micro_batches if self.runtime.shards_gradients else 1
        key = (layout.pp, layout.tp, layout.ep, layout.expert_parallel)

        def find() -> Estimate:
            stages = [
                total(*self.collectives_of(share, groups, zero=zero, times=times))
                for _, _, share in self.shares(layout)
            ]
            return max(stages, key=lambda one: one.seconds)

        return self._priced.once(
            ("gradients", *key, groups.data, groups.replicas, zero, times), find
        )

    def collectives_of(
        self, share: Share, groups: Groups, *, zero: bool, times: int = 1
    ) -> tuple[Estimate, Estimate]:
        """Return what reduces gradients, so many times, and what gathers the new parameters.

        Raises:
            ProfileError: no such collective was measured.
        """
        pairs = [
            self._reduce(count, group, zero=zero)
            for count, group in ((share.dense, groups.data), (share.experts, groups.replicas))
        ]
        reduced, gathered = zip(*pairs, strict=True)
        return total(*reduced * times), total(*gathered)

    def optimizer(self, *, layout: Layout, zero: bool) -> Estimate:
        """Return the slowest stage's optimizer step; 0 where it was not measured."""
        count = self._most_parameters(layout, is_sharded=zero)
        found = seconds_if_known(self.costs, RowsKey("adam", self.dtype), count)
        return found or NOTHING

    def accumulation(self, *, layout: Layout, num_backward_passes: int) -> Estimate:
        """Return the time to add the gradients of later backward passes to those of the first.

        Of the stage with most parameters; 0 where it was not measured. Sharded gradients are added
        once they are reduced, a shard on each rank.
        """
        count = self._most_parameters(layout, is_sharded=self.runtime.shards_gradients)
        found = seconds_if_known(self.costs, RowsKey("accumulate", self.dtype), count)
        return (found or NOTHING).scaled(num_backward_passes - 1)

    def _most_parameters(self, layout: Layout, *, is_sharded: bool) -> float:
        """Return the parameters, or those of a shard, on a rank of the stage with most."""
        data, replicas = (layout.dp, layout.dp // layout.ep) if is_sharded else (1, 1)
        return max(
            share.dense / data + share.experts / replicas for _, _, share in self.shares(layout)
        )

    def shares(self, layout: Layout) -> Sequence[tuple[int, Stage, Share]]:
        """Return the first stage of each kind, its index, and the parameters on its ranks."""
        return self.structure.once(
            ("shares", layout.pp, layout.tp, layout.ep, layout.expert_parallel),
            lambda: list(self._shares(layout)),
        )

    def _shares(self, layout: Layout) -> Iterator[tuple[int, Stage, Share]]:
        seen = set()
        for index, stage in enumerate(self.stages(layout.pp)):
            if stage not in seen:
                seen.add(stage)
                share = share_of(model=self.model, layout=layout, stage=stage)
                yield index, stage, share

    def _price(
        self,
        tensor: Group,
        experts: Group,
        kind: ExpertParallel,
        sequences: int,
        *,
        one_chunk: bool,
    ) -> Priced:
        parts = Parts(
            model=self.model, dtype=self.dtype, num_sequences=sequences, tensor=tensor,
            costs=self.costs, runtime=self.runtime, runs_ahead=self.runs_ahead,
        )  # fmt: skip
        backbone = self._priced.once(("backbone", tensor, sequences), parts.backbone)
        moe = self._priced.once(
            ("moe", kind, tensor, experts, sequences, one_chunk),
            lambda: parts.moe(
                expert_parallel=kind,
                experts=experts,
                bounds=self._bounds_of(one_chunk=one_chunk),
                attention=backbone.attention,
            ),
        )
        return Priced.of(backbone, moe)

    def _bounds_of(self, *, one_chunk: bool) -> Bounds:
        return one_chunk_of(self.bounds) if one_chunk or self.model.is_dense else self.bounds

    def _reduce(self, count: int, group: Group, *, zero: bool) -> tuple[Estimate, Estimate]:
        if group.size == 1 or not count:
            return NOTHING, NOTHING
        num_bytes = count * self.state_bytes.parameter

        def collective(op: CollectiveOp, num_bytes: float) -> Estimate:
            return self.costs.seconds(CollectiveKey(op, group.size, group.num_nodes), num_bytes)

        if not zero:
            return collective("all_reduce", num_bytes), NOTHING
        gathered = collective("all_gather", num_bytes / group.size)
        return collective("reduce_scatter", num_bytes), gathered


def one_chunk_of(bounds: Bounds) -> Bounds:
    """Return the bounds that leave one chunk each way."""
    return replace(bounds, forward_degree=None, backward_degree=None, max_degree=1)


def _seconds(backbone: Backbone, moe: MoeParts) -> Seconds:
    dense = (*backbone.attention, *backbone.ffn)
    with_experts = (*backbone.attention, *moe.parts)
    return Seconds(
        dense=_both(dense),
        moe=_both(with_experts),
        first=_both(backbone.first),
        last=_both(backbone.last),
        dense_forward=_forward(dense),
        moe_forward=_forward(with_experts),
        first_forward=_forward(backbone.first),
        last_forward=_forward(backbone.last),
    )


def _both(parts: Sequence[CostPart]) -> float:
    return sum(part.seconds for part in parts)


def _forward(parts: Sequence[CostPart]) -> float:
    return sum(part.forward.seconds for part in parts)
