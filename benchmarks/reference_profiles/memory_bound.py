"""Memory-bound operations of a layer: lines through those of one H100, by the rate of the memory.

No published table has them. Measured by `make gpu` on an H100 with 3.35 TB/s (docs/results/gpu.md);
start-ups are taken to be the host's and the kernels', and the same on all devices.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moetune.domain.profile import RowsLine

_DTYPE = "bfloat16"
_H100_BYTES_PER_SECOND = 3.35e12
_LINES: Mapping[str, tuple[float, float]] = MappingProxyType({
    "gelu": (6.2e-6, 4.33e-12),
    "gelu_backward": (7.0e-6, 2.68e-12),
    "swiglu": (5.6e-6, 3.42e-12),
    "swiglu_backward": (9.5e-6, 7.47e-12),
    "gather": (2.7e-6, 1.43e-12),
    "scatter_add": (3.3e-6, 8.72e-12),
    "gate": (1.6e-5, 5.1e-11),
    "gate_backward": (1.16e-5, 2.7e-11),
})  # fmt: skip
"""Seconds at the start, and of an element: from the most and the fewest rows of each."""
_LAUNCHES: Mapping[str, tuple[float, float]] = MappingProxyType({
    "chunked_layer": (1.92e-3, 3.2e-4),
    "chunked_layer_step": (3.77e-3, 1.03e-3),
})  # fmt: skip
"""The host's seconds of a layer, and of each chunk: 1,024 tokens of 16 experts of 512 × 1024."""


def rows_lines(hbm_bytes_per_second: float) -> Iterator[RowsLine]:
    """Yield the lines of a device with that rate of its memory."""
    slower = _H100_BYTES_PER_SECOND / hbm_bytes_per_second
    for op, (alpha, beta) in _LINES.items():
        yield RowsLine(
            op=op, dtype=_DTYPE, alpha_seconds=alpha,
            beta_seconds_per_element=float(f"{beta * slower:.3g}"),
        )  # fmt: skip
    for op, (alpha, beta) in _LAUNCHES.items():
        yield RowsLine(
            op=op, dtype=_DTYPE, alpha_seconds=alpha, beta_seconds_per_element=beta
        )  # fmt: skip
