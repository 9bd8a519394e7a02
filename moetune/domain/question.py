"""The question for a plan: its fields, each described once for every surface that asks it.

Flags of `moetune plan`, arguments of `moetune.plan`, JSON and the form of a page derive from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, cast, get_type_hints

from moetune.domain.architecture import Decoder
from moetune.domain.ask import (
    LARGEST_BYTES,
    LARGEST_DEGREE,
    LARGEST_RANKS,
    LARGEST_TOKENS,
    LARGEST_WIDTH,
    LAYER,
    PINS,
    PLANNED,
    SIZES,
    TRAINING,
    Ask,
    asks_of,
    described,
)
from moetune.domain.budget import LARGEST_PRICE, LARGEST_TRAIN_TOKENS, LEAST_UTILIZATION, Budget
from moetune.domain.constraints import Order, Strategy
from moetune.domain.document import decode
from moetune.domain.errors import InputError
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import Activation, ExpertParallel, LayerShape
from moetune.domain.model import WHOLE_MODELS, Transformer
from moetune.domain.optimizers import OPTIMIZERS, OptimizerName
from moetune.domain.pipeline import Schedule
from moetune.domain.placement import PlacementRule
from moetune.domain.spelling import about, flag_of, nearest_or
from moetune.domain.targets import TARGETS
from moetune.domain.training import RECOMPUTES, CudaGraphs, Overlap, TokenDispatcher, ZeroStage
from moetune.domain.units import parse_bytes, parse_train_tokens

_LAYER_SIZES = ("d_model", "d_hidden", "num_experts")


class Configuration(Protocol):
    """A Hugging Face model in place of its name."""

    def decoder(self) -> Decoder:
        """Return the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question for a plan: values as given, or None; raises InputError for wrong values.

    Args:
        tokens, seq, vocab: numbers, without a unit.
        memory_limit, memory_taken: bytes.
        config: a Hugging Face model, in place of its name; a command line has its path.
    """

    model: str | None = described(PLANNED, "Model", "A named model: see `moetune models list`.")
    world_size: int | None = described(
        PLANNED, "GPUs", "Ranks. Default: the profile's devices.", largest=LARGEST_RANKS
    )
    nodes: int | None = described(
        PLANNED, "Nodes", "Nodes of the profile's size, in place of ranks.", largest=LARGEST_RANKS
    )
    memory_limit: int | None = described(
        PLANNED, "Memory of a GPU", "Of one device: 40GiB. Default: all, of a GPU 92 %.",
        parse=parse_bytes, largest=LARGEST_BYTES,
    )  # fmt: skip
    dtype: str | None = described(
        PLANNED, "Element type", "Default: bfloat16 where measured, else float32.", form="DTYPE"
    )
    seq: int | None = described(PLANNED, "Sequence", "Tokens of a sequence.")
    routing: str | None = described(
        PLANNED, "Routing", "How evenly tokens reach experts; a file has each expert's load. "
        "Default: balanced.", form="[balanced|natural|FILE]", choices=("balanced", "natural"),
    )  # fmt: skip
    expert_placement: PlacementRule | None = described(
        PLANNED, "Placement of experts", "By their loads, or in order. Default: planned."
    )

    d_model: int | None = described(
        SIZES, "Width of tokens", "Width of the tokens.", largest=LARGEST_WIDTH
    )
    d_hidden: int | None = described(
        SIZES, "Width of experts", "Width of the experts.", largest=LARGEST_WIDTH
    )
    num_experts: int | None = described(
        SIZES, "Experts", "Experts on all ranks.", largest=LARGEST_WIDTH
    )
    top_k: int | None = described(
        SIZES, "Experts a token", "Experts per token. Default: 1.", largest=LARGEST_WIDTH
    )
    activation: Activation | None = described(SIZES, "Activation", "Of the experts. Default: gelu.")
    num_layers: int | None = described(SIZES, "Blocks", "Blocks of a whole model.")
    num_heads: int | None = described(SIZES, "Attention heads", "Attention heads of its blocks.")
    vocab: int | None = described(SIZES, "Vocabulary", "Its vocabulary size, such as 50k.")
    moe_every: int | None = described(
        SIZES, "Blocks with experts", "Every n-th block has experts; 0: none. Default: 2.",
        smallest=0,
    )  # fmt: skip

    target: str | None = described(
        TRAINING, "Runtime", f"{', '.join(TARGETS)}; or a version: megatron@0.17.",
        form="TARGET", choices=TARGETS,
    )  # fmt: skip
    global_batch: int | None = described(TRAINING, "Batch", "Sequences of a step.")
    optimizer: OptimizerName | None = described(
        TRAINING, "Optimizer", f"{', '.join(OPTIMIZERS)}.", form="NAME"
    )
    train: str | None = described(
        TRAINING, "What trains", "all, lora:rank=16 or qlora:rank=16. Default: all.", form="WHAT"
    )
    freeze: str | None = described(
        TRAINING, "Frozen parts", "Parts that do not train: router,embedding.", form="PARTS"
    )
    seq_lengths: str | None = described(
        TRAINING, "Packed documents", "Packed documents' lengths, or one length.", form="FILE|N"
    )
    train_tokens: int | None = described(
        TRAINING, "Tokens of the whole training", "Of the whole training, for its days: 1T.",
        parse=parse_train_tokens, largest=LARGEST_TRAIN_TOKENS, form="N",
    )  # fmt: skip
    price: float | None = described(
        TRAINING, "Price of a GPU-hour", "Of a GPU-hour, for the cost of these days.",
        smallest=0, largest=LARGEST_PRICE, form="PRICE",
    )  # fmt: skip
    utilization: float | None = described(
        TRAINING, "Time that trains", "Of time in which steps run. Default: 1.",
        smallest=LEAST_UTILIZATION, largest=1,
    )  # fmt: skip
    front: bool = described(
        TRAINING, "Fastest layout for every memory",
        "Show the fastest layout for every memory, too.", default=False,
    )  # fmt: skip
    uncalibrated: bool = described(
        TRAINING, "Without my observed runs", "Without the factor of observed runs.", default=False
    )

    tp: int | None = described(PINS, "Tensor parallel", "Ranks per tensor-parallel group.")
    pp: int | None = described(PINS, "Pipeline ranks", "Pipeline ranks.")
    vpp: int | None = described(PINS, "Stages of a pipeline rank", "Stages of a pipeline rank.")
    ep: int | None = described(PINS, "Expert parallel", "Replicas per expert-parallel group.")
    etp: int | None = described(PINS, "Ranks that share an expert", "Ranks that share one expert.")
    cp: int | None = described(PINS, "Context parallel", "Ranks that share a sequence.")
    micro_batch: int | None = described(PINS, "Micro-batch", "Sequences per micro-batch.")
    zero: ZeroStage | None = described(
        PINS, "What replicas shard", "Shards: 0 nothing, 1 states, 2 gradients, 3 all."
    )
    recompute: str | None = described(
        PINS, "Recompute", f"none, {', '.join(RECOMPUTES)}; or several.", form="MODULES"
    )
    overlap: Overlap | None = described(
        PINS, "Overlap of exchanges", "How exchanges hide: none, batch or chunks.", form="NAME"
    )
    dispatcher: TokenDispatcher | None = described(
        PINS, "Dispatcher", "all_to_all, all_gather, deepep or hybrid_ep.", form="NAME"
    )
    schedule: Schedule | None = described(
        PINS, "Pipeline schedule", "1f1b, interleaved, zero_bubble, zero_bubble_v, dualpipe_v.",
        form="NAME",
    )  # fmt: skip
    stages: str | None = described(
        PINS, "Modules of the stages", "Modules of each: 'Ettt|(tt|)*29m|L'.", form="LETTERS"
    )
    cuda_graphs: CudaGraphs | None = described(
        PINS, "CUDA graphs", "Replayed: nothing, attention and router, or all."
    )
    offload_activations: float | None = described(
        PINS, "Activations on the host", "Share of blocks that offload activations.",
        smallest=0, largest=1,
    )  # fmt: skip
    offload_optimizer: float | None = described(
        PINS, "Optimizer on the host", "Share of the optimizer on the host.", smallest=0, largest=1
    )

    tokens: int | None = described(
        LAYER, "Tokens a GPU", "Tokens per rank: 8k. Default: the model's.", largest=LARGEST_TOKENS
    )
    batch: int | None = described(LAYER, "Sequences a GPU", "With --seq: sequences per rank.")
    memory_taken: int | None = described(
        LAYER, "Memory for the rest", "Part of the limit for the rest. Default: 0.",
        parse=parse_bytes, smallest=0, largest=LARGEST_BYTES,
    )  # fmt: skip
    allow_modelled: bool | None = described(
        LAYER, "Estimate group sizes not measured", "Take the nearest measured group size."
    )
    strategy: Strategy | None = described(
        LAYER, "Memory strategy", "Memory strategy. Default: the fastest that fits."
    )
    forward_degree: int | None = described(
        LAYER, "Chunks forward", "Pin the chunks, forward and backward.", largest=LARGEST_DEGREE
    )
    backward_degree: int | None = described(
        LAYER, "Chunks backward", "The same pin by its other name.", largest=LARGEST_DEGREE
    )
    max_degree: int | None = described(
        LAYER, "Most chunks", "Largest number of chunks. Default: 64.", largest=LARGEST_DEGREE
    )
    min_chunk_tokens: int | None = described(
        LAYER, "Fewest tokens of a chunk", "Fewest tokens per chunk. Default: 1.",
        largest=LARGEST_TOKENS,
    )  # fmt: skip
    order: Order | None = described(
        LAYER, "Order of transfers", "dispatch_first or interleaved transfers.", form="ORDER"
    )
    expert_parallel: ExpertParallel | None = described(
        LAYER, "How ranks share experts", "Send tokens to experts, or have all on every rank."
    )
    expert_kernel: ExpertKernel | None = described(
        LAYER, "Kernel of the experts",
        "grouped_mm, liger or loop. Default: the fastest.", form="NAME",
    )  # fmt: skip
    config: Configuration | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.config is not None:
            raise InputError("--model and config exclude each other", "give one of them")
        if self.nodes is not None and self.world_size is not None:
            raise InputError(
                "--nodes and --world-size both say how many ranks there are", "give one of them"
            )
        for name, ask in ASKS.items():
            if (value := getattr(self, name)) is not None:
                ask.check(value)
        if self.model is not None and (given := self._sizes):
            raise InputError(
                f"--model {self.model} and {flag_of(given[0])} exclude each other",
                "name a model, or give --d-model, --d-hidden and --num-experts", field=given[0],
            )  # fmt: skip

    @property
    def _sizes(self) -> list[str]:
        names = (*_LAYER_SIZES, "top_k", "activation")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def layer(self) -> LayerShape | None:
        """The layer by its sizes; None without any. Raises InputError if some are missing."""
        given = self._sizes
        if not given:
            return None
        if self.d_model is None or self.d_hidden is None or self.num_experts is None:
            missing = ", ".join(flag_of(name) for name in _LAYER_SIZES if name not in given)
            raise InputError(f"the layer lacks {missing}", "give them, or a model with --model")
        return LayerShape(
            d_model=self.d_model, d_hidden=self.d_hidden, num_experts=self.num_experts,
            top_k=self.top_k or 1, activation=self.activation or "gelu",
        )  # fmt: skip

    @property
    def shape(self) -> Transformer | None:
        """The whole model by its sizes; None for only `seq`. InputError if some are missing."""
        sizes_of_flags = {
            "num_layers": "num_layers", "num_heads": "num_heads", "seq": "length",
            "vocab": "vocab_size", "moe_every": "moe_every",
        }  # fmt: skip
        given = [name for name in sizes_of_flags if getattr(self, name) is not None]
        if given in ([], ["seq"]):
            return None
        sizes: dict[str, Any] = {sizes_of_flags[name]: getattr(self, name) for name in given}
        if self.model is not None:
            if self.model not in WHOLE_MODELS:
                raise InputError(
                    f"{flag_of(given[0])} is for a model by its sizes, and {self.model} has "
                    f"fixed sizes", f"omit it, or replace {self.model} by --d-model, --d-hidden "
                    "and --num-experts", field=given[0],
                )  # fmt: skip
            shape = WHOLE_MODELS[self.model].shape
            return replace(shape, moe=shape.moe, **sizes)
        missing = [name for name in sizes_of_flags if name not in (*given, "moe_every")]
        if missing or self.layer is None:
            lacks = missing or _LAYER_SIZES
            raise InputError(
                f"a whole model lacks {', '.join(map(flag_of, lacks))}",
                "or name a model with --model, such as ppmoe-6.7b",
            )
        return Transformer(moe=self.layer, **sizes)

    @property
    def budget(self) -> Budget | None:
        """The whole training and its price; None without any. Raises InputError without tokens."""
        return Budget.of(self.train_tokens, self.price, self.utilization)

    @property
    def tokens_per_rank(self) -> int | None:
        """Tokens of a layer's step on a rank, or None for the model's; InputError on a conflict."""
        if self.tokens is not None:
            if self.batch is not None or self.seq is not None:
                hint = "give --tokens alone, or --batch with --seq"
                raise InputError("--tokens and --batch with --seq exclude each other", hint)
            return self.tokens
        if self.batch is None and self.seq is None:
            return None
        if self.batch is None or self.seq is None:
            raise InputError("--batch and --seq go together", "or give --tokens")
        return self.batch * self.seq

    def check_scope(self, *, is_of_model: bool) -> None:
        """Raise InputError if a given value belongs to plans of the other kind."""
        default = {item.name: item.default for item in fields(self)}
        excluded = "layer" if is_of_model else "model"
        names = (name for name, ask in ASKS.items() if ask.group.scope == excluded)
        given = next((name for name in names if getattr(self, name) != default[name]), None)
        if given is None:
            return
        what = f"whole models, and {self.model or 'what is planned'} is a layer"
        hint = "omit it, or take a whole model, such as qwen3-30b-a3b"
        if is_of_model:
            what = f"layers, not for {self.model or 'pasted'}"
            hint = "omit it; give --global-batch and --seq, and pin --tp, --pp, --ep and the like"
        raise InputError(f"{flag_of(given)} is for {what}", hint, field=given)


_HINTS: Mapping[str, Any] = MappingProxyType(get_type_hints(Question))
ASKS = asks_of(Question)
"""Every field of the question except `config`, in the order of help."""


BUDGET_FIELDS = ("train_tokens", "price", "utilization")
"""Fields of the question about the whole training."""
MEMORY_FIELDS = (
    "world_size", "global_batch", "seq", "micro_batch", "tp", "cp", "pp", "ep", "zero",
    "recompute", "optimizer", "dtype", "target", "train", "freeze",
)  # fmt: skip
"""Fields of the question that `moetune memory` asks, next to the model and the device's memory."""
MEMORY_DEFAULTS = {"seq": "4k", "micro_batch": "1", "dtype": "bfloat16", "target": "megatron"}


def read_texts(texts: Mapping[str, str]) -> dict[str, object]:
    """Return the values of texts that are not empty; raises InputError for a wrong name or text."""
    return {
        name: _ask_named(name).read(text.strip()) for name, text in texts.items() if text.strip()
    }


def read_question(values: Mapping[str, object]) -> Question:
    """Return a program's values as a question, without None; InputError for a wrong argument."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name == "config":
            given[name] = value
            continue
        ask = _ask_named(name)
        if value is not None:
            with about(name):
                given[name] = decode(_HINTS[name], _plain(ask, value), flag_of(name))
    return Question(**given)


def _ask_named(name: str) -> Ask:
    if name not in ASKS:
        hint = nearest_or(f"known: {', '.join(_HINTS)}", name, _HINTS)
        raise InputError(f"a plan has no argument {name!r}", hint, field=name)
    return ASKS[name]


def _plain(ask: Ask, value: object) -> object:
    """Return a plain text, number or boolean for a notebook's value: an array's number, a path."""
    if hasattr(value, "__fspath__"):
        value = str(value)
    if isinstance(value, str) and ask.name in WITH_UNITS:
        return ask.read(value)
    if ask.name == "recompute" and isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, float):
        is_count = ask.name in WITH_UNITS and value.is_integer()
        return int(value) if is_count else float(value)
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    return int(cast("Any", value)) if is_whole else value


WITH_UNITS = frozenset({"train_tokens", "tokens", "seq", "vocab", "memory_limit", "memory_taken"})
"""Fields whose texts have a unit, such as "8k" or "40GiB"."""
