"""Groups of a layout as rows of ranks, and which ranks share experts.

Rank r of a stage's ranks has, of the group r // ep, the experts of place r mod ep. Tensor-parallel
ranks have the same tokens: gradients of experts are summed over the others alone.
"""

import datetime as dt

import torch
import torch.distributed as dist

from moetune.domain.training import FoldedLayout


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


def expert_rows(layout: FoldedLayout, ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ranks that share experts, in rows, and those with the same ones.

    Args:
        ranks: (pp, dp, tp).
    """
    cut = ranks if layout.tp > 1 else ranks.reshape(layout.pp, -1, layout.ep)
    return ranks.reshape(-1, layout.ep), cut.movedim(1, -1).flatten(0, 1)
