"""Records of how running layers routed their tokens: the experts' loads, the fullest rank's rows.

`MoELayer.routing_record` makes a layer's record while training, and `moetune.routing_record` makes
the records of a model's layers. Plans read them as `--routing FILE`. With a record of each layer,
plans know that all ranks wait for each layer's fullest rank, which differs between layers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from moetune.domain.architecture import Decoder
from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError
from moetune.domain.once import Tables, once
from moetune.domain.placement import places_of
from moetune.domain.routing import ExpertLoads, RankSkew

SCHEMA: Literal["moetune.routing/1"] = "moetune.routing/1"
MODEL_SCHEMA: Literal["moetune.model-routing/1"] = "moetune.model-routing/1"


class _Record:
    __slots__ = ()

    @property
    def text(self) -> str:
        """The file's JSON text."""
        return json.dumps(encode(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord(_Record):
    """Rows of a layer's recorded steps; raises InputError for a number out of range.

    Args:
        loads: rows of each expert, of all ranks and steps.
        num_steps: number of newest steps, which the quantiles cover; the loads cover all steps.
        fullest_p50, fullest_p99: quantiles over the steps of the fullest rank's rows, divided by
            the mean of the ranks. Experts are on the ranks where the layer had them.
    """

    schema: Literal["moetune.routing/1"] = SCHEMA
    num_experts: int
    top_k: int
    num_ranks: int
    num_steps: int
    loads: tuple[int, ...]
    fullest_p50: float
    fullest_p99: float

    def __post_init__(self) -> None:
        if len(self.loads) != self.num_experts or min(self.loads, default=0) < 0:
            raise InputError(
                f"loads must have {self.num_experts} numbers from 0 on, one for each expert"
            )
        if self.num_ranks < 1 or self.num_experts % self.num_ranks:
            raise InputError(
                f"num_ranks must divide the {self.num_experts} experts, got {self.num_ranks}"
            )
        if not 1 - 1e-9 <= self.fullest_p50 <= self.fullest_p99 <= self.num_ranks * (1 + 1e-9):
            raise InputError("the fullest rank has from 1 to num_ranks times the mean rows")

    def in_order_of(self, experts: Sequence[int]) -> "RoutingRecord":
        """Return the record with loads by expert, from loads that were counted by place."""
        if not experts:
            return self
        return replace(self, loads=tuple(self.loads[place] for place in places_of(experts)))

    def expert_loads(self, name: str) -> ExpertLoads:
        """Return the loads under a name, in the form that plans use."""
        return ExpertLoads(name=name, loads=tuple(map(float, self.loads)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoutingRecord(_Record):
    """Records of all layers of experts of a model, in order; raises InputError without any."""

    schema: Literal["moetune.model-routing/1"] = MODEL_SCHEMA
    layers: tuple[RoutingRecord, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a record of a model's routing must have a layer of experts")


def record_of(
    rows_SP: Sequence[Sequence[int]], totals_E: Sequence[int], *, top_k: int, num_ranks: int
) -> RoutingRecord:
    """Return the record of rows [step][rank] and experts' totals; raises InputError without any."""
    ratios = sorted(max(rows) * num_ranks / sum(rows) for rows in rows_SP if sum(rows))
    if not ratios:
        raise InputError(
            "no step was recorded", "train for some steps first: evaluation is not recorded"
        )
    return RoutingRecord(
        num_experts=len(totals_E), top_k=top_k, num_ranks=num_ranks, num_steps=len(rows_SP),
        loads=tuple(totals_E), fullest_p50=_quantile(ratios, 0.5),
        fullest_p99=_quantile(ratios, 0.99),
    )  # fmt: skip


def routing_record(text: str, where: str) -> RoutingRecord | ModelRoutingRecord:
    """Return the record in a file's text; raises InputError for another text or a wrong number."""
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    if isinstance(plain, dict) and plain.get("schema") == MODEL_SCHEMA:
        return decode(ModelRoutingRecord, plain, where)
    return decode(RoutingRecord, plain, where)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ascending values that this share of them does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayer:
    """Routing of one layer.

    Args:
        spread: spread of the steps, as in `LayerRouting`.
    """

    loads: ExpertLoads
    spread: float
    top_k: float

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return len(self.loads.loads or ())

    def fullest(self, ep: int) -> float:
        """Return the fullest rank's rows over the mean, in the experts' natural order."""
        return self.loads.skew_in_order(self.num_experts, self.top_k, ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayers(Tables):
    """Routing of a model's layers of experts, in their order."""

    name: str
    layers: tuple[RecordedLayer, ...]

    @once(lambda layer, ep: (layer, ep))
    def skew(self, layer: int | None, ep: int) -> RankSkew:
        """Return how full the fullest of ep ranks is; for None a lower bound of the mean layer."""
        if layer is not None:
            return self._with_spread(layer, self.fullest(layer, ep), ep)
        skews = [
            self._with_spread(number, self.fullest_at_least(number, ep), ep)
            for number in range(len(self.layers))
        ]
        return RankSkew(
            mean=fmean(skew.mean for skew in skews), p99=fmean(skew.p99 for skew in skews)
        )

    def fullest(self, layer: int, ep: int) -> float:
        """Return the fullest rank's rows of a layer over the mean."""
        return self.layers[layer].fullest(ep)

    def fullest_at_least(self, layer: int, ep: int) -> float:
        """Return a lower bound of `fullest` that is faster to compute."""
        return self.fullest(layer, ep)

    def with_numbers(self, decoder: Decoder) -> Decoder:
        """Return the model with a record's number in each layer; equal records share a number."""
        first = {layer: number for number, layer in reversed([*enumerate(self.layers)])}
        return decoder.with_records(first[layer] for layer in self.layers)

    def _with_spread(self, layer: int, mean: float, ep: int) -> RankSkew:
        """Return a mean with its layer's spread over steps; a rank has at most all rows."""
        return RankSkew(mean=mean, p99=min(float(ep), mean * self.layers[layer].spread))
