"""What the phases of a step with reused memory share: its parts, and the room of T_M."""

from dataclasses import dataclass

import torch

from moetune.domain.layer import Activation
from moetune.runtime.activations import hidden_shapes
from moetune.runtime.experts import multiply
from moetune.runtime.offload import Offload
from moetune.runtime.pipeline import Pipe
from moetune.runtime.reuse_phase import Chunks, RingShape
from moetune.runtime.rings import Ring

Parameters = tuple[torch.Tensor | None, ...]
SLOTS = 2
"""Of a ring at the experts: rows of one chunk arrive, or leave, beside those at the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What both phases of a step share."""

    pipe: Pipe
    activation: Activation
    offload: Offload
    top_k: int
    parameters: Parameters

    @property
    def w1(self) -> torch.Tensor:
        """The first matrices of the experts (L, D, H)."""
        w1 = self.parameters[0]
        assert w1 is not None  # noqa: S101 - every expert has one
        return w1

    def shapes(self, chunks: Chunks, *, backward: bool) -> dict[str, RingShape]:
        """Return the rooms of hidden width for one chunk (T_M), and what regrouping needs."""
        width, d_hidden = self.w1.shape[1:]
        names = ["pre"] if self.parameters[4] is None else ["pre", "gate"]
        names += hidden_shapes(self.activation, 0, d_hidden, backward=backward)
        shapes = dict.fromkeys(names, RingShape(num_slots=1, width=d_hidden))
        if chunks.changes_order:
            shapes["grouped"] = RingShape(num_slots=1, width=width)
        return shapes


class Middle:
    """One chunk's pre-activations, in one buffer for all chunks (T_M)."""

    def __init__(self, chunks: Chunks, rings: dict[str, Ring], step: Step) -> None:
        self._chunks, self._step = chunks, step
        self._rings = {name: rings[name] for name in ("pre", "gate") if name in rings}

    def rooms(self, chunk: int) -> dict[str, torch.Tensor]:
        """Return the chunk's rooms by name, whatever is in them."""
        rows = self._chunks.num_received[chunk]
        return {name: ring.take(chunk, rows) for name, ring in self._rings.items()}

    def compute(self, chunk: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return x·W₁ + b₁, and x·W₃ for swiglu, of the chunk's rows."""
        rooms, blocks = self.rooms(chunk), self._chunks.slots.blocks[chunk]
        _, b1, _, _, w3 = self._step.parameters
        multiply(rows, self._step.w1, blocks, rooms["pre"], b1)
        if w3 is not None:
            multiply(rows, w3, blocks, rooms["gate"])
        return rooms
