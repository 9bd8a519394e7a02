"""The job and the layout of Megatron-LM's arguments, and of ms-swift's that it passes on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moetune.domain.errors import InputError
from moetune.domain.pipeline import (
    StageLetters,
    even_stages,
    read_stages,
    stage_words,
    stages_of_sizes,
)
from moetune.domain.targets import MegatronCore, Target, find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.tuning import ModelPart
from moetune.export.keys import Value, read_settings
from moetune.export.megatron import FLAGS, NEGATIVES
from moetune.export.megatron_optimizer import given_optimizer
from moetune.export.megatron_values import SETTINGS
from moetune.launches.arguments import Argument, Launch, check_values
from moetune.launches.megatron_precision import (
    PRECISION,
    WEIGHTS,
    precision_facts,
    precision_problems,
)
from moetune.launches.megatron_sizes import SIZES, TOKENIZER, recognise
from moetune.launches.reading import Asked, Given, Problem, Reading, Row, lines_of, rows_of
from moetune.launches.tuning import GivenAdapters, given_tuning, swift_adapters

STAGES = (
    "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_FEATURES = (
    "tp_comm_overlap", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "moe_enable_deepep", "moe_shared_expert_overlap", "moe_permute_fusion", "ckpt_format",
    "use_torch_fsdp2", "recompute_activations", "use_custom_fsdp", *PRECISION,
)  # fmt: skip
KEYS = frozenset(
    {*(key for setting in SETTINGS for key in setting.keys), *STAGES, *_FEATURES, *SIZES}
)
"""Keys that set a layout, a job or a model's sizes."""
_MAY_BE_NONE = frozenset({"cpu_offloading_num_layers", "mtp_num_layers", "recompute_num_layers"})
_NEEDED = (("micro_batch_size", "train", 1), ("seq_length", "model", 4096))
"""Required fields, with their section in Megatron-Bridge and a usual value."""
_NUMBERS = frozenset(
    {key for setting in SETTINGS for key, default in setting.keys.items() if key.endswith("_size")}
    | {key for key in SIZES if key.startswith(("num_", "kv_", "q_lora")) or key.endswith("_size")}
    | {key for key in STAGES if "num" in key or key.endswith("_size")}
    | {"seq_length", "moe_router_topk", "cpu_offloading_num_layers", "mtp_num_layers"}
) - {"window_size"}
"""Keys whose value is a whole number."""
_LISTS = frozenset({"recompute_modules", "cuda_graph_modules", "cuda_graph_scope"})
_SWITCHES = frozenset(
    {key for setting in SETTINGS for key, default in setting.keys.items() if default is False}
    | {"swiglu", "group_query_attention", "untie_embeddings_and_output_weights", "qk_layernorm",
       "multi_latent_attention", "add_qkv_bias", "squared_relu", "moe_permute_fusion",
       "tp_comm_overlap", "cross_entropy_loss_fusion"}
)  # fmt: skip
"""Keys without a value."""
_VALUED = KEYS - _SWITCHES - TOKENIZER
"""Keys that need a value."""
_FIELDS = MappingProxyType({flag.removeprefix("--"): field for field, flag in FLAGS.items()})
_FALSE = MappingProxyType({flag.removeprefix("--"): field for field, flag in NEGATIVES.items()})
_SHARDING_CORE: MegatronCore = (0, 18)
"""First core whose FSDP shards all states if no strategy is given."""
_OLDER: Mapping[str, tuple[str, Value]] = MappingProxyType({
    "recompute_activations": ("recompute_granularity", "selective"),
    "moe_enable_deepep": ("moe_flex_dispatcher_backend", "deepep"),
    "use_custom_fsdp": ("use_megatron_fsdp", True), **WEIGHTS,
})  # fmt: skip
"""Older arguments, with the field and the value that they mean."""
_SWIFT_KEYS = MappingProxyType({"max_length": "seq_length"})
_SWIFT_DEFAULTS: Mapping[str, Value] = MappingProxyType({
    "micro_batch_size": 1, "global_batch_size": 16, "recompute_granularity": "selective",
    "recompute_modules": ("core_attn",), "use_distributed_optimizer": True, "bf16": True,
    "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
})  # fmt: skip
"""Defaults of modelscope/ms-swift, `swift/megatron/arguments/megatron_args.py`."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable that rules of the arguments check."""
SWIFT = "megatron"
"""Program of ms-swift's command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronArguments:
    """Arguments as fields of Megatron's classes.

    Args:
        given: the given arguments by field.
        values: given values, and defaults that differ from those of the settings.
        problems: problems of the arguments, such as two values for a field.
        adapters: the adapters, if only they train; else None.
        frozen: parts that do not train.
    """

    given: Mapping[str, Given]
    values: Mapping[str, Value]
    problems: tuple[Problem, ...]
    adapters: GivenAdapters | None = None
    frozen: tuple[ModelPart, ...] = ()


def read_megatron(launch: Launch, asked: Asked) -> Reading:
    """Return the training that a command with Megatron's arguments starts.

    Raises:
        InputError: a value is missing or wrong, or the model is not known.
    """
    target = find_target(asked.target or "megatron")
    if launch.program == SWIFT:  # its adapters are those of mcore-bridge
        target = replace(target, adapters=("each",), adapter_zero=(0, 1), freezes=True)
    arguments = _fields_of(launch, target)
    model = asked.model or _swift_model(launch)
    reading = reading_of(
        arguments, target, launch.ranks(asked), model=model, line=launch.line,
        reads_files=asked.reads_files,
    )  # fmt: skip
    if launch.is_mindspeed and not reading.model_words.endswith(("its sizes", "its name")):
        what = f"line {launch.line}: arguments of MindSpeed may change the model"
        raise InputError(f"{what}, whose sizes are no known model's", "name it with --model")
    return reading


def reading_of(
    arguments: MegatronArguments, target: Target, ranks: int, *, model: str | None, line: int,
    reads_files: bool,
) -> Reading:  # fmt: skip
    """Return the training that fields of Megatron's classes describe.

    Args:
        model: its name; None to recognise it by its sizes.
        line: line of the command that starts the training.
        reads_files: whether the model may be a file.

    Raises:
        InputError: a value is missing or wrong, or the model is not known.
    """
    values = arguments.values
    for key in sorted(_NUMBERS & values.keys()):
        _check_number(key, values[key], arguments.given.get(key))
    for key, section, usual in _NEEDED:
        if not isinstance(values.get(key), int):
            flag = flag_of_key(key)
            word = f"{section}.{key}={usual}" if target.name == "bridge" else f"{flag} {usual}"
            raise InputError(f"line {line}: nothing gives {flag}", f"give it, or add -- {word}")
    decoder, words = recognise(values, name=model, reads_files=reads_files)
    settings = read_settings(SETTINGS, values)
    if settings["dispatcher"] is None:
        kind = values.get("moe_token_dispatcher_type")
        name = values.get("moe_flex_dispatcher_backend") if kind == "flex" else kind
        raise InputError(
            f"{name} is no dispatcher that is planned",
            "use allgather, alltoall, or flex with deepep or hybridep",
        )
    layout, optimizer = _layout(settings, values, ranks, decoder), given_optimizer(values)
    job = TrainingJob(
        decoder=decoder, world_size=ranks, length=settings["length"],
        global_batch=settings["global_batch"] or layout.micro_batch * layout.dp,
        dtype=settings["narrow"] or settings["half"] or "bfloat16",
        optimizer=optimizer.name, leaves_room=decoder.num_moe_layers > 0,
        tuning=given_tuning(arguments.adapters, arguments.frozen, decoder),
    )  # fmt: skip
    return Reading(
        target=target, decoder=decoder, model_words=words, job=job, layout=layout,
        given=arguments.given, values=values, facts=_facts(settings, values, target),
        rows=tuple(_rows(arguments.given, layout, job)), lines=_lines(arguments.given),
        problems=(*arguments.problems,
                  *precision_problems(values, arguments.given, optimizer)),
    )  # fmt: skip


def _check_number(key: str, value: Value, given: Given | None) -> None:
    """Raise InputError unless a given size is a whole number of at least 1, or 0 where allowed."""
    least = 0 if key in _MAY_BE_NONE else 1
    if value is None or (isinstance(value, int) and value is not True and value >= least):
        return
    written = f"{given.file or f'line {given.line}'}: {given.written}" if given else key
    is_key = given is not None and not given.written.startswith("--")
    hint = f"give a number{f', here or as -- {given.written}=2' if given and is_key else ''}"
    is_set = f"is {value!r}, which is no number from {least} on"
    raise InputError(f"{written} {'has no value here' if value is True else is_set}", hint)


def _swift_model(launch: Launch) -> str | None:
    """Return the model that ms-swift's command names."""
    if launch.program != SWIFT:
        return None
    named = (argument.values[0] for argument in launch.arguments
             if argument.name == "model" and argument.values)  # fmt: skip
    word = next(named, None)
    check_values([] if word is None else [("--model", word)])
    return None if word is None else word.text


def _fields_of(launch: Launch, target: Target) -> MegatronArguments:
    is_swift = launch.program == SWIFT
    given: dict[str, Given] = {}
    problems: list[Problem] = []
    check_values(
        (f"--{argument.name}", argument.values[0]) for argument in launch.arguments
        if argument.values and _field(argument.name, is_swift=is_swift)[0] in _VALUED
    )  # fmt: skip
    for argument in launch.arguments:
        field, is_on = _field(argument.name, is_swift=is_swift)
        if field not in KEYS:
            continue
        value = _value(argument, field) if is_on else False
        if field in _OLDER and value:
            field, value = _OLDER[field]
        problems += _unset(argument)
        written = f"--{argument.name}"
        before = given.get(field)
        if before is not None and before.value != value:
            places = f"{before.value} {before.where} and {value} {argument.where}"
            problems.append(
                Problem(severity="note", line=argument.shown, what=f"{written} is {places}",
                        why="the last value counts", fix="keep one of them")
            )  # fmt: skip
        given[field] = Given(value=value, written=written, line=argument.line, file=argument.file)
    word = launch.environment.get(CONNECTIONS)
    if word is not None and not word.missing:
        value = plain_value(word.text)
        given[CONNECTIONS] = Given(value=value, written=CONNECTIONS, line=word.line, file=word.file)
    values = {field: place.value for field, place in given.items()}
    defaults: dict[str, Value] = dict(_SWIFT_DEFAULTS) if is_swift else {}
    defaults |= {"use_distributed_optimizer": True, "bf16": True} if launch.is_slime else {}
    if (target.core or (0, 16)) < _SHARDING_CORE:
        defaults["data_parallel_sharding_strategy"] = "no_shard"
    return MegatronArguments(
        given=given, values=resolve(defaults | values), problems=tuple(problems),
        adapters=swift_adapters(launch) if is_swift else None,
    )  # fmt: skip


def _unset(argument: Argument) -> Iterator[Problem]:
    """Yield a note for each unset variable in an argument's words, which is read as empty."""
    is_of_tokenizer = argument.name.replace("-", "_") in TOKENIZER
    for word in argument.values:
        if word.missing.startswith("$") and not word.text and not is_of_tokenizer:
            what = f"{word.missing} has no value here, and is read as empty"
            line = None if word.file else word.line
            yield Problem(severity="note", line=line, what=what, fix="--set NAME=VALUE")


def _field(name: str, *, is_swift: bool) -> tuple[str, bool]:
    """Return the field of an argument, "" for a wrong spelling, and whether the field is on."""
    if is_swift:
        plain = name.replace("-", "_")
        return _SWIFT_KEYS.get(plain, _FIELDS.get(name.replace("_", "-"), plain)), True
    if "_" in name:
        return "", True
    if name in _FALSE:
        return _FALSE[name], False
    return _FIELDS.get(name, name.replace("-", "_")), True


def resolve(values: dict[str, Value]) -> dict[str, Value]:
    """Return values, with the fields that older arguments mean."""
    values |= dict(means for older, means in _OLDER.items() if values.get(older))
    if values.get("optimizer") == "dist_muon":
        values["use_distributed_optimizer"] = True
    if values.get("fp16") and not values.get("accumulate_allreduce_grads_in_fp32"):
        values["grad_reduce_in_bf16"] = True  # gradients have the parameters' type
    return values


def _value(argument: Argument, field: str) -> Value:
    """Return the value of an argument, which is its first word; the fields of `_LISTS` take all."""
    texts = [word.text for word in argument.values if not word.missing]
    if field in _LISTS:
        return tuple(texts)
    return plain_value(texts[0]) if texts else True


def plain_value(text: str) -> Value:
    """Return a word as a number, a Boolean, None or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "True": True, "false": False, "False": False, "none": None,
            "None": None, "null": None}.get(text, text)  # fmt: skip


def _layout(
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    ranks: int,
    decoder: Any,  # noqa: ANN401
) -> FoldedLayout:
    """Return the layout; if the ranks do not divide, it has as many replicas as fit."""
    tp, cp, pp = (int(settings[name] or 1) for name in ("tp", "cp", "pp"))
    is_routed = decoder.num_moe_layers > 0
    stages = _stages(values, pp, decoder)
    vpp = 1 if stages is None else max(1, len(stages) // pp)
    return FoldedLayout(
        dp=max(1, ranks // (tp * cp * pp)), tp=tp, cp=cp, pp=pp, vpp=vpp, stages=stages,
        ep=int(settings["ep"] or 1), etp=int(settings["etp"] or tp) if is_routed else 1,
        micro_batch=int(settings["micro_batch"]), recompute=settings["recompute"],
        dispatcher=settings["dispatcher"] if is_routed else "all_to_all",
        overlap=settings["overlap"], zero=settings["zero"], cuda_graphs=settings["cuda_graphs"],
        offload_activations=int(settings["offload_activations"] or 0) / decoder.num_layers,
        offload_optimizer=settings["offload_optimizer"],
    )  # fmt: skip


def _stages(values: Mapping[str, Any], pp: int, decoder: Any) -> StageLetters | None:  # noqa: ANN401
    """Return the modules of each stage; None without a pipeline."""
    if pp == 1:
        return None
    if letters := values.get("pipeline_model_parallel_layout"):
        return read_stages(str(letters))
    predictions, layers = len(decoder.predictions), decoder.num_layers
    vpp = _virtual(values, pp, layers)
    sizes = [word.count("t") for word in even_stages(layers, predictions, pp * vpp)]
    ends = [values.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    if any(isinstance(size, int) for size in ends):
        sizes = _uneven_sizes(layers, pp, vpp, ends)
    adds_embedding, adds_loss = (values.get(f"account_for_{end}_in_pipeline_split")
                                 for end in ("embedding", "loss"))  # fmt: skip
    if adds_embedding or adds_loss:
        per_stage, rest = divmod(layers + bool(adds_embedding) + bool(adds_loss), pp * vpp)
        sizes = [per_stage] * (pp * vpp)
        sizes[0] -= bool(adds_embedding)
        sizes[-1] += rest - bool(adds_loss)
    return stages_of_sizes(sizes, predictions)


def _virtual(values: Mapping[str, Any], pp: int, layers: int) -> int:
    """Return the number of stages per pipeline rank, which three arguments may set."""
    counts = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    for key in counts:
        if values.get(key):
            return int(values[key])
    if per_stage := values.get("num_layers_per_virtual_pipeline_stage"):
        more = bool(values.get("account_for_embedding_in_pipeline_split")) + bool(
            values.get("account_for_loss_in_pipeline_split")
        )
        return max(1, (layers + more) // pp // int(per_stage))
    return 1


def _uneven_sizes(layers: int, pp: int, vpp: int, ends: list[Any]) -> list[int]:
    """Return the layers of each stage if the first or the last rank has a different number."""
    first, last = ends
    num_inner = pp - (first is not None) - (last is not None)
    per_rank = (layers - (first or 0) - (last or 0)) // max(1, num_inner)
    ranks = [per_rank] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return [ranks[stage % pp] // vpp for stage in range(pp * vpp)]


def _facts(
    settings: Mapping[str, Any], values: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    """Return the facts of the target that the arguments set."""
    fusion = values.get("cross_entropy_loss_fusion") and values.get("cross_entropy_fusion_impl")
    return {
        "hides_gradients": settings["hides_gradients"],
        "splits_sequence": settings["splits_sequence"] or settings["tp"] == 1,
        "multiplies_in_pieces": bool(values.get("tp_comm_overlap")),
        "logit_bytes": 2 if fusion == "te" else target.logit_bytes,
        **precision_facts(settings, values, target, given_optimizer(values)),
    }


def _lines(given: Mapping[str, Given]) -> dict[str, int]:
    lines = lines_of(SETTINGS, given)
    stages = [given[key].line for key in STAGES if key in given and not given[key].file]
    return lines | ({"stages": stages[0], "vpp": stages[0]} if stages else {})


def flag_of_key(key: str) -> str:
    """Return the argument of a field."""
    return FLAGS.get(key, "--" + key.replace("_", "-"))


def _rows(given: Mapping[str, Given], layout: FoldedLayout, job: TrainingJob) -> Iterator[Row]:
    """Yield rows of what runs, and of the pipeline stages, which several arguments may set."""
    yield from rows_of(SETTINGS, given, layout, job, flag_of_key)
    if layout.stages is not None:
        place = next((given[key] for key in STAGES if key in given), None)
        yield Row(
            name="stages", value=stage_words(layout.stages), line=place.line if place else None,
            key=place.written if place else flag_of_key(STAGES[0]),
            file=place.file if place else "",
        )  # fmt: skip
