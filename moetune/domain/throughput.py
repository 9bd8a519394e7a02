"""Model FLOPs of a step, their rate on one device, and its share of the device's peak (MFU).

Model FLOPs are those of `Decoder.flops_per_token`: three times the forward GEMMs, whatever the
plan recomputes. MFU: PaLM, Appendix B, with the peak of the data sheet.
"""

from dataclasses import dataclass

from moetune.domain.layer import Workload

FORWARD_AND_BACKWARD = 3
OPERATIONS_OF_A_MAC = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Model FLOPs a second of one device.

    Args:
        mfu: their share of the device's peak; None where no peak is known.
    """

    flops_per_second: float
    mfu: float | None = None

    @property
    def peak_flops_per_second(self) -> float | None:
        """The peak that the share is of."""
        return self.flops_per_second / self.mfu if self.mfu else None

    def over(self, seconds: float, predicted: float) -> "Throughput | None":
        """Return that of the same work in `seconds` instead of `predicted`; None of no time."""
        if seconds <= 0:
            return None
        factor = predicted / seconds
        mfu = None if self.mfu is None else self.mfu * factor
        return Throughput(flops_per_second=self.flops_per_second * factor, mfu=mfu)


def rate(flops: float, seconds: float, peak: float | None) -> Throughput | None:
    """Return the throughput of that many FLOPs of one device; None for a step of no time."""
    if seconds <= 0:
        return None
    found = flops / seconds
    return Throughput(flops_per_second=found, mfu=None if peak is None else found / peak)


def layer_flops(workload: Workload) -> float:
    """Return the model FLOPs of one device in a step of an MoE layer; the router's do not count.

    Tensor-parallel ranks share the FLOPs of the same tokens.
    """
    sharing = workload.world_size if workload.expert_parallel == "tensor" else 1
    macs = workload.layer.num_gemms * workload.macs / sharing
    return OPERATIONS_OF_A_MAC * FORWARD_AND_BACKWARD * macs
