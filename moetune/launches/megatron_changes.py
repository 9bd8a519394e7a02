"""Changes of Megatron's arguments for another layout, and a copy of a script with them.

Keys are those that exports write. The rest of the script stays as it is.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from moetune.domain.errors import InputError
from moetune.domain.megatron_rules import hybrid_stages
from moetune.domain.training import FoldedLayout
from moetune.export.keys import Value, keys_of, write_keys
from moetune.export.megatron import NO_ARGUMENT
from moetune.export.megatron_values import SETTINGS, SHARED_CONNECTIONS, stage_letters
from moetune.export.planned import Planned
from moetune.launches.megatron import CONNECTIONS, STAGES, flag_of_key
from moetune.launches.reading import Given, Reading

_ATTRIBUTES = (
    "tp", "cp", "pp", "ep", "micro_batch", "recompute", "dispatcher", "overlap", "zero",
    "cuda_graphs", "offload_optimizer",
)  # fmt: skip
_FIRST_FSDP_STAGE = 2
_VALUE = r"(?:[ \t]+(?!--|\\|\)|#)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"\\)]+))"


def megatron_changes(
    reading: Reading, layout: FoldedLayout, facts: Collection[str]
) -> dict[str, Value]:
    """Return the keys whose value differs in another layout; None or False for a key to remove.

    Args:
        facts: facts of the target that must hold, such as `hides_gradients`.
    """
    planned = Planned(plan_id="", job=reading.job, layout=layout, target=reading.target)
    wanted = write_keys(SETTINGS, planned)
    names = [*_differences(reading.layout, layout), *facts]
    keys = [key for name in names for key in keys_of(SETTINGS, name) if key != NO_ARGUMENT]
    changes: dict[str, Value] = {
        key: wanted.get(key) for key in keys if wanted.get(key) != reading.values.get(key)
    }
    if layout.pp > 1 and reading.layout.stages_of(reading.decoder) != layout.stages_of(
        reading.decoder
    ):
        changes |= _stages(reading, layout, planned)
    elif layout.pp == 1 < reading.layout.pp:
        changes |= dict.fromkeys(STAGES)
    return {key: value for key, value in (changes | _with(reading, layout, changes)).items()
            if _differs(reading.values.get(key), value)}  # fmt: skip


def _differs(before: Value, after: Value) -> bool:
    return before != after and not (before in (None, False) and after in (None, False))


def _differences(before: FoldedLayout, after: FoldedLayout) -> Iterator[str]:
    for name in _ATTRIBUTES:
        if getattr(before, name) != getattr(after, name):
            yield name
    if before.offload_optimizer != after.offload_optimizer:
        yield "optimizer"
    if before.offload_activations != after.offload_activations:
        yield "offload_activations"
    if after.recompute and not before.recompute:
        yield "groups_experts"


def _stages(reading: Reading, layout: FoldedLayout, planned: Planned) -> dict[str, Value]:
    """Return the keys of the pipeline stages; even stages need only the virtual stages' number."""
    changes: dict[str, Value] = dict.fromkeys(STAGES)
    layers, is_even = reading.decoder.num_layers, layout.stages is None
    is_even = is_even or layout.stages == layout.even_stages(reading.decoder)
    if is_even and not layers % layout.num_stages:
        virtual = {"num_virtual_stages_per_pipeline_rank": layout.vpp}
        return {**changes, **(virtual if layout.vpp > 1 else {})}
    if not reading.decoder.has_mamba:
        return {**changes, "pipeline_model_parallel_layout": stage_letters(planned)}
    # `validate_args` refuses a layout for hybrids: only their first and last stage may differ
    sizes = hybrid_stages(layout, reading.decoder)
    names = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
    return changes | dict(zip(names, (sizes[0], sizes[-1]), strict=True))


def _with(reading: Reading, layout: FoldedLayout, changes: Mapping[str, Value]) -> dict[str, Value]:
    """Return the further keys that the changed keys need."""
    more: dict[str, Value] = {}
    is_routed = reading.decoder.num_moe_layers > 0
    says_etp = reading.values.get("expert_tensor_parallel_size") is not None
    if is_routed and layout.etp != (reading.layout.etp if says_etp else layout.tp):
        more["expert_tensor_parallel_size"] = layout.etp
    if layout.tp > 1 and "tensor_model_parallel_size" in changes:
        more["sequence_parallel"] = True
    if changes.get("moe_token_dispatcher_type") == "flex":
        more["moe_router_dtype"] = "fp32"
    if layout.zero >= _FIRST_FSDP_STAGE and reading.layout.zero < _FIRST_FSDP_STAGE:
        more["ckpt_format"] = "fsdp_dtensor"
    runs_streams = layout.overlap == "batch" or layout.zero >= _FIRST_FSDP_STAGE
    if runs_streams and reading.values.get(CONNECTIONS) == 1:
        more[CONNECTIONS] = SHARED_CONNECTIONS
    return more


def argument_words(changes: Mapping[str, Value]) -> str:
    """Return changes as arguments: "--expert-model-parallel-size 8, without --recompute-method"."""
    given, left_out = [], []
    for key, value in changes.items():
        if value in (None, False):
            left_out.append(flag_of_key(key))
        else:
            given.append(argument_text(key, value))
    return ", ".join([" ".join(given)] * bool(given) + [f"without {flag}" for flag in left_out])


def argument_text(key: str, value: Value) -> str:
    """Return a key with its value as an argument."""
    if key == CONNECTIONS:
        return f"{key}={value}"
    flag = flag_of_key(key)
    if value is True:
        return flag
    if isinstance(value, tuple):
        return f"{flag} {' '.join(map(str, value))}"
    text = str(value)
    return f"{flag} '{text}'" if set(text) & set("*|") else f"{flag} {text}"


def edit_script(text: str, given: Mapping[str, Given], changes: Mapping[str, str]) -> str:
    """Return the script with arguments changed in their lines.

    Args:
        given: the script's arguments, by key.
        changes: arguments by key, with their values; "" to remove an argument.

    Raises:
        InputError: no line of the file has an argument as it is written.
    """
    lines = text.splitlines(keepends=True)
    added = []
    for key, argument in changes.items():
        if key not in given:
            added.append(argument)
            continue
        place = given[key]
        line = lines[place.line - 1] if place.line else ""
        plain = argument.replace("\\", r"\\")
        changed, count = re.subn(_of(place.written), plain, line, count=1)
        if not count:
            where = f"line {place.line}" if place.line else place.file or "the words behind --"
            raise InputError(
                f"{place.written} cannot be changed in {where}", f"write it by hand: {argument}"
            )
        lines[place.line - 1] = changed
    if added:
        flags = (place for place in given.values() if place.written.startswith("--"))
        anchor = next((place for place in flags if place.line), None)
        if anchor is None:
            raise InputError("no line of the file has an argument", "add them by hand")
        line = lines[anchor.line - 1]
        lines[anchor.line - 1] = re.sub(
            re.escape(anchor.written) + r"(?![\w-])",
            lambda match: f"{' '.join(added)} {match[0]}", line, count=1,
        )  # fmt: skip
    return "".join(lines)


def _of(written: str) -> str:
    """Return the pattern of an argument with its values in a line."""
    return rf"{re.escape(written)}(?![\w-])(?:=\S+|{_VALUE}*)"
