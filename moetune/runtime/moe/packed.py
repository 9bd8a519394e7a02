"""Dispatch of rows in 8 bits: packed with their scales before the wire, unpacked behind it.

`keep` sends a chunk's rows through this where the recipe of a layer says so. Values and scales are
one exchange. What arrives is written in the dtype of the step, which holds it exactly.
"""

import torch

from moetune.domain.quantization import Format, packed_width
from moetune.formats.scaled import pack, quantize, unpack
from moetune.runtime.moe.dispatch import PhaseOrder
from moetune.runtime.moe.executor import Executor, PipelineContext
from moetune.runtime.moe.workspace import MemoryTracker


class PackedDispatch:
    """The chunks of one phase on their way to the experts.

    Args:
        form: of the rows on the wire.
    """

    def __init__(self, executor: Executor, form: Format, tracker: MemoryTracker) -> None:
        self._executor, self._form, self._tracker = executor, form, tracker
        self._arriving: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, context: PipelineContext, executor: Executor) -> "PackedDispatch | None":
        """Return that of a layer's recipe; None where rows travel as they are."""
        form = None if context.quantization is None else context.quantization.dispatch
        return None if form is None else cls(executor, form, context.tracker)

    def dispatch(
        self, chunk: int, order: PhaseOrder, rows: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Start sending rows (R, D), for `arrive` to write into `into`."""
        packed = pack(quantize(rows, self._form))
        shape = len(into), packed_width(into.shape[1], self._form)
        arriving = self._tracker.empty("rows on the wire", shape, packed)
        self._tracker.add(packed)
        self._arriving[chunk] = arriving, into
        self._executor.dispatch(chunk, order, packed, arriving)

    def arrive(self, chunk: int) -> None:
        """Write the rows of a chunk whose transfer has ended."""
        arrived, into = self._arriving.pop(chunk)
        into.copy_(unpack(arrived, into.shape[1], self._form).dequantize(into.dtype))
