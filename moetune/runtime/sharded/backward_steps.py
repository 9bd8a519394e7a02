"""Optimizer steps of single chunks within the backward pass, by a thread where they may overlap."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from moetune.domain.errors import InputError
from moetune.runtime.sharded.stored import StoredChunk


class BackwardSteps:
    """The steps that began since the optimizer's last one.

    Whoever reads or writes a chunk's states finishes its step first.

    Args:
        step: steps one chunk.
    """

    def __init__(self, step: Callable[[StoredChunk], None]) -> None:
        self._step = step
        self._begun: dict[int, Future[None] | None] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetune-steps")

    def start(self, chunk: StoredChunk) -> None:
        """Step a chunk: in a thread, if its shard is on the host while a GPU computes.

        Raises:
            InputError: it was stepped already, before a second backward pass.
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

    def finish(self, chunk: StoredChunk) -> None:
        """Wait for a chunk's step, if one is under way."""
        if future := self._begun.get(chunk.number):
            self._begun[chunk.number] = None
            future.result()

    def take(self) -> set[int]:
        """Return the chunks stepped since the last call, all of them finished."""
        begun, self._begun = self._begun, {}
        return set(begun)
