"""Detection of the machine: devices, their grouping into nodes, and the software on them."""

from moetune.hardware.detect import detect

__all__ = ["detect"]
