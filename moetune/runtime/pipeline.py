"""One phase of a step: all chunks' dispatch, experts and combine, overlapped.

N rows this rank sends, R rows it receives, D model width, C chunks.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from moetune.domain.plan import Order as IssueOrder
from moetune.domain.samples import ALONE_CHUNKS
from moetune.runtime.dispatch import Dispatch, Order
from moetune.runtime.links import Link, Transfer
from moetune.runtime.recorder import Phase, Recorder
from moetune.runtime.regroup import Regroup
from moetune.runtime.schedule import issue_order
from moetune.runtime.scratch import Scratch

Compute = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """What both phases of a step share."""

    link: Link
    dispatch: Dispatch
    issue_order: IssueOrder
    recorder: Recorder
    scratch: Scratch

    def run(
        self,
        phase: Phase,
        rows_ND: torch.Tensor,
        received_RD: torch.Tensor,
        compute: Compute,
        results_ND: torch.Tensor,
    ) -> torch.Tensor:
        """Send every chunk's rows, compute on what arrives and bring the results back.

        Args:
            rows_ND: in the phase's sending order.
            received_RD: room for what arrives, by piece and expert.
            compute: (chunk, its rows (R_c, D), room for its results (R_c, D)); it runs while
                other chunks travel.
            results_ND: room for what comes back, in the order of `rows_ND`.

        Returns:
            `results_ND`.

        Raises:
            CollectiveError: an exchange failed; the text names it and the chunk.
        """
        order: Order = getattr(self.dispatch, phase)
        sent = slices_of(map(sum, order.send_counts))
        stations = self._stations(order, received_RD)
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
                    results_ND[mine], station.departure, give, take, name, is_alone=is_alone
                )
                returning.append(transfer)
                self.recorder.transfer(phase, step, chunk, transfer)
        for transfer in returning:
            transfer.wait()
        return results_ND

    def _stations(self, order: Order, received_RD: torch.Tensor) -> "list[_Station]":
        """Return each chunk's room; where regrouping changes nothing, arrivals land in place."""
        shape = received_RD.shape
        departures_RD = self.scratch.empty("departures", shape, received_RD)
        arrivals_RD = grouped_RD = None
        stations = []
        landed = slices_of(map(sum, order.receive_counts))
        for mine, pieces in zip(landed, itertools.pairwise(order.chunk_pieces), strict=True):
            rows, departure = received_RD[mine], departures_RD[mine]
            regroup = Regroup(self.dispatch.counts_PCL, pieces)
            if regroup.changes_nothing:
                stations.append(_Station(rows, rows, departure, departure, None))
                continue
            if arrivals_RD is None or grouped_RD is None:
                arrivals_RD = self.scratch.empty("arrivals", shape, received_RD)
                grouped_RD = self.scratch.empty("grouped", shape, received_RD)
            stations.append(_Station(rows, arrivals_RD[mine], departure, grouped_RD[mine], regroup))
        return stations


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
