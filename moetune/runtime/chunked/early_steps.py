"""Chunks that are stepped while the backward pass goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from moetune.domain.errors import InputError
from moetune.runtime.chunked.stored import StoredChunk


class EarlySteps:
    """Steps chunks of the step at hand, on a thread where the device is another one's.

    Args:
        step: of one chunk.
    """

    def __init__(self, step: Callable[[StoredChunk], None]) -> None:
        self._step = step
        self._begun: dict[int, Future[None] | None] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetune-steps")

    def start(self, chunk: StoredChunk) -> None:
        """Step a chunk, beside the caller if the device works without the host.

        Raises:
            InputError: it was stepped before: a second backward pass brought gradients.
        """
        if chunk.number in self._begun:
            raise InputError(
                f"{chunk.names[0]} got a gradient after it was stepped in the backward pass",
                "with several backward passes a step, use moetune.shard without step_in_backward",
            )
        if chunk.is_offloaded and chunk.whole.device.type != "cpu":
            self._begun[chunk.number] = self._thread.submit(self._step, chunk)
        else:
            self._begun[chunk.number] = None
            self._step(chunk)

    def join(self) -> set[int]:
        """Wait for all steps, and return which chunks were stepped since the last time."""
        begun, self._begun = self._begun, {}
        for future in begun.values():
            if future is not None:
                future.result()
        return set(begun)
