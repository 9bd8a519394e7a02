"""`moetune.model_chunks`: the chunks of a sharded model, their transfers and their memory.

`shard` attaches them to the model; `state` saves and loads through them.
"""

from collections.abc import Callable

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunk, Use
from moetune.domain.errors import InputError
from moetune.domain.units import format_bytes
from moetune.runtime.sharded.manager import ChunkManager
from moetune.runtime.sharded.placement import ChunkStats, Traffic
from moetune.runtime.sharded.stored import StoredChunk

_ATTRIBUTE = "_moetune_chunks"


class ModelChunks:
    """A view of a sharded model's chunks, see `model_chunks`.

    Args:
        clip: the optimizer's, see `clip_grad_norm_`.
    """

    def __init__(
        self,
        model: nn.Module,
        manager: ChunkManager,
        stats: ChunkStats,
        replicas: Communicator,
        clip: Callable[[float], torch.Tensor],
    ) -> None:
        self._model, self._manager, self._stats, self.replicas = model, manager, stats, replicas
        self.clip_grad_norm_ = clip

    def __repr__(self) -> str:
        moved = self.traffic
        return (
            f"{len(self.stored)} chunks, cache of {self.cache_capacity}; {moved.gathers} gathered, "
            f"{moved.reduces} reduced; at most {format_bytes(self.peak_device_bytes)} on the device"
        )

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks and their parameters."""
        return tuple(stored.chunk for stored in self._manager.chunks)

    @property
    def stored(self) -> tuple[StoredChunk, ...]:
        """The states of every chunk on this rank."""
        return tuple(self._manager.chunks)

    @property
    def order(self) -> tuple[Use, ...]:
        """The uses of the last whole training step; empty before the second one begins."""
        return self._manager.cache.order

    @property
    def cache_capacity(self) -> int:
        """Whole chunks that the cache may hold."""
        return self._manager.cache.capacity

    @property
    def traffic(self) -> Traffic:
        """Transfers since the model was sharded."""
        return self._stats.traffic

    @property
    def peak_cache_bytes(self) -> int:
        """Most bytes of whole chunks at once in the cache."""
        return self._stats.peak_cache_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Most bytes of chunks, shards and gradients at once on the device."""
        return self._stats.peak_device_bytes

    def finish_reductions(self) -> None:
        """Wait for all reductions under way, and for the steps that began behind them."""
        self._manager.finish_reductions()

    def invalidate(self) -> None:
        """Evict cached values, after the shards were changed."""
        self._manager.invalidate()


def attach(model: nn.Module, chunks: ModelChunks) -> None:
    """Attach a model's chunks to it, for `model_chunks`."""
    object.__setattr__(model, _ATTRIBUTE, chunks)
    model.register_state_dict_pre_hook(_refuse)
    model.register_load_state_dict_pre_hook(_refuse)


def _refuse(module: nn.Module, *_: object) -> None:
    raise InputError(
        f"the parameters of this {type(module).__name__} are in shards",
        "use moetune.full_state_dict and moetune.load_full_state_dict",
    )


def model_chunks(model: nn.Module) -> ModelChunks:
    """Return the chunks of a sharded model.

    Raises:
        InputError: it is not sharded.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, ModelChunks):
        raise InputError(f"this {type(model).__name__} is not sharded", "call moetune.shard first")
    return found
