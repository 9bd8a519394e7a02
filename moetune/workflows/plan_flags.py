"""Flags of `moetune plan`, which are the arguments of `moetune.plan`: what they ask for.

A layer is asked of the `Planner`, a whole model of `plan_training`.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar, cast

from moetune.config import Settings
from moetune.domain.constraints import Bounds, Constraints, Order, Strategy
from moetune.domain.errors import InputError, check_positive
from moetune.domain.layer import Activation, ExpertParallel, LayerShape
from moetune.domain.model import Transformer, find_model
from moetune.domain.pipeline import SCHEDULES, read_stages
from moetune.domain.placement import PlacementRule
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.domain.targets import find_target
from moetune.domain.training import (
    CUDA_GRAPHS,
    OVERLAPS,
    TOKEN_DISPATCHERS,
    LayoutRequest,
    ZeroStage,
)
from moetune.domain.units import full_dtype
from moetune.huggingface.pasted import NAME as PASTED
from moetune.huggingface.pasted import PastedConfig
from moetune.workflows import wiring
from moetune.workflows.flags import LayerFlags, modules_of, shape_of, tokens_of
from moetune.workflows.models import check_known, find_decoder_model, is_decoder_name
from moetune.workflows.open_planner import local_planner
from moetune.workflows.plan import NewPlan
from moetune.workflows.profiles import find_profile
from moetune.workflows.routing_files import read_layer_routing, read_routing
from moetune.workflows.training import plan_training, training_job
from moetune.workflows.training_plan import TrainingRequest

T = TypeVar("T", bound=str)
_OF_LAYERS = (
    "tokens", "batch", "expert_parallel", "sequence_parallel", "memory_taken", "strategy",
    "forward_degree", "backward_degree", "max_degree", "min_chunk_tokens", "order",
    "allow_modelled",
)  # fmt: skip
_OF_DECODERS = (
    "ep", "tp", "pp", "micro_batch", "zero", "overlap", "global_batch", "cp", "vpp", "etp",
    "recompute", "cuda_graphs", "target", "offload_activations", "offload_optimizer", "optimizer",
    "schedule", "stages", "dispatcher", "front",
)  # fmt: skip
_COUNTS = (
    "d_model", "d_hidden", "num_experts", "top_k", "world_size", "nodes", "batch", "num_layers",
    "num_heads", "ep", "tp", "pp", "micro_batch", "global_batch", "cp", "vpp", "etp",
    "forward_degree", "backward_degree", "max_degree", "min_chunk_tokens",
)  # fmt: skip
_LARGEST_ZERO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """Flags as they were given; None for those that were not.

    Args:
        tokens, seq, vocab: numbers, without a unit.
        memory_limit, memory_taken: bytes.
        config: of a Hugging Face model, in place of its name; a command line has its path.

    Raises:
        InputError: a number is out of range, or a flag is not for this kind of model.
    """

    model: str | None = None
    d_model: int | None = None
    d_hidden: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    activation: Activation | None = None
    world_size: int | None = None
    nodes: int | None = None
    tokens: int | None = None
    batch: int | None = None
    seq: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    vocab: int | None = None
    moe_every: int | None = None
    ep: int | None = None
    tp: int | None = None
    pp: int | None = None
    expert_parallel: ExpertParallel | None = None
    sequence_parallel: bool = False
    micro_batch: int | None = None
    global_batch: int | None = None
    cp: int | None = None
    vpp: int | None = None
    etp: int | None = None
    recompute: str | None = None
    overlap: str | None = None
    offload_activations: float | None = None
    offload_optimizer: float | None = None
    cuda_graphs: str | None = None
    target: str | None = None
    schedule: str | None = None
    stages: str | None = None
    routing: str | None = None
    expert_placement: PlacementRule | None = None
    optimizer: str | None = None
    zero: int | None = None
    dtype: str | None = None
    memory_limit: int | None = None
    memory_taken: int | None = None
    strategy: Strategy | None = None
    forward_degree: int | None = None
    backward_degree: int | None = None
    max_degree: int | None = None
    min_chunk_tokens: int | None = None
    order: Order | None = None
    dispatcher: str | None = None
    allow_modelled: bool | None = None
    front: bool = False
    config: PastedConfig | None = None

    def __post_init__(self) -> None:
        check_positive(self, *_COUNTS)
        if self.model is not None:
            if self.config is not None:
                raise InputError("--model and config exclude each other", "give one of them")
            check_known(self.model)
        if self.moe_every is not None and self.moe_every < 0:
            raise InputError(f"moe_every must be at least 0, got {self.moe_every}")
        if self.zero is not None and not 0 <= self.zero <= _LARGEST_ZERO:
            raise InputError(f"zero must be from 0 to {_LARGEST_ZERO}, got {self.zero}")
        self._check_kind()

    @property
    def is_of_decoder(self) -> bool:
        """Whether the model is a whole one, and not a layer."""
        if self.config is not None or self.shape is not None:
            return True
        return self.model is not None and is_decoder_name(self.model)

    @property
    def layer(self) -> LayerShape | None:
        """The layer of sizes; None for a named model."""
        return LayerFlags(
            d_model=self.d_model, d_hidden=self.d_hidden, num_experts=self.num_experts,
            top_k=self.top_k, activation=self.activation,
        ).layer(self.model)  # fmt: skip

    @property
    def shape(self) -> Transformer | None:
        """The whole model of sizes; None for a layer, and for a model with its own."""
        return shape_of(
            self.model, self.layer, num_layers=self.num_layers, num_heads=self.num_heads,
            length=self.seq, vocab=self.vocab, moe_every=self.moe_every,
        )  # fmt: skip

    def layer_request(self, settings: Settings) -> PlanRequest:
        """Return the request for the plan of a layer.

        Raises:
            InputError: a value is wrong, or one is missing.
        """
        allowed = settings.allow_modelled if self.allow_modelled is None else self.allow_modelled
        constraints = Constraints(
            bounds=self._bounds(settings),
            expert_parallel=self.expert_parallel,
            sequence_parallel=self.sequence_parallel,
            memory_taken_bytes=self.memory_taken or 0,
            allow_modelled=allowed,
            routing=read_layer_routing(self.routing, top_k=self._top_k),
            expert_placement=self.expert_placement or "planned",
        )
        return PlanRequest(
            model=self.model, layer=self.layer, world_size=self.world_size, num_nodes=self.nodes,
            tokens_per_rank=tokens_of(self.tokens, self.batch, self.seq),
            dtype=full_dtype(self.dtype) if self.dtype else settings.dtype,
            memory_limit_bytes=self.memory_limit,
            constraints=constraints,
        )  # fmt: skip

    @property
    def model_name(self) -> str:
        """The name of the whole model; of sizes these."""
        shape = self.shape
        return self.model or "" if shape is None else shape.text

    def training_request(self, profile: Profile) -> TrainingRequest:
        """Return the request for the layout of a whole model's training.

        Raises:
            InputError: a value is wrong, or one is missing.
        """
        ranks = self.world_size
        if self.nodes is not None:
            if ranks is not None:
                raise InputError("--nodes and --world-size exclude each other", "give one of them")
            ranks = self.nodes * profile.machine.devices_per_node
        target = find_target(self.target or "moetune")
        ranks = ranks or profile.machine.num_devices
        batch, length = self.global_batch, self.seq
        if self.config is not None:
            decoder = self.config.decoder()
        else:
            model = find_decoder_model(self.model_name, world_size=ranks)
            assert model.decoder is not None  # noqa: S101 - only papers' layers have none
            decoder = model.decoder
            if model.whole is not None:
                batch = batch or model.whole.sequences_per_rank * ranks
                length = length or model.whole.shape.length
        decoder, routing = read_routing(self.routing, decoder)
        return TrainingRequest(
            job=training_job(
                decoder, world_size=ranks, global_batch=batch, length=length,
                dtype=full_dtype(self.dtype) if self.dtype else None,
                routing=routing,
                optimizer=self.optimizer or target.optimizers[0], profile=profile,
                leaves_room=self.routing is None,
            ),
            pins=self._training_pins(),
            target=target,
            memory_limit_bytes=self.memory_limit,
        )  # fmt: skip

    @property
    def _top_k(self) -> int:
        """Experts of a token."""
        return self.top_k or 1 if self.model is None else find_model(self.model).top_k

    def _check_kind(self) -> None:
        """Raise InputError where a flag was given that plans of this kind do not have."""
        default = {item.name: item.default for item in fields(self)}
        unknown = _OF_LAYERS if self.is_of_decoder else _OF_DECODERS
        given = [name for name in unknown if getattr(self, name) != default[name]]
        if not given:
            return
        flag, model = "--" + given[0].replace("_", "-"), self.model or PASTED
        if self.is_of_decoder:
            raise InputError(
                f"{flag} is for layers, not for {self.model or model}",
                "omit it; give --global-batch and --seq, and pin --tp, --pp, --ep and the like",
            )
        raise InputError(
            f"{flag} is for whole models",
            "omit it, or name such a model with --model, such as qwen3-30b-a3b",
        )

    def _bounds(self, settings: Settings) -> Bounds:
        return Bounds(
            forward_degree=self.forward_degree, backward_degree=self.backward_degree,
            max_degree=self.max_degree or settings.max_degree,
            min_chunk_tokens=self.min_chunk_tokens or settings.min_chunk_tokens,
            order=self.order, strategy=self.strategy,
        )  # fmt: skip

    def _training_pins(self) -> LayoutRequest:
        return LayoutRequest(
            cp=self.cp, tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp,
            micro_batch=self.micro_batch,
            recompute=None if self.recompute is None else modules_of(self.recompute),
            dispatcher=_one_of("--dispatcher", self.dispatcher, TOKEN_DISPATCHERS),
            overlap=_one_of("--overlap", self.overlap, OVERLAPS),
            cuda_graphs=_one_of("--cuda-graphs", self.cuda_graphs, CUDA_GRAPHS),
            offload_activations=self.offload_activations,
            offload_optimizer=self.offload_optimizer,
            expert_placement=self.expert_placement,
            zero=cast("ZeroStage | None", self.zero),
            schedule=_one_of("--schedule", self.schedule, SCHEDULES),
            stages=None if self.stages is None else read_stages(self.stages),
        )  # fmt: skip


def _one_of(flag: str, value: str | None, known: tuple[T, ...]) -> T | None:
    for one in known:
        if value == one:
            return one
    if value is None:
        return None
    raise InputError(f"{flag} {value!r} is unknown", f"use one of {', '.join(known)}")


def plan_flags(
    flags: PlanFlags, settings: Settings, *, profile: str | Profile | None, save: bool
) -> NewPlan:
    """Return the plan of a layer or of a whole model's training, and its profile.

    Args:
        profile: a file, a name or a profile; None for the setting, else the newest measured one.
        save: store the plan; a database is made where there is none.

    Raises:
        MoetuneError: as of `Planner.resolve` or `plan_training`, there is no such profile, or the
            database cannot be opened.
    """
    if not flags.is_of_decoder:
        request = flags.layer_request(settings)
        with local_planner(settings, profile=profile, saves=save) as planner:
            return planner.plan_anew(request)
    stores = partial(wiring.find_store, settings)
    wanted = settings.profile if profile is None else profile
    found = find_profile(wanted, stores=stores, for_models=True)
    model = flags.training_request(found.profile)
    plan = plan_training(model, found.profile, with_front=flags.front, with_savings=True)
    if save:
        with wiring.open_store(settings) as store:
            store.save_plan(plan)
    return NewPlan(plan=plan, found=found)
