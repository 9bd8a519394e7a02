"""One phase of a step: all chunks' dispatch, experts and combine, overlapped.

N rows this rank sends, R rows it receives, D model width, C chunks.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from moetune.domain.constraints import Order as IssueOrder
from moetune.domain.layer import Phase
from moetune.domain.samples import ALONE_CHUNKS
from moetune.runtime.links import Link, Transfer
from moetune.runtime.moe.dispatch import Dispatch, Order, Regroup
from moetune.runtime.moe.schedule import issue_order
from moetune.runtime.moe.trace import SpanRecorder
from moetune.runtime.moe.workspace import MemoryTracker, Shape, Workspace

Compute = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """What both phases of a step share."""

    link: Link
    dispatch: Dispatch
    issue_order: IssueOrder
    recorder: SpanRecorder
    scratch: Workspace

    @property
    def account(self) -> MemoryTracker:
        """What counts the tensors that are no rooms of the scratch."""
        return self.scratch.account

    def shapes(self, phase: Phase, width: int, *, in_place: bool) -> dict[str, Shape]:
        """Return the rooms that `run` needs; with `in_place` that of what arrives is one."""
        order: Order = getattr(self.dispatch, phase)
        received = self.dispatch.num_received, width
        shapes = {"rows": (order.num_pairs, width)}
        shapes["received" if in_place else "results"] = received
        if any(not one.changes_nothing for one in self._regroups(order)):
            shapes["wire"] = received
        return shapes

    def run(
        self,
        phase: Phase,
        rows_ND: torch.Tensor,
        received_RD: torch.Tensor,
        compute: Compute,
        rooms: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Send every chunk's rows, compute on what arrives and bring the results back.

        Args:
            rows_ND: in the phase's sending order; what comes back takes their place.
            received_RD: room for what arrives, by piece and expert.
            compute: (chunk, its rows (R_c, D), room for its results (R_c, D), which are its
                rows where there is no room "results"); it runs while other chunks travel.
            rooms: of `shapes`.

        Returns:
            `rows_ND`.

        Raises:
            CollectiveError: an exchange failed; the text names it and the chunk.
        """
        order: Order = getattr(self.dispatch, phase)
        sent = slices_of(map(sum, order.send_counts))
        stations = self._stations(order, received_RD, rooms)
        is_alone = order.degree <= ALONE_CHUNKS
        under_way: dict[int, Transfer] = {}
        returning: list[Transfer] = []
        for step, chunk in issue_order(order.degree, self.issue_order):
            station, mine = stations[chunk], sent[chunk]
            name = f"{phase} {step} {chunk + 1} of {order.degree}"
            give, take = order.send_counts[chunk], order.receive_counts[chunk]
            if step == "dispatch":
                transfer = self.link.exchange(
                    station.arrival, rows_ND[mine], take, give, name, is_alone=is_alone
                )
                under_way[chunk] = transfer
                self.recorder.transfer(phase, step, chunk, transfer)
            elif step == "compute":
                under_way.pop(chunk).wait()
                with self.recorder.compute(phase, "experts", chunk):
                    station.work(chunk, compute)
            else:
                transfer = self.link.exchange(
                    rows_ND[mine], station.departure, give, take, name, is_alone=is_alone
                )
                returning.append(transfer)
                self.recorder.transfer(phase, step, chunk, transfer)
        for transfer in returning:
            transfer.wait()
        return rows_ND

    def _stations(
        self, order: Order, received_RD: torch.Tensor, rooms: Mapping[str, torch.Tensor]
    ) -> "list[_Station]":
        """Return each chunk's room; where regrouping changes nothing, arrivals land in place."""
        results_RD = rooms.get("results", received_RD)
        landed = slices_of(map(sum, order.receive_counts))
        stations = []
        for mine, regroup in zip(landed, self._regroups(order), strict=True):
            rows, results = received_RD[mine], results_RD[mine]
            if regroup.changes_nothing:
                stations.append(_Station(rows, rows, results, results, None))
            else:
                wire = rooms["wire"][mine]
                stations.append(_Station(rows, wire, wire, results, regroup))
        return stations

    def _regroups(self, order: Order) -> list[Regroup]:
        return [
            Regroup(self.dispatch.counts_PCL, pieces)
            for pieces in itertools.pairwise(order.chunk_pieces)
        ]


@dataclass(frozen=True, slots=True)
class _Station:
    """One chunk's room: on the wire in the order of the ranks, between in that of the experts."""

    rows: torch.Tensor
    arrival: torch.Tensor
    departure: torch.Tensor
    results: torch.Tensor
    regroup: Regroup | None

    def work(self, chunk: int, compute: Compute) -> None:
        if self.regroup is not None:
            self.regroup.by_expert(self.arrival, self.rows)
        compute(chunk, self.rows, self.results)
        if self.regroup is not None:
            self.regroup.by_source(self.results, self.departure)


def slices_of(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Return slices of these sizes, one after another."""
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(slice(low, high) for low, high in itertools.pairwise(ends))
