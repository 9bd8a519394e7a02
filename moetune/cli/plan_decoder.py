"""`moetune plan --model` with a Hugging Face model: the layout of its training."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import typer

from moetune.cli.flags import parsed
from moetune.cli.session import Session
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS
from moetune.domain.units import parse_bytes

if TYPE_CHECKING:
    from moetune.domain.profile import Profile
    from moetune.domain.training import LayoutRequest, Recompute
    from moetune.workflows.training import TrainingRequest

T = TypeVar("T", bound=str)

_OF_LAYERS = (
    "d_model", "d_hidden", "num_experts", "top_k", "activation", "tokens", "batch", "num_layers",
    "num_heads", "vocab", "moe_every", "dp", "expert_parallel", "sequence_parallel", "no_offload",
    "memory_taken", "strategy", "forward_degree", "backward_degree", "max_degree",
    "min_chunk_tokens", "order", "allow_modelled",
)  # fmt: skip
_OF_DECODERS = (
    "global_batch", "cp", "vpp", "etp", "recompute", "overlap", "cuda_graphs", "target", "routing",
    "offload_activations", "offload_optimizer", "optimizer", "schedule", "stages", "dispatcher_sms",
    "front",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    """Flags of a decoder's plan as they were given; None for those that were not."""

    model: str
    world_size: int | None
    num_nodes: int | None
    global_batch: int | None
    length: int | None
    dtype: str | None
    memory_limit: str | None
    cp: int | None
    tp: int | None
    pp: int | None
    vpp: int | None
    ep: int | None
    etp: int | None
    micro_batch: int | None
    recompute: str | None
    dispatcher: str | None
    overlap: str | None
    zero: int | None
    cuda_graphs: str | None
    offload_activations: float | None
    offload_optimizer: float | None
    target: str
    routing: str | None
    optimizer: str | None
    schedule: str | None
    stages: str | None
    dispatcher_sms: int | None

    def request(self, profile: "Profile") -> "TrainingRequest":
        """Return the request that the flags make.

        Raises:
            InputError: a value is wrong, or one is missing.
        """
        from moetune.domain.targets import find_target
        from moetune.workflows.models import find_decoder_model
        from moetune.workflows.training import TrainingRequest, read_routing, training_job

        ranks = self.world_size
        if self.num_nodes is not None:
            if ranks is not None:
                raise InputError("--nodes and --world-size exclude each other", "give one of them")
            ranks = self.num_nodes * profile.machine.devices_per_node
        target = find_target(self.target)
        decoder = find_decoder_model(self.model, world_size=ranks or 1).decoder
        assert decoder is not None  # noqa: S101 - only papers' layers have none
        return TrainingRequest(
            job=training_job(
                decoder, world_size=ranks, global_batch=self.global_batch, length=self.length,
                dtype=self.dtype, routing=read_routing(self.routing),
                optimizer=self.optimizer or target.optimizers[0], profile=profile,
            ),
            pins=self._pins(),
            target=target,
            memory_limit_bytes=parsed(self.memory_limit, parse_bytes, "--memory-limit"),
        )  # fmt: skip

    def _pins(self) -> "LayoutRequest":
        from moetune.domain.pipeline import SCHEDULES, read_stages
        from moetune.domain.training import (
            CUDA_GRAPHS,
            OVERLAPS,
            TOKEN_DISPATCHERS,
            LayoutRequest,
            ZeroStage,
        )

        return LayoutRequest(
            cp=self.cp, tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp,
            micro_batch=self.micro_batch,
            recompute=None if self.recompute is None else modules_of(self.recompute),
            dispatcher=_one_of("--dispatcher", self.dispatcher, TOKEN_DISPATCHERS),
            dispatcher_sms=self.dispatcher_sms,
            overlap=_one_of("--overlap", self.overlap, OVERLAPS),
            cuda_graphs=_one_of("--cuda-graphs", self.cuda_graphs, CUDA_GRAPHS),
            offload_activations=self.offload_activations,
            offload_optimizer=self.offload_optimizer,
            zero=cast("ZeroStage | None", self.zero),
            schedule=_one_of("--schedule", self.schedule, SCHEDULES),
            stages=None if self.stages is None else read_stages(self.stages),
        )  # fmt: skip


def is_decoder_name(name: str) -> bool:
    """Return whether `--model` names a Hugging Face model, and not one of the papers'."""
    from moetune.huggingface.registry import resolve_name

    if name in MODELS:
        return False
    return resolve_name(name) is not None or Path(name).exists() or name.endswith(".json")


def plan_decoder(
    session: Session,
    flags: TrainingFlags,
    *,
    profile: str | None,
    output: Path | None,
    save: bool,
    with_front: bool,
    as_json: bool,
) -> None:
    """Plan a decoder's training, print the plan and save it."""
    from functools import partial

    from moetune.workflows import wiring
    from moetune.workflows.files import write_text
    from moetune.workflows.profiles import find_profile
    from moetune.workflows.training import plan_training
    from moetune.workflows.views.training import training_sections

    settings, screen = session.settings, session.screen
    found = find_profile(profile or settings.profile, stores=partial(wiring.find_store, settings))
    plan = plan_training(flags.request(found.profile), found.profile, with_front=with_front)
    stored = plan.stored
    if save:
        with wiring.open_store(settings) as store:
            store.save_training_plan(stored)
    if output is not None:
        write_text(output, stored.text)
    if as_json:
        screen.document(plan.document)
    else:
        screen.answer(tuple(training_sections(stored)))
        screen.say()
    short = plan.id[:6]
    if output is not None:
        screen.note(f"Plan {short} is written to {output}.")
    if not save:
        screen.note(f"Plan {short} is not saved in the store.")
    elif as_json:
        screen.note(f"Plan {short} saved.")
    else:
        screen.line(f"Plan {short} saved. Explain it: moetune explain {short}")
        target = plan.request.target.name
        screen.line(f"Write it for {target}: moetune export {short} --to {target}")


def refuse_flags_of_layers(context: typer.Context, model: str) -> None:
    """Raise InputError where a flag was given that a decoder's plan does not have."""
    given = [name for name in _OF_LAYERS if _was_given(context, name)]
    if given:
        raise InputError(
            f"{_flag(given[0])} is for layers and the models of the papers, not for {model}",
            "omit it; pin the layout with --tp, --pp, --ep and the like",
        )


def refuse_flags_of_decoders(context: typer.Context) -> None:
    """Raise InputError where a flag was given that only a decoder's plan has."""
    given = [name for name in _OF_DECODERS if _was_given(context, name)]
    if given:
        raise InputError(
            f"{_flag(given[0])} is for Hugging Face models",
            "omit it, or name such a model with --model, such as qwen3-30b-a3b",
        )


def sharded_states(zero: int | None) -> bool | None:
    """Return whether replicas of a paper's model shard their states.

    Raises:
        InputError: a stage that the runtime does not have.
    """
    if zero is None or zero <= 1:
        return None if zero is None else bool(zero)
    raise InputError(
        f"--zero {zero} is for Hugging Face models",
        "use --zero 0 or 1: moetune's runtime shards nothing or all states",
    )


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def modules_of(text: str) -> "tuple[Recompute, ...]":
    """Return the modules of `--recompute`.

    Raises:
        InputError: one is unknown.
    """
    from moetune.domain.training import RECOMPUTES

    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in RECOMPUTES]
    if unknown or not names:
        raise InputError(
            f"--recompute {text!r}: {unknown[0] if unknown else 'nothing'} is no module",
            f"use none, or a comma-separated list of {', '.join(RECOMPUTES)}",
        )
    return tuple(one for one in RECOMPUTES if one in names)


def _one_of(flag: str, value: str | None, known: tuple[T, ...]) -> T | None:
    if value is None:
        return None
    if value not in known:
        raise InputError(f"{flag} {value!r} is unknown", f"use one of {', '.join(known)}")
    return value
