"""Runtimes that a training plan is made for: features of each, and facts that change its times.

Each version has a row of facts, read in its source; `--target megatron@0.17` picks the row, and
`--target megatron` the newest row. A layout that the runtime cannot run is refused, and the refusal
names the missing feature (`target_rules.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from moetune.domain.errors import InputError
from moetune.domain.kernels import (
    AS_MEGATRON,
    DEEPSPEED,
    FUSED,
    TORCHTITAN,
    TRANSFORMERS,
    KeptByExperts,
    RuntimeKernels,
)
from moetune.domain.layout import BrokenRule
from moetune.domain.optimizers import (
    DEEPSPEED_ADAM,
    FLOAT32_ADAM,
    MEGATRON_ADAM,
    OPTIMIZERS,
    Optimizer,
    OptimizerName,
    optimizer_of,
    with_whole_master,
)
from moetune.domain.pipeline import SCHEDULES, Schedule
from moetune.domain.site import GraphsInRecipes, Site, graphs_in_recipes
from moetune.domain.training import (
    TOKEN_DISPATCHERS,
    CudaGraphs,
    Overlap,
    Recompute,
    TokenDispatcher,
    TrainingDtype,
    TrainingJob,
    ZeroStage,
)
from moetune.domain.tuning import BaseFormat, ExpertAdapters, Tuning

TargetName = Literal["moetune", "megatron", "bridge", "torchtitan", "transformers", "deepspeed"]
TARGETS: tuple[TargetName, ...] = get_args(TargetName)
MegatronCore: TypeAlias = tuple[int, int]
"""A version of Megatron-Core: (0, 18)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A runtime with its features.

    Args:
        version: package and version with these facts: "megatron-core 0.16.1".
        source: files with these facts; repository and tag where no package registry has them.
        tp_divides_ep: whether ep above 1 is a multiple of tp.
        gathers_over_tp: whether all_gather is over tensor ranks' tokens, so that ep is tp.
        gather_family: family of models whose experts can use all_gather; "" for all.
        largest: largest sizes, where the runtime bounds them: {"vpp": 1} allows no interleaving.
        zero_with_pp: highest ZeRO stage with pipeline stages.
        zero_with_tp: highest ZeRO stage with tensor parallelism.
        schedules: pipeline schedules; without any, pp is 1.
        predicts_apart: whether multi-token prediction may be on an earlier stage than the head.
        overlap_hidden: share of the shorter of computation and exchanges that overlap hides.
        hides_gradients: whether passes hide collectives of gradients and parameters.
        launches: factor on the host's time to launch a block's kernels in Megatron-Core.
        between_steps: seconds for which the device waits for the host between two steps.
        optimizers: optimizers of the runtime, that of its default recipe first.
        adam: bytes that the optimizer "adam" keeps, or the optimizer that a launch describes.
        logit_bytes: bytes of a logit at the loss. 6: a bfloat16 logit and a float32 copy, which the
            gradient overwrites. 2: a fused loss, which writes the gradient over the logit. 14:
            torch's loss, with float32 log-probabilities, their gradient and the gradient of the
            logits.
        loss_chunks: chunks of tokens whose logits are computed in sequence.
        vocabulary_multiple: a tensor rank's rows of the vocabulary are padded to a multiple of it.
        fuses_activations: whether a gated activation is one kernel, which keeps only its input;
            else its factors are kept, too, and their product before the combine weights.
        splits_sequence: whether tensor ranks share the sequence between their layers.
        copies_sequence: whether a copy reorders the sequence that tensor ranks gather and scatter.
        splits_logits: whether tensor ranks share the logits at the loss.
        saves_exchanges: whether selective recomputation keeps the results of row exchanges.
        caches_narrow_weights: whether 8-bit copies of the weights are kept between micro-batches.
        keeps_narrow_weights: whether blocks' weights exist in the GEMMs' dtype alone, for products
            along rows and along columns (`--fp8-param-gather`, `--fp4-param-gather`).
        offloads_optimizer: whether the host takes a share of the optimizer, at ZeRO stage 1.
        offloads_states: whether the host takes all states, at ZeRO stage 3 with tp, cp and pp 1.
        cuda_graphs: "partial" graphs hold attention, the router and the order of rows.
        graphs_in_recipes: graphs that its recipes use, and where: searches try these.
        offloads_activations: whether activations of whole blocks can wait in host memory, without
            a pipeline, recomputation, overlap of exchanges and CUDA graphs.
        kernels_per_expert: kernels that both passes launch for each expert of a rank, in bfloat16
            and in 8 bits. In bfloat16 they are two layers of three GEMMs. In 8 bits each GEMM also
            rounds inputs and gradients and reorders scales. 0 where grouped kernels run all experts
            at once.
        overlaps_input_scatter: whether weight-gradient GEMMs hide the scatter of input gradients.
        multiplies_in_pieces: whether GEMMs in pieces, a piece for each tensor rank, hide all of
            their exchanges except a single piece's (`tp_comm_overlap`, which exports leave off).
        places_experts: whether each layer's experts may be out of their natural order.
        runs_layer: whether experts run in moetune's layer, as `solve.layer` predicts it.
        gathers_context: whether keys and values are gathered before attention, not during it.
        core: its version of Megatron-Core, which its rules depend on; None without.
        without_deepep: chips on which it refuses DeepEP.
        adapters: supported adapters of experts, the default first; empty without any adapters.
        merges_adapters: whether adapters of experts are multiplied out and added to the weights in
            each pass, so that the gradient of the sum is computed.
        adapter_zero: ZeRO stages that go with adapters; () for all stages of `zero`.
        bases: formats of the frozen weights under adapters.
        freezes: whether parts of a model may be frozen.
        unplanned: what it runs and no plan has, with its name for that.
    """

    name: TargetName
    version: str
    source: str
    dispatchers: tuple[TokenDispatcher, ...]
    recompute: tuple[Recompute, ...]
    overlaps: tuple[Overlap, ...]
    zero: tuple[ZeroStage, ...]
    dtypes: tuple[TrainingDtype, ...]
    zero_with_pp: ZeroStage
    largest: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    zero_with_tp: ZeroStage = 3
    tp_dispatchers: tuple[TokenDispatcher, ...] = TOKEN_DISPATCHERS
    schedules: tuple[Schedule, ...] = ("1f1b",)
    predicts_apart: bool = False
    tp_divides_ep: bool = False
    gathers_over_tp: bool = False
    gather_family: str = ""
    overlap_hidden: float = 0.0
    hides_gradients: bool = True
    launches: float = 1.0
    between_steps: float = 0.0
    kernels: RuntimeKernels = FUSED
    optimizers: tuple[OptimizerName, ...] = ("adam",)
    adam: Optimizer = MEGATRON_ADAM
    logit_bytes: int = 6
    loss_chunks: int = 1
    vocabulary_multiple: int = 1
    fuses_activations: bool = True
    splits_sequence: bool = True
    copies_sequence: bool = False
    splits_logits: bool = True
    caches_narrow_weights: bool = False
    keeps_narrow_weights: bool = False
    saves_exchanges: bool = True
    offloads_activations: bool = False
    offloads_optimizer: bool = False
    offloads_states: bool = False
    kernels_per_expert: tuple[int, int] = (0, 0)
    kept_by_experts: KeptByExperts = AS_MEGATRON
    cuda_graphs: tuple[CudaGraphs, ...] = ("none",)
    graphs_in_recipes: tuple[GraphsInRecipes, ...] = ()
    overlaps_input_scatter: bool = False
    multiplies_in_pieces: bool = False
    places_experts: bool = False
    runs_layer: bool = False
    gathers_context: bool = False
    core: MegatronCore | None = None
    without_deepep: tuple[str, ...] = ()
    adapters: tuple[ExpertAdapters, ...] = ()
    merges_adapters: bool = False
    adapter_zero: tuple[ZeroStage, ...] = ()
    bases: tuple[BaseFormat, ...] = ("bfloat16",)
    freezes: bool = False
    unplanned: Mapping[str, str] = field(default_factory=dict)

    @property
    def number(self) -> str:
        """The version without its package: "0.16.1"; "" for moetune's runtime."""
        number = self.version.split()[-1]
        return number if number[0].isdigit() else ""

    @property
    def release(self) -> str:
        """The version as in `--target`: "0.16" for 0.16.1; "" for moetune's runtime."""
        return ".".join(self.number.split(".")[:2])

    @property
    def label(self) -> str:
        """The name with the version: "megatron (megatron-core 0.16.1)"; "moetune's runtime"."""
        return f"{self.name} ({self.version})" if self.number else f"{self.name}'s {self.version}"

    @property
    def spec(self) -> str:
        """The value of `--target` and `--to` for this version: "megatron@0.16"."""
        return f"{self.name}@{self.release}" if self.release else self.name

    def optimizer(self, job: TrainingJob) -> Optimizer:
        """Return the runtime's variant of a job's optimizer."""
        if job.optimizer == self.adam.name:
            return self.adam
        optimizer = optimizer_of(job.optimizer, self.adam)
        return with_whole_master(optimizer) if job.dtype in ("fp8", "mxfp8") else optimizer

    def zeros(self, tuning: Tuning) -> tuple[ZeroStage, ...]:
        """Return the ZeRO stages that the tuning allows."""
        return self.zero if tuning.adapters is None else self.adapter_zero or self.zero

    def tried_graphs(self, site: Site, dtype: TrainingDtype) -> Iterator[CudaGraphs]:
        """Yield the CUDA graphs that its recipes use on a machine, "partial" first."""
        for row in self.graphs_in_recipes:
            if site.generation in row.generations and dtype in (row.dtypes or (dtype,)):
                yield row.graphs

    def refusal(self, what: str, instead: str, source: str = "") -> BrokenRule:
        """Return the broken rule: what cannot run, flags that can, and the source file."""
        where = f": {source}" if source else ""
        words = f"cannot run {what}{where}"
        if what in self.unplanned:
            words = f"runs {what} as {self.unplanned[what]}"
        return BrokenRule(f"{self.label} {words}", f"use {instead}, or another --target")


_MEGATRON_RECOMPUTE: tuple[Recompute, ...] = (
    "core_attn", "moe_act", "norm", "mla_up_proj", "mlp", "shared_experts", "moe", "full",
)  # fmt: skip
_MEGATRON = Target(
    name="megatron", version="megatron-core 0.16.1",
    source="megatron/core/transformer/transformer_config.py, model_parallel_config.py",
    dispatchers=("all_to_all", "all_gather", "deepep", "hybrid_ep"),
    recompute=_MEGATRON_RECOMPUTE, overlaps=("none", "batch"), zero=(0, 1, 2, 3),
    dtypes=("bfloat16", "fp8", "mxfp8", "nvfp4", "float16"), zero_with_pp=1,
    overlap_hidden=0.6,
    between_steps=0.06,  # docs/decisions/layouts-of-decoders.md#0074
    overlaps_input_scatter=True,  # LinearWithGradAccumulationAndAsyncCommunication
    optimizers=("adam", "adam-bf16-grads", "adam-remainders", "adam-bf16", "adam-bf16-states",
                "muon"),
    kernels_per_expert=(6, 24), cuda_graphs=("none", "partial", "full"), core=(0, 16),
    schedules=("1f1b", "interleaved"),  # core/pipeline_parallel/schedules.py has no other
    predicts_apart=True,
    vocabulary_multiple=128,  # make_vocab_size_divisible_by
    caches_narrow_weights=True,  # is_first_microbatch, without --fp8-param-gather
    offloads_activations=True,  # cpu_offloading_num_layers of Transformer Engine
    offloads_optimizer=True,  # HybridDeviceOptimizer
    without_deepep=("gb200", "gb300"),
)  # fmt: skip
"""`moe_flex_dispatcher_backend` says that HybridEP alone spans several hosts of an NVLink domain
(MNNVL), as those of GB200 and GB300; Bridge raises with DeepEP there."""


_EACH_EXPERT: MegatronCore = (0, 18)
"""First core whose Bridge has adapters of each expert, `share_expert_adapters=False`."""
_SOURCES = {
    "megatron": "NVIDIA/Megatron-LM at core_v{}, on PyPI for Python 3.12: "
    "megatron/core/transformer/transformer_config.py, megatron/training/arguments.py",
    "bridge": "NVIDIA-NeMo/Megatron-Bridge at v{}, on PyPI for Python 3.12: "
    "src/megatron/bridge/training/config.py, flex_dispatcher_backend.py",
}


def _later(row: Target, version: str, core: MegatronCore) -> Target:
    """Return the row of a later version, which PyPI has only for Python 3.12."""
    has_each = row.name == "bridge" and core >= _EACH_EXPERT
    return replace(
        row, version=f"{row.version.split()[0]} {version}", core=core,
        graphs_in_recipes=graphs_in_recipes(core), source=_SOURCES[row.name].format(version),
        adapters=("shared", "each") if has_each else row.adapters,
    )  # fmt: skip


_BRIDGE = replace(
    _MEGATRON, name="bridge", version="megatron-bridge 0.3.1",
    source="megatron/bridge/training/comm_overlap.py, flex_dispatcher_backend.py",
    logit_bytes=2, dtypes=("bfloat16", "fp8", "mxfp8", "nvfp4"),
    optimizers=tuple(name for name in OPTIMIZERS if name != "adam-8bit"),
    adapters=("shared",), adapter_zero=(0, 1), freezes=True,  # peft/lora.py; a pre-wrap hook
)  # fmt: skip
_AS_TORCH = KeptByExperts(results=True)
"""What torchtitan and transformers keep: rows are weighted after the experts, activations are plain
torch (`torchtitan/models/common/moe.py`, `transformers/integrations/moe.py`)."""
_TRANSFORMERS = Target(
    kernels=TRANSFORMERS, name="transformers", version="5.23.0",
    source="transformers/distributed/configuration_utils.py",
    dispatchers=("all_to_all", "all_gather"), recompute=("full",), overlaps=("none",),
    zero=(3,), dtypes=("bfloat16",), tp_divides_ep=True, gathers_over_tp=True,
    kept_by_experts=_AS_TORCH, fuses_activations=False,
    optimizers=("adam", "adam-8bit"), adam=FLOAT32_ADAM,
    logit_bytes=14,  # loss/loss_utils.py, ForCausalLMLoss
    splits_sequence=False,  # enable_sequence_parallel of configuration_utils.py
    splits_logits=False,  # "lm_head": "colwise_gather_output" of each modeling_*.py
    largest=MappingProxyType({"pp": 1, "vpp": 1, "cp": 1, "etp": 1}), zero_with_pp=0,
    adapters=("each",), merges_adapters=True,  # peft/tuners/lora/layer.py, ParamWrapper
    adapter_zero=(0, 3), bases=("bfloat16", "nf4"), freezes=True,
    unplanned=MappingProxyType({
        "ZeRO stage 0": "DistributedDataParallel, which --target deepspeed plans",
        "ZeRO stage 1": "DeepSpeed's, which --target deepspeed plans",
        "ZeRO stage 2": "DeepSpeed's, which --target deepspeed plans",
        "an offloaded optimizer": "FSDP's offload_params, which is not planned",
    }),
)  # fmt: skip
_VERSIONS: MappingProxyType[TargetName, tuple[Target, ...]] = MappingProxyType({
    "moetune": (Target(
        name="moetune", version="runtime", source="moetune.runtime",
        dispatchers=("all_to_all", "all_gather"), gathers_over_tp=True, gather_family="gpt",
        recompute=("full",), overlaps=("none", "chunks"), zero=(0, 1, 3),
        dtypes=("bfloat16", "float16"),
        largest=MappingProxyType({"cp": 1, "etp": 1}), zero_with_pp=3, zero_with_tp=0,
        tp_dispatchers=("all_gather",),  # TensorExpertLayer; torch cuts the dense parts
        schedules=("1f1b", "interleaved"), hides_gradients=False,
        kept_by_experts=KeptByExperts(activations=False, results=False, router_copies=1),
        places_experts=True, offloads_states=True, runs_layer=True,
    ),),
    "megatron": (
        _MEGATRON, _later(_MEGATRON, "0.17.1", (0, 17)), _later(_MEGATRON, "0.18.2", (0, 18)),
        _later(_MEGATRON, "0.19.0", (0, 19)),
    ),
    "bridge": (
        _BRIDGE, _later(_BRIDGE, "0.4.2", (0, 17)), _later(_BRIDGE, "0.5.1", (0, 18)),
        _later(_BRIDGE, "0.6.0", (0, 19)),
    ),
    "torchtitan": (Target(
        kernels=TORCHTITAN, name="torchtitan", version="0.3.0",
        source="torchtitan/config/configs.py, torchtitan/distributed/parallel_dims.py",
        dispatchers=("all_to_all", "deepep", "hybrid_ep"), recompute=("selective", "full"),
        overlaps=("none",), zero=(2, 3), dtypes=("bfloat16", "mxfp8"),
        largest=MappingProxyType({"etp": 1}), kept_by_experts=_AS_TORCH, fuses_activations=False,
        optimizers=("adam", "adam-bf16-moments"), adam=FLOAT32_ADAM,
        logit_bytes=14, loss_chunks=8,  # components/loss.py, ChunkedLossWrapper
        copies_sequence=True,  # Shard(1) in models/common/decoder_sharding.py
        gathers_context=True,  # flex_cp_allgather in distributed/context_parallel/api.py
        zero_with_pp=2, schedules=SCHEDULES,  # get_schedule_class of torch.distributed.pipelining
        unplanned=MappingProxyType({
            "an offloaded optimizer": "training.enable_cpu_offload, which is not planned"}),
    ),),
    "transformers": (_TRANSFORMERS, replace(_TRANSFORMERS, version="5.24.0")),
    "deepspeed": (Target(
        kernels=DEEPSPEED, name="deepspeed", version="0.19.8",
        source="deepspeed/module_inject/auto_ep_config.py, runtime/zero",
        dispatchers=("all_to_all",), recompute=("full",), overlaps=("none",), zero=(0, 1, 2, 3),
        dtypes=("bfloat16",), largest=MappingProxyType({"pp": 1, "vpp": 1, "cp": 1, "etp": 1}),
        zero_with_pp=1, kept_by_experts=_AS_TORCH, fuses_activations=False,
        optimizers=("adam", "adam-8bit"), adam=DEEPSPEED_ADAM,
        logit_bytes=14,  # the model's loss, as transformers has it
        splits_sequence=False, splits_logits=False,  # module_inject/auto_tp.py
        unplanned=MappingProxyType({
            "an offloaded optimizer": "ZeRO-Offload, which is not planned"}),
    ),),
})  # fmt: skip
"""Rows of each runtime, the oldest first, which is the row of plans without a version."""


def find_target(name: str) -> Target:
    """Return a target's facts, by "megatron@0.17" or the newest; raises InputError without any."""
    target, _, version = name.partition("@")
    rows = _rows(target)
    if "@" not in name:
        return rows[-1]
    for row in rows:
        if version and version in (row.release, row.number):
            return row
    specs = [f"{target}@{release}" for release in target_releases(target)] or [target]
    raise InputError(
        f"version {version!r} of {target} is unknown", f"use one of {', '.join(specs)}"
    )


def target_releases(name: str) -> tuple[str, ...]:
    """Return the versions of a runtime that plans can be made for, the oldest first."""
    return tuple(row.release for row in _rows(name) if row.release)


def planned_target(name: TargetName, version: str) -> Target:
    """Return a stored plan's target, the first for version ""; raises InputError without a row."""
    return find_target(f"{name}@{version}") if version else _rows(name)[0]


def _rows(name: str) -> tuple[Target, ...]:
    rows = next((rows for target, rows in _VERSIONS.items() if target == name), None)
    if rows is None:
        raise InputError(f"target {name!r} is unknown", f"use one of {', '.join(TARGETS)}")
    return rows
