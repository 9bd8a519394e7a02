"""The local experts' forward on the rows of one chunk.

Every memory policy computes here, between a chunk's dispatch and its combine. The parameters are in
`expert_module`. Where the caller gives no memory for a result, it is the tensor that a grouped
kernel makes.

R rows, D model width, H hidden width, E local experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.activations import FusedForm, activate
from moetune.runtime.moe.pairs import weigh_
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.workspace import MemoryTracker, Shape

Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """The up-projections' results, of a step or a chunk, which the backward pass needs.

    Rows are ordered by chunk and local expert, so that chunks are slices.

    Args:
        pre_RH: x·W₁ + b₁; of experts in a fused form it is twice as wide.
        gate_RH: x·W₃ for swiglu, else None.
    """

    pre_RH: torch.Tensor
    gate_RH: torch.Tensor | None

    def chunk(self, rows: slice) -> "SavedActivations":
        """Return a chunk's slice."""
        gate_RH = None if self.gate_RH is None else self.gate_RH[rows]
        return SavedActivations(pre_RH=self.pre_RH[rows], gate_RH=gate_RH)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGrads:
    """The gradients that a backward pass makes of w1, b1, w2, b2 and w3.

    Args:
        dtypes: of each gradient, the parameter's own; None where none is wanted, because the
            parameter is frozen or does not exist.
        scale: factor of all of them.
    """

    dtypes: Sequence[torch.dtype | None] = (None,) * 5
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The local experts' parameters in the dtype of a step, and their forward on a chunk.

    Args:
        w1, w3: (E, D, H); a fused w1 is (E, D, 2·H).
        w2: (E, H, D).
        form: of fused experts, in place of the activation; None of others.
    """

    activation: Activation
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    w3: torch.Tensor | None
    form: FusedForm | None = None

    @classmethod
    def of(
        cls,
        activation: Activation,
        parameters: Sequence[Any],
        dtype: torch.dtype,
        form: FusedForm | None,
        tracker: MemoryTracker,
    ) -> "ExpertWeights":
        """Return the weights from w1, b1, w2, b2 and w3, cast where they have another dtype.

        Args:
            parameters: of fused experts, in the layout of their form.
            tracker: counts the copies.
        """
        cast = list(parameters)
        for place, each in enumerate(cast):
            if each is not None and each.dtype != dtype:
                cast[place] = each.to(dtype)
                tracker.add(cast[place])
        w1, b1, w2, b2, w3 = cast
        if form is not None:
            w1, w2 = form.stored(w1), form.stored(w2)
        return cls(activation=activation, w1=w1, b1=b1, w2=w2, b2=b2, w3=w3, form=form)

    @property
    def parameters(self) -> tuple[torch.Tensor | None, ...]:
        """w1, b1, w2, b2 and w3, the order of the autograd function."""
        return self.w1, self.b1, self.w2, self.b2, self.w3

    @property
    def d_hidden(self) -> int:
        """H."""
        return self.w2.shape[1]

    @property
    def saved_widths(self) -> dict[str, int]:
        """Widths of `SavedActivations`, by name."""
        widths = {"pre": self.w1.shape[2]}
        return widths if self.w3 is None else widths | {"gate": self.w3.shape[2]}

    def hidden_shapes(self, num_rows: int, *, backward: bool) -> dict[str, Shape]:
        """Return the shapes of a phase's buffers besides `SavedActivations`, for one chunk.

        Args:
            num_rows: of the largest chunk.
        """
        if self.form is not None and backward:
            return self.form.backward_shapes(num_rows, self.d_hidden)
        names = ("hidden", "grad hidden") if backward else ("hidden",)
        return dict.fromkeys(names, (num_rows, self.d_hidden))

    def save_activations(
        self, num_rows: int, like: torch.Tensor, tracker: MemoryTracker
    ) -> SavedActivations:
        """Return uninitialised memory for all rows of a step."""
        widths = self.saved_widths
        pre_RH = tracker.empty("the experts' pre-activations", (num_rows, widths["pre"]), like)
        gate_RH = None
        if "gate" in widths:
            gate_RH = tracker.empty("the experts' gates", (num_rows, widths["gate"]), like)
        return SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)

    def project_up(
        self, rows: torch.Tensor, into: SavedActivations | None, part: RowPart
    ) -> SavedActivations:
        """Return x·W₁ + b₁, and x·W₃ for swiglu, of the rows (R, D)."""
        pre, gate = (None, None) if into is None else (into.pre_RH, into.gate_RH)
        return SavedActivations(
            pre_RH=multiply(rows, self.w1, part, pre, self.b1),
            gate_RH=None if self.w3 is None else multiply(rows, self.w3, part, gate),
        )

    def activate(self, saved: SavedActivations, out: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden values h (R, H), in `out` if there is memory."""
        pre = saved.pre_RH
        out = pre.new_empty((len(pre), self.d_hidden)) if out is None else out[: len(pre)]
        if self.form is not None:
            return self.form.activate(pre, out)
        return activate(pre, saved.gate_RH, self.activation, out)

    def project_down(
        self,
        hidden: torch.Tensor,
        weights_R1: torch.Tensor,
        out: torch.Tensor | None,
        part: RowPart,
    ) -> torch.Tensor:
        """Return weight · (h·W₂ + b₂) (R, D).

        Args:
            hidden: h; weighted in place, so that no row of width D is touched for it.
            weights_R1: the combine weights.
        """
        return multiply(weigh_(hidden, weights_R1), self.w2, part, out, self.b2, weights_R1)
