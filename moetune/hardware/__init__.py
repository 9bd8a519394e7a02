"""What machine this is: detect devices, their grouping and the software on them."""

from moetune.hardware.detect import detect

__all__ = ["detect"]
