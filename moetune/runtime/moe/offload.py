"""Copy activations between device and host, overlapped with computation and communication.

The memory policy `reuse` starts these copies for the strategies S1 to S3. With CUDA each direction
has a stream. On a CPU both are the same memory, and the caller copies at once.
"""

from collections.abc import Mapping

import torch

from moetune.comm.group import Wait
from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.errors import MoetuneError
from moetune.domain.units import pinned_bytes
from moetune.runtime.moe.workspace import allocated, empty, short_of


class DeviceCopies:
    """Copies of tensors to and from the host: on two streams of a GPU, or at once on a CPU.

    The tensors' device need not be the current device, and may change between steps.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._under_way: dict[object, Wait] = {}

    def __reduce__(self) -> tuple[type["DeviceCopies"], tuple[()]]:
        """Return a fresh object: a copy makes new streams."""
        return DeviceCopies, ()

    def save(self, rows: torch.Tensor, host: torch.Tensor) -> Wait:
        """Start a copy to the host, after all work issued to the current stream so far."""
        return self._start("to the host", rows.device, rows, host)

    def load(self, host: torch.Tensor, rows: torch.Tensor) -> Wait:
        """Start a copy to the device, after all work issued to the current stream so far."""
        return self._start("to the device", rows.device, host, rows)

    def drain(self) -> None:
        """Order the current streams after every copy that nobody has waited for."""
        for wait in tuple(self._under_way.values()):
            wait()

    def _start(
        self, way: str, device: torch.device, source: torch.Tensor, target: torch.Tensor
    ) -> Wait:
        if device.type != "cuda":
            target.copy_(source)
            return _nothing
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        stream = self._streams[device, way]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        done = stream.record_event()
        # Referenced until the wait, so that the allocator does not hand out their memory earlier.
        held, key = [source, target], object()

        def wait() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            held.clear()
            self._under_way.pop(key, None)

        self._under_way[key] = wait
        return wait


def _nothing() -> None:
    """Wait for nothing."""


def host_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return host memory as bytes, pinned for a GPU.

    torch's allocator of pinned memory keeps what steps free, and takes up to twice the size.

    Raises:
        AllocationError: the host lacks memory.
    """
    what = "activations that leave the device"
    if not pinned:
        on_host = torch.empty(0, dtype=torch.uint8, device="cpu")
        return empty(what, (num_bytes,), on_host, memory="host")
    size = pinned_bytes(num_bytes)
    try:
        return allocated((size,), torch.uint8, torch.device("cpu"), pinned=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise short_of(f"{what}: {size} page-locked bytes ({reason})", "host") from error


class Offload:
    """A step's copies to the host in the forward pass, and back in the backward pass.

    Host tensors hold the rows of all chunks until `end`, or until this object is garbage: the
    backward pass may never come.

    Args:
        is_needed: False without gradients, because no backward pass can follow.

    Attributes:
        offloads_input: whether the experts' inputs are copied.
        offloads_middle: whether the pre-activations are copied.
    """

    def __init__(self, strategy: Strategy, copies: DeviceCopies, *, is_needed: bool) -> None:
        self.offloads_input = strategy in OFFLOADS_INPUT
        self.offloads_middle = strategy in OFFLOADS_MIDDLE
        self._copies, self._is_needed = copies, is_needed
        self._host: dict[str, torch.Tensor] = {}
        self._saving: dict[tuple[str, int], Wait] = {}

    def begin(self, num_rows: int, like: torch.Tensor, middle_widths: Mapping[str, int]) -> None:
        """Allocate host memory for the rows of a step.

        Args:
            like: a tensor of the inputs' width, dtype and device.
            middle_widths: widths of the pre-activations, by name.

        Raises:
            AllocationError: the host lacks memory.
        """
        widths = {"input": like.shape[1]} if self.offloads_input else {}
        widths |= middle_widths if self.offloads_middle else {}
        if self._is_needed and widths:
            size = num_rows * sum(widths.values()) * like.element_size()
            buffer = host_memory(size, pinned=like.is_cuda)
            values = buffer[:size].view(like.dtype).split([num_rows * n for n in widths.values()])
            self._host = {
                name: part.view(num_rows, width)
                for (name, width), part in zip(widths.items(), values, strict=True)
            }

    def save(self, name: str, buffer: int, rows: torch.Tensor, mine: slice) -> None:
        """Start copying a chunk's rows to the host, if the strategy offloads them.

        Args:
            name: "input", "pre" or "gate".
            buffer: number of the device buffer, for `wait_for_save`.
            mine: the chunk's slice of all rows.
        """
        if name in self._host:
            self._saving[name, buffer] = self._copies.save(rows, self._host[name][mine])

    def wait_for_save(self, name: str, buffer: int) -> None:
        """Wait for the last save from a buffer, before it is overwritten."""
        saving = self._saving.pop((name, buffer), None)
        if saving is not None:
            saving()

    def wait_for_saves(self) -> None:
        """Wait for all saves, so that the backward pass can load."""
        for saving in self._saving.values():
            saving()
        self._saving.clear()

    def load(self, name: str, rows: torch.Tensor, mine: slice) -> Wait:
        """Start copying a chunk's rows back.

        Raises:
            MoetuneError: the host memory was given back, and a second backward pass needs it.
        """
        if name not in self._host:
            raise MoetuneError(
                "a second backward pass through a layer whose activations were in host memory",
                "use memory_reuse='S4' or 'none' where the graph is retained",
            )
        return self._copies.load(self._host[name][mine], rows)

    def end(self) -> None:
        """Give the host memory back, after any copies that a failed step left under way."""
        self._copies.drain()
        self._host = {}
