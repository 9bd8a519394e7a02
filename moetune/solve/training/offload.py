"""Activations and optimizers in host memory, as Megatron-Core and Transformer Engine have them.

Activations are whole blocks' of a micro-batch, n of L blocks spread evenly: each is copied out
while the blocks behind it are computed, and copied back before its own backward pass. So a pass
takes as long as its computation or its copies.

Of an optimizer the host keeps a share of the states and computes it, behind the device's own share.
"""

import math
from collections import Counter

from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.activations import block_bytes

HOST_OPTIMIZER_BYTES = 18
"""Of a parameter: master copy, two moments and the gradient in float32, the parameter in bfloat16
(`HybridDeviceOptimizer`, with gradients and parameters in pinned memory)."""
OPTIMIZER_SHARES = (0.25, 0.5, 0.75, 1.0)
"""That a search tries."""
BUFFERED_BLOCKS = 2
"""Blocks on the device that are being copied, and computed meanwhile."""


def offloaded_share(layout: FoldedLayout, job: TrainingJob) -> float:
    """Return the share of the blocks whose activations are in host memory, in whole blocks."""
    return layout.offloaded_layers(job.decoder) / job.decoder.num_layers


def activation_bytes(layout: FoldedLayout, job: TrainingJob) -> float:
    """Return the bytes of all blocks' activations for one micro-batch."""
    num_blocks = Counter(job.decoder.kind_of_block)
    return math.fsum(
        num_blocks[place] * block_bytes(kind, job, layout)
        for place, kind in enumerate(job.decoder.kinds)
    )
