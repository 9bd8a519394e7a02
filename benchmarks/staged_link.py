"""A wire for one GPU alone: through the host's memory and back."""

import torch

from moetune.comm.group import Done, OneRank, Transfer


class _StagedTransfer:
    def __init__(
        self,
        event: torch.cuda.Event,
        tensors: tuple[torch.Tensor, ...],
        under_way: dict["_StagedTransfer", None],
    ) -> None:
        self._event, self._device = event, tensors[0].device
        self._tensors: tuple[torch.Tensor, ...] = tensors
        self._under_way = under_way
        under_way[self] = None  # as NCCL's: its tensors live on if nobody keeps the transfer

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
        self._under_way.pop(self, None)

    def future(self) -> None:
        return None


class HostStagedLink(OneRank):
    """One GPU's stand-in for a wire: device to pinned host to device on its own stream.

    A sum of one rank takes the same way, and stays what it is.

    The pinned buffer is allocated once and grows to the largest exchange; transfers share it
    safely because they run one after the other on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._host = torch.empty(0, dtype=torch.uint8, pin_memory=True)
        self._under_way: dict[_StagedTransfer, None] = {}

    def all_to_all(
        self, output: torch.Tensor, rows: torch.Tensor, *_: object, **__: object
    ) -> Transfer:
        """Start the two copies."""
        return self._travel(output, rows)

    def all_reduce(self, values: torch.Tensor, *_: object, **__: object) -> Transfer:
        """Start the two copies; what the host holds, as ballots of the ranks, is a sum already."""
        return Done() if values.device.type == "cpu" else self._travel(values, values)

    def _travel(self, output: torch.Tensor, rows: torch.Tensor) -> Transfer:
        num_bytes = rows.numel() * rows.element_size()
        if self._host.numel() < num_bytes:
            self._stream.synchronize()
            self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        staging = self._host[:num_bytes].view(rows.dtype).view(rows.shape)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            staging.copy_(rows, non_blocking=True)
            output.copy_(staging, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _StagedTransfer(event, (output, rows), self._under_way)
