"""The optimizer of a sharded model: step each chunk's shard as its reduced gradients arrive.

Last part of a training step: takes complete reductions from `ModelChunks`, and publishes new
values.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from moetune.comm.transfer import SideStream
from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.moe.total_norm import GradientParts, clip_parts, norm_of_parts
from moetune.runtime.sharded.model_chunks import ModelChunks
from moetune.runtime.sharded.stored import StoredChunk

_KINDS = (Adam, AdamW, SGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """A parameter's elements on this rank: a view of its chunk's master.

    The optimizer has a parameter for each, not one for the chunk, so that those without a gradient
    are skipped as in torch.

    Args:
        low, high: range in the chunk's master.
        first: index in the parameter of the element at `low`.
    """

    name: str
    chunk: StoredChunk
    values: nn.Parameter
    low: int
    high: int
    first: int


def parameter_shards(
    chunks: Iterable[StoredChunk], *, only_trainable: bool = True
) -> tuple[ParameterShard, ...]:
    """Return this rank's shards of parameters."""
    return tuple(
        ParameterShard(
            name=slot.name, chunk=chunk, low=low - chunk.low, high=high - chunk.low,
            values=nn.Parameter(
                chunk.master[low - chunk.low : high - chunk.low],
                requires_grad=chunk.chunk.group.is_trainable,
            ),
            first=low - slot.offset,
        )
        for chunk in chunks
        if chunk.chunk.group.is_trainable or not only_trainable
        for slot in chunk.chunk.slots
        for low in (max(slot.offset, chunk.low),)
        for high in (min(slot.offset + slot.num_elements, chunk.high),)
        if low < high
    )  # fmt: skip


class ChunkedOptimizer(Optimizer):
    """Steps the shards as the given optimizer would step the whole model.

    Parameters without a gradient on any rank since `zero_grad` are skipped, as `torch.optim` skips
    those whose `grad` is None. A step is a collective: all ranks call it. Chunks are stepped while
    later ones are still being reduced.

    Args:
        optimizer: fresh, over parameters of the model.
        reduce_stream: of the gradients' copies to the host.
    """

    def __init__(
        self, optimizer: Optimizer, chunks: ModelChunks, reduce_stream: SideStream
    ) -> None:
        self._chunks, self._reduce_stream = chunks, reduce_stream
        self._names = sorted(chunks.parameters)
        names = {id(parameter): name for name, parameter in chunks.parameters.items()}
        groups = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        self._group_number = {name: number for number, group in enumerate(groups) for name in group}
        self.shards = parameter_shards(chunks.stored)
        self._shards_by_chunk = {
            number: tuple(shards)
            for number, shards in groupby(self.shards, key=lambda shard: shard.chunk.number)
        }
        by_name = {shard.name: shard.values for shard in self.shards}
        values = [[by_name[name] for name in group if name in by_name] for group in groups]
        self._inner = over_shards(optimizer, values)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch
        """Step every shard and publish the values for the next gathers.

        Raises:
            RankMismatchError: the ranks used their chunks in different orders.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done = self._step_complete()
        got = self._agree()
        for chunk in self._chunks.stored:
            if chunk.number not in done:
                self._step_chunk(chunk, got)
        self._chunks.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT002 - torch's signature
        """Discard all gradients."""
        self._chunks.finish_reductions()
        self._chunks.got_gradient.clear()
        for chunk in self._chunks.stored:
            chunk.has_gradient = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm.

        As `torch.nn.utils.clip_grad_norm_` on the whole model. A collective.
        """
        self._chunks.finish_reductions()
        self._reduce_stream.synchronize()
        replicas = self._chunks.replicas
        zero = torch.zeros((), dtype=torch.float64, device=replicas.device)
        grads = [
            shard.chunk.gradient[shard.low : shard.high]
            for shard in self.shards
            if shard.chunk.has_gradient and shard.chunk.gradient is not None
        ]
        parts: GradientParts = {(replicas,): [zero, *grads]}
        norm = norm_of_parts(parts)
        clip_parts(parts, norm, max_norm)
        return norm

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The groups' settings, such as the learning rate."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]

    @settings.setter
    def settings(self, settings: list[dict[str, Any]]) -> None:
        for group, new in zip(self.param_groups, settings, strict=True):
            group.update(new)

    def _step_complete(self) -> set[int]:
        """Step the chunks with all their gradients, as reductions end, and return their numbers."""
        # Chunks that are complete already go first: their steps overlap the last reductions,
        # which hides the optimizer on a slow network.
        done = {chunk.number for chunk in self._chunks.stored if self._is_complete(chunk)}
        for number in done:
            self._step_chunk(self._chunks.stored[number])
        while (chunk := self._chunks.finish_reduction()) is not None:
            if self._is_complete(chunk):
                self._step_chunk(chunk)
                done.add(chunk.number)
        return done

    def _is_complete(self, chunk: StoredChunk) -> bool:
        """Return whether all gradients of a chunk are reduced into this rank's shard.

        Then all of its parameters are stepped, without `_agree`: each has a gradient here.
        """
        return (
            chunk.has_gradient
            and not chunk.has_unreduced_gradients
            and chunk.phase != "reducing"
            and self._chunks.got_gradient.issuperset(chunk.names)
        )

    @torch.no_grad()
    def _step_chunk(self, chunk: StoredChunk, got: Container[str] | None = None) -> None:
        """Step this rank's shard of a chunk: the parameters in `got`, or all."""
        if not chunk.has_gradient or chunk.gradient is None:
            return
        chunk.make_readable()
        chunk.make_writable()
        shards = self._shards_by_chunk.get(chunk.number, ())
        for shard in shards:
            if got is None or shard.name in got:
                shard.values.grad = chunk.gradient[shard.low : shard.high]
        self._step_inner(shards)
        for shard in shards:
            shard.values.grad = None
        chunk.publish()

    def _step_inner(self, shards: Sequence[ParameterShard]) -> None:
        """Step these shards: the whole model's groups would be walked once for every chunk."""
        members: dict[int, list[nn.Parameter]] = {}
        for shard in shards:
            if shard.name in self._group_number:  # else the optimizer never had it
                members.setdefault(self._group_number[shard.name], []).append(shard.values)
        groups = [
            {**self.param_groups[number], "params": values} for number, values in members.items()
        ]
        self._inner.param_groups = groups
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = self.param_groups

    def _agree(self) -> set[str]:
        """Return the parameters that got a gradient on some rank, once the orders are equal."""
        got = self._chunks.got_gradient
        if self._chunks.replicas.num_ranks == 1:
            return got
        seen = self._chunks.cache.digest
        # The maxima of `seen` and of its negative are opposite only if all ranks have the same.
        flags = [*(name in got for name in self._names), seen, -seen]
        mine = torch.tensor(flags, dtype=torch.int64, device="cpu")
        found = self._chunks.replicas.all_reduce_values(
            mine, "the agreement on a step", op="max"
        ).tolist()
        if found[-2] != -found[-1]:
            raise RankMismatchError(
                "the ranks gathered and reduced their chunks in different orders",
                "every rank must call the same modules in the same order",
            )
        return {name for name, flag in zip(self._names, found, strict=False) if flag}


def over_shards(optimizer: Optimizer, values: list[list[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same class and settings over other parameters.

    Args:
        values: of each of the optimizer's groups.
    """
    groups: list[dict[str, Any]] = [
        {**_settings(group), "params": members}
        for group, members in zip(optimizer.param_groups, values, strict=True)
    ]
    return _KINDS[_KINDS.index(type(optimizer))](groups)


def check_optimizer(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Check that an optimizer can step shards of this model.

    Raises:
        InputError: it is of an unknown class or for another model, or has stepped before, or the
            model has no parameters.
    """
    if not parameters:
        raise InputError("the model has no parameters")
    if type(optimizer) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise InputError(
            f"{type(optimizer).__name__} cannot step shards of parameters", f"use one of {known}"
        )
    if optimizer.state:
        raise InputError(
            f"the optimizer has states of {len(optimizer.state)} parameters already",
            "shard the model before the first step",
        )
    known_ids = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known_ids:
                raise InputError(
                    f"parameter {place} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's {len(known_ids)}",
                    "build the optimizer on model.parameters()",
                )


def state_copies(optimizer: Optimizer) -> int:
    """Return the number of state tensors that the optimizer has for every parameter."""
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2 + any(group["amsgrad"] for group in optimizer.param_groups)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, with torch's fused kernel if the caller did not choose one."""
    settings = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
    if settings.get("fused") is None and not settings.get("foreach"):
        settings["fused"] = not (settings.get("capturable") or settings.get("differentiable"))
    return settings


def first_states(optimizer: Optimizer, shard: ParameterShard) -> dict[str, torch.Tensor]:
    """Return a shard's optimizer states, which are made as zeros before the first step."""
    state: dict[str, Any] = optimizer.state[shard.values]
    group = next(
        (
            group
            for group in optimizer.param_groups
            if any(each is shard.values for each in group["params"])
        ),
        None,
    )
    if not state and group is not None:
        keys = ["exp_avg", "exp_avg_sq"] if "betas" in group else ["momentum_buffer"]
        if "betas" in group:
            # As torch: with the values only if a kernel reads it, else it would be read back from
            # a GPU for every parameter and step.
            is_read_by_kernels = group.get("fused") or group.get("capturable")
            device = shard.values.device if is_read_by_kernels else torch.device("cpu")
            state["step"] = torch.zeros((), device=device)
        elif not group["momentum"]:
            keys = []
        if group.get("amsgrad"):
            keys.append("max_exp_avg_sq")
        state.update({key: torch.zeros_like(shard.values.detach()) for key in keys})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
