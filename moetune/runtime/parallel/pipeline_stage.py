"""Torch's pipeline stage, with both directions of a link in use at once on gloo as well.

Between passes of 1F1B a rank sends and receives in one batch, which torch's schedule makes as
`sends + receives`. gloo issues a batch in order: a rank that comes late queues its "ready" behind
its own data, and its neighbour sends only then. With receives first both travel at once. NCCL
starts a batch as one, whatever its order.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class _Sends(list[dist.P2POp]):
    """Sends of a batch, which come behind the receives that are added to them."""

    def __add__(self, receives: Iterable[dist.P2POp]) -> list[dist.P2POp]:  # type: ignore[override] # of list, which takes values of any type
        return [*receives, *self]


class ReceivingFirstStage(PipelineStage):
    """A stage whose sends follow the receives of their batch."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a forward pass's activations."""
        return _Sends(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a backward pass's gradients."""
        return _Sends(super().get_bwd_send_ops(bwd_chunk_id))
