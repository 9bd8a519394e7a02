"""Groups of a layout as rows of ranks, and which ranks share experts and their widths.

Rank r of a stage's ranks has, of the group r // (ep·etp), the experts of place r // etp mod ep and
their shard r mod etp: ranks that share an expert's width are consecutive, in one node.
"""

import datetime as dt

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetune.domain.layout import Layout
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.placement import EXPERTS
from moetune.runtime.moe.width import WIDTH


class GroupsByRows:
    """Groups of ranks by their rows: equal rows are one group."""

    def __init__(self, timeout: dt.timedelta | None) -> None:
        self._timeout = timeout
        self.named: dict[str, dist.ProcessGroup] = {}
        self._by_rows: dict[str, dist.ProcessGroup] = {}

    def add(
        self, name: str, rows: torch.Tensor, known: dist.ProcessGroup | None = None
    ) -> dist.ProcessGroup:
        """Return this rank's group of the rows, each of which is a group."""
        listed = rows.tolist()
        key = str(sorted(listed))
        found = known or self._by_rows.get(key)
        if found is None:
            found, _ = dist.new_subgroups_by_enumeration(
                listed, timeout=self._timeout, group_desc=f"moetune: {name}"
            )
        assert found is not None  # noqa: S101 - the rows have all ranks
        self._by_rows.setdefault(key, found)
        self.named[name] = found
        return found


def expert_rows(
    layout: Layout | FoldedLayout, ranks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ranks that share experts, in rows, and those with the same ones."""
    if isinstance(layout, Layout) and layout.expert_parallel == "tensor":
        return ranks.flatten(0, -2), ranks.movedim(1, -1).flatten(0, 1)
    etp = layout.etp if isinstance(layout, FoldedLayout) else 1
    cut = ranks.reshape(layout.pp, -1, layout.ep * etp)
    return cut.flatten(0, 1), cut.movedim(1, -1).flatten(0, 1)


def width_mesh(
    layout: Layout | FoldedLayout, experts: torch.Tensor, made: GroupsByRows, device_type: str
) -> DeviceMesh | None:
    """Return this rank's group of experts as a mesh with the ranks that share their widths.

    Args:
        experts: the ranks that share experts, in rows.
    """
    if not isinstance(layout, FoldedLayout) or layout.etp == 1:
        return None
    every = experts.view(-1, layout.ep, layout.etp)
    groups = [
        made.add("shards of experts", every.movedim(1, -1).flatten(0, 1)),
        made.add("widths of experts", every.flatten(0, 1)),
    ]
    [mine] = every[(every == dist.get_rank()).flatten(1).any(1)]
    return DeviceMesh.from_group(groups, device_type, mesh=mine, mesh_dim_names=(EXPERTS, WIDTH))
