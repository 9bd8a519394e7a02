"""Flags of `moetune memory`, which are the arguments of `moetune.memory`: what they ask for."""

from dataclasses import dataclass
from typing import cast

from moetune.domain.cluster import process_bytes
from moetune.domain.errors import InputError
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, ZeroStage
from moetune.domain.units import full_dtype, parse_count
from moetune.workflows.flags import modules_of, parsed
from moetune.workflows.memory import MemoryQuestion
from moetune.workflows.models import find_decoder_model
from moetune.workflows.training import check_names


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """Flags as they were given; None for those that were not.

    Args:
        model: a name, or the path of a `config.json`.
        device_memory, seq: texts with a unit.
    """

    model: str
    device_memory: str = "80GB"
    world_size: int | None = None
    global_batch: int | None = None
    seq: str = "4k"
    micro_batch: int = 1
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero: int | None = None
    recompute: str | None = None
    optimizer: str | None = None
    dtype: str = "bfloat16"
    target: str = "megatron"

    def question(self) -> MemoryQuestion:
        """Return the question of these flags.

        Raises:
            InputError: the model is a single layer, or a value is wrong.
        """
        runtime = find_target(self.target)
        decoder = find_decoder_model(self.model, world_size=self.world_size or 1).decoder
        if decoder is None:
            raise InputError(
                f"{self.model} is a single layer of a paper, not a whole model",
                f"plan it:  moetune plan --model {self.model}",
            )
        dtype, optimizer = check_names(
            full_dtype(self.dtype), self.optimizer or runtime.optimizers[0]
        )
        return MemoryQuestion(
            decoder=decoder, world_size=self.world_size, global_batch=self.global_batch,
            length=parsed(self.seq, parse_count, "--seq") or 0, dtype=dtype, optimizer=optimizer,
            pins=LayoutRequest(
                tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep, micro_batch=self.micro_batch,
                zero=cast("ZeroStage | None", self.zero),
                recompute=None if self.recompute is None else modules_of(self.recompute),
            ),
            target=runtime,
            device_bytes=parsed(self.device_memory, process_bytes, "--device-memory") or 0,
        )  # fmt: skip
