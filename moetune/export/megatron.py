"""Megatron-LM: a shell script with the arguments of the model and of its layout."""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.export.keys import Value, write_keys
from moetune.export.megatron_model import MegatronModel, megatron_model
from moetune.export.megatron_values import JOB, megatron_values, stage_letters
from moetune.export.planned import Export, Planned, remarks

FLAGS = MappingProxyType({
    "fp8": "--fp8-format", "fp4": "--fp4-format", "num_moe_experts": "--num-experts",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p", "layernorm_epsilon": "--norm-epsilon",
})  # fmt: skip
"""Fields whose flag has another name."""
NEGATIVES = MappingProxyType({
    "add_bias_linear": "--disable-bias-linear", "apply_rope_fusion": "--no-rope-fusion",
    "dsa_indexer_rotate_activation": "--no-dsa-indexer-rotate-activation",
})  # fmt: skip
"""Flags of fields whose value is False."""
NO_ARGUMENT = "cpu_offloading"
"""A field without a flag: it follows from `cpu_offloading_num_layers`."""
_LISTS = frozenset({"moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq"})
"""Fields that a flag takes as a Python list."""
_FILE = "megatron_layout.sh"
_DATA = (
    "Give the data's, the tokenizer's and the schedule's arguments behind the script's name, such "
    "as --data-path, --tokenizer-type, --lr and --train-iters; it passes them on."
)
_DELAYED = "Delayed weight gradients need --transformer-impl transformer_engine, 2.8 or newer."
_ROTATED = "The indexer of keys needs the package fast_hadamard_transform (dsa.py)."
_NO_NAN_CHECK = "--no-check-for-nan-in-loss-and-grad"
_HYBRID_SCRIPTS = MappingProxyType({
    (0, 16): ("pretrain_mamba.py", "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"),
    (0, 18): (
        "pretrain_hybrid.py", "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
    ),
})  # fmt: skip
"""Script and `--spec` of hybrids with Mamba, by the first core that they are for."""


def megatron_export(planned: Planned) -> Export:
    """Return the script, which passes on the arguments of the data and of the schedule."""
    values = megatron_values(planned)
    model = megatron_model(planned.decoder, planned.core, planned.config, planned.job.length)
    notes = {"delay_wgrad_compute": _DELAYED}
    said = [note for field, note in notes.items() if field in values.model]
    if model.fields.get("dsa_indexer_topk") and "dsa_indexer_rotate_activation" not in model.fields:
        said.append(_ROTATED)
    text = (
        "#!/usr/bin/env bash\n"
        f"{remarks(planned, tuple(model.notes), planned.where_to_start, _DATA, *said)}"
        "set -euo pipefail\n"
        f"{planned.asks_for_address}"
        f"export CUDA_DEVICE_MAX_CONNECTIONS={values.max_connections}\n"
        f"MODEL=(\n{_lines(_model_arguments(planned, model))})\n"
        f"LAYOUT=(\n{_lines(_arguments(planned, model))})\n"
        f'{planned.torchrun} {_script(planned, model)[0]} "${{MODEL[@]}}" "${{LAYOUT[@]}}" "$@"\n'
    )
    return Export(
        text=text, file_name=_FILE, launch=f"bash {_FILE} DATA_ARGUMENTS",
        not_expressed=tuple(model.notes),
    )  # fmt: skip


def _lines(arguments: Iterator[str]) -> str:
    return "".join(f"    {line}\n" for line in arguments)


def _script(planned: Planned, model: MegatronModel) -> tuple[str, str]:
    """Return the script that trains the model, and its `--spec`."""
    if not model.is_hybrid:
        return "pretrain_gpt.py", ""
    since = max(core for core in _HYBRID_SCRIPTS if core <= planned.core)
    return _HYBRID_SCRIPTS[since]


def _model_arguments(planned: Planned, model: MegatronModel) -> Iterator[str]:
    _, spec = _script(planned, model)
    fields = dict(model.fields)
    if model.is_hybrid and planned.core >= _HYBRID_PATTERN:
        del fields["is_hybrid_model"], fields["num_layers"]  # which follow from the pattern
    if "group_query_attention" not in model.flags:
        fields.pop("num_query_groups", None)
    for name, value in (fields | model.flags).items():
        yield from _argument(name, value)
    if spec:
        yield f"--spec {spec}"
    yield "--transformer-impl transformer_engine"
    yield "--attention-dropout 0.0"
    yield "--hidden-dropout 0.0"


_HYBRID_PATTERN = (0, 17)
"""First core that takes the layers and stages of hybrids from `--hybrid-layer-pattern`."""


def _arguments(planned: Planned, model: MegatronModel) -> Iterator[str]:
    values = megatron_values(planned)
    for field, value in values.model.items():
        if field != NO_ARGUMENT:
            yield from _argument(field, value)
    if planned.layout.pp > 1 and not model.is_hybrid:
        yield f"--pipeline-model-parallel-layout '{stage_letters(planned)}'"
    if planned.layout.cuda_graphs == "full":
        yield _NO_NAN_CHECK
    for field, value in (write_keys(JOB, planned) | values.ddp | values.optimizer).items():
        yield from _argument(field, value)
    if "use_megatron_fsdp" in values.ddp:
        yield "--ckpt-format fsdp_dtensor"
        yield "--no-gradient-accumulation-fusion"


def _argument(field: str, value: Value) -> Iterator[str]:
    flag = FLAGS.get(field, "--" + field.replace("_", "-"))
    match value:
        case bool() | None:
            if value:
                yield flag
            elif value is False and field in NEGATIVES:
                yield NEGATIVES[field]
        case tuple() if field in _LISTS:
            yield f"{flag} '[{','.join(map(str, value))}]'"
        case tuple() if field == "window_size":
            yield f"{flag} {','.join(map(str, value))}"
        case tuple():
            yield f"{flag} {' '.join(map(str, value))}"
        case str() if set(value) & set("*|/"):
            yield f"{flag} '{value}'"
        case _:
            yield f"{flag} {value}"
